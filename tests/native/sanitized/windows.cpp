// Windows that grow with several NVLink domains, and that are given back and made again.
#include "c_interface/handles.h"
#include "objects.h"

extern "C" int fake_num_open_windows();

namespace {

constexpr int kLongHidden = 8192;  // a batch of such rows is sent in phases

// A plan of a batch of which this rank has few tokens, and a dispatch and a combine of long rows.
void make_calls(Objects& o, int most_tokens) {
  const Numbers routes = o.new_routes(kPairs, kAssignments, most_tokens);
  const Numbers x(ncclepBfloat16, {kTokens, kLongHidden}),
      rows(ncclepBfloat16, {kRows, kLongHidden});
  ncclepPlanConfig_t config = o.plan_config(kRows);
  config.most_tokens = most_tokens;
  config.routes = routes;
  o.make_plan(config);
  ncclepRows_t given = o.rows_of();
  given.tokens = x;
  given.rows = rows;
  given.sums = nullptr;  // with several domains no CTA only sends
  must(ncclepDispatch(o.group, o.plan, &given));
  REQUIRE(standin::launched.num_phases > 1);
  must(ncclepCombine(o.group, o.plan, &given));
  REQUIRE(standin::launched.num_phases > 1);
}

}  // namespace

// What the host passes to kernels then.
void domains() {
  Objects o;
  o.make();
  // More arrives than there is room for: what the plan has for other domains stays.
  standin::plans = {kRows, kPairs + 1, kAssignments};
  o.make_plan();
  REQUIRE(!o.wait_for_sizes().has_room);
  const Numbers more = o.new_routes(kPairs + 1, kAssignments);
  must(ncclepPlanReceive(o.plan, o.group, more, kPairs + 1, kAssignments, 8, pointer(kStream)));
  o.dispatch();
  REQUIRE(standin::launched.num_rounds == 1);

  // Windows grow between two plans.  The first plan in new ones waits for no routes of the one
  // before; and what was one round before is as many as the new size needs.
  o.reserve(1024, 2 * kLongHidden);
  make_calls(o, 1024);
  REQUIRE(standin::launched.received == 0 && standin::launched.num_rounds == 1);
  const std::size_t least = o.info().num_bytes;
  o.reserve(1024, 16 * kLongHidden);
  make_calls(o, 1024);
  REQUIRE(standin::launched.received == 0 && standin::launched.num_rounds > 1);
  REQUIRE(o.info().num_bytes < 8 * least);

  // Windows are released and made again, a low-latency object closes, then the group.
  const int before = standin::launched.num_closes;
  o.group->group->release_windows();
  REQUIRE(standin::launched.num_closes == before + 1);
  o.reserve(1024, 16 * kLongHidden);
  make_calls(o, 1024);
  REQUIRE(standin::launched.received == 0 && standin::launched.num_rounds > 1);
  o.close();
  REQUIRE(standin::launched.num_closes == before + 3);
}

// A process that hands the GPU to another one and takes it back, 50 times: windows are gone in
// between, and a plan that was made before is as good afterwards.
void phases() {
  Objects o;
  o.make();
  ncclep::native::Group& group = *o.group->group;
  o.make_plan(kRows);
  must(ncclepLowLatencyDestroy(std::exchange(o.low_latency, nullptr)));
  const std::size_t held = o.info().num_bytes;
  const int allocations = standin::num_allocations();
  for (int phase = 0; phase < 50; ++phase) {
    o.dispatch();
    group.release_windows();
    group.release_windows();  // there is nothing left to give back
    REQUIRE(o.info().num_bytes == 0 && fake_num_open_windows() == 0);
    must_refuse([&] { o.dispatch(); });
    std::int64_t size = 0;  // the memory of a combine is allocated before there are windows for it
    must(ncclepCombineScratch(o.group, o.plan, 8, 64, &size));
    REQUIRE(size == kPairs);
    o.reserve(kTokens);
    REQUIRE(o.info().num_bytes == held && standin::num_allocations() == allocations);
  }
  // Graphs that held calls were dropped: windows may change again, and may not under new graphs.
  standin::capture(kStream);
  o.dispatch();
  standin::capture(0);
  REQUIRE(o.info().was_captured);
  group.release_windows();
  REQUIRE(!o.info().was_captured);
  o.reserve(800);
  // Kernels that have yet to run use the windows, which stay.
  standin::hold(kStream);
  o.dispatch();
  bool is_late = false;
  try {
    group.release_windows();
  } catch (const ncclep::PeerError&) {
    is_late = true;
  }
  REQUIRE(is_late && fake_num_open_windows() == 2);
  standin::release();
}
