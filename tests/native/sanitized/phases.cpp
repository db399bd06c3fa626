// Windows that are given back and made again.
#include "c_interface/handles.h"
#include "objects.h"

extern "C" int fake_num_open_windows();

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
