// What the host passes to kernels of a group of several NVLink domains.
#include "c_interface/handles.h"
#include "objects.h"

namespace {

constexpr int kLongHidden = 8192;  // a batch of such rows is sent in phases

// A plan of a batch of which this rank has few tokens, and a dispatch and a combine of long rows.
void make_calls(Objects& o, int most_tokens) {
  std::int64_t size = 0;
  must(ncclepRoutesSize(o.group, kPairs, kAssignments, most_tokens, &size));
  const Numbers routes(ncclepInt32, {size});
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

void reserve(const Objects& o, int num_tokens, std::size_t row_bytes) {
  const ncclepShape_t shape{sizeof(shape), num_tokens, kTopK, row_bytes};
  must(ncclepGroupReserve(o.group, &shape, pointer(kStream)));
}

}  // namespace

void domains() {
  Objects o;
  o.make();
  // More arrives than there is room for: what the plan has for other domains stays.
  standin::plans = {kRows, kPairs + 1, kAssignments};
  o.make_plan();
  REQUIRE(!o.wait_for_sizes().has_room);
  std::int64_t size = 0;
  must(ncclepRoutesSize(o.group, kPairs + 1, kAssignments, 128, &size));
  const Numbers more(ncclepInt32, {size});
  must(ncclepPlanReceive(o.plan, o.group, more, kPairs + 1, kAssignments, 8, pointer(kStream)));
  o.dispatch();
  REQUIRE(standin::launched.num_rounds == 1);

  // Windows grow between two plans.  The first plan in new ones waits for no routes of the one
  // before; and what was one round before is as many as the new size needs.
  reserve(o, 1024, 2 * kLongHidden);
  make_calls(o, 1024);
  REQUIRE(standin::launched.received == 0 && standin::launched.num_rounds == 1);
  const std::size_t least = o.info().num_bytes;
  reserve(o, 1024, 16 * kLongHidden);
  make_calls(o, 1024);
  REQUIRE(standin::launched.received == 0 && standin::launched.num_rounds > 1);
  REQUIRE(o.info().num_bytes < 8 * least);

  // Windows are released and made again, a low-latency object closes, then the group.
  const int before = standin::launched.num_closes;
  o.group->group->release_windows();
  REQUIRE(standin::launched.num_closes == before + 1);
  reserve(o, 1024, 16 * kLongHidden);
  make_calls(o, 1024);
  REQUIRE(standin::launched.received == 0 && standin::launched.num_rounds > 1);
  o.close();
  REQUIRE(standin::launched.num_closes == before + 3);
}
