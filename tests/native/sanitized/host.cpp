// The host's C++ through the C interface, over a GPU that stands in for one, a case at a time.
//
//     host CASE LIBNCCL [MISTAKE]
//
// LIBNCCL: fake_nccl.c.  MISTAKE: the number of one that is made (test_sanitizers.py).
#include <climits>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "objects.h"
#include "standin.h"

extern "C" {
void fake_make_windows(int num_domains);
void fake_wait_for_ranks(int milliseconds);
int fake_num_alive();
int fake_num_open_windows();
std::size_t __sanitizer_get_current_allocated_bytes();  // of the heap
}

namespace {

// Makes one of everything, uses it and destroys it.
void live() {
  Objects o;
  o.make();
  o.reserve(kTokens + 200);
  ncclepPlanConfig_t config = o.plan_config(kRows);
  config.kept = o.kept;
  config.lacked = o.lacked;
  o.make_plan(config);
  standin::capture(kStream);
  o.dispatch();
  standin::capture(0);
  REQUIRE(o.info().was_captured);
  const ncclepRows_t rows = o.rows_of();
  o.dispatch();
  must(ncclepCombine(o.group, o.plan, &rows));
  o.dispatch_few();
  const ncclepLowLatencyCombine_t returned = o.returned();
  must(ncclepLowLatencyCombine(o.low_latency, &returned));
  must(ncclepGroupCopyWaitedNs(o.group, Numbers(ncclepInt64, {1}), pointer(kStream)));
  must(ncclepGroupRefuse(o.group, ncclepPhaseDispatch, pointer(kStream)));
  must(ncclepGroupWait(o.group));
  o.close();
}

// Whether a life fails when one call does; whatever fails, nothing is left.
bool fails_and_leaves_nothing(bool is_nccl, int call) {
  const std::string what = "call " + std::to_string(call) + (is_nccl ? " of NCCL" : " of CUDA");
  for (int turn = 0;; ++turn) {  // the first turn may leave a longer text of the last error
    const std::size_t num_bytes = __sanitizer_get_current_allocated_bytes();
    const int num_windows = fake_num_open_windows();
    fail_after(is_nccl, call);
    bool has_failed = false;
    try {
      live();
    } catch (const Refused&) {
      has_failed = true;
    }
    fail_after(is_nccl, -1);
    // Windows that are open after a failed step stay, because closing them is collective.
    const int num_open = fake_num_open_windows();
    standin::require(fake_num_alive() - 2 * num_open + standin::num_allocations() == 0,
                     what + " fails: something is left");
    const bool is_leak = __sanitizer_get_current_allocated_bytes() > num_bytes;
    if (!is_leak || num_open > num_windows) return has_failed;
    standin::require(turn < 2, what + " fails: host memory is left");
  }
}

void failures() {
  live();
  for (const bool is_nccl : {true, false}) {
    int call = 0;
    while (fails_and_leaves_nothing(is_nccl, call)) ++call;
    REQUIRE(call > 10);
  }
}

// The stand-in ends the program when an operation does not wait for the one before, or waits for an
// event that is not its capture's.
void order() {
  Objects o;
  o.make();
  const ncclepGroup_t second = o.new_group();  // its ranks agree through NCCL
  o.make_plan(kRows);
  o.make_plan(o.plan_config(kRows, kOther), second);
  o.dispatch_few();
  o.dispatch(kOther, second);
  o.dispatch_few(kOther);
  o.dispatch();
  must(ncclepGroupRefuse(o.group, ncclepPhaseCombine, pointer(kOther)));

  // An operation waits for the one before, and for nothing that was queued after that.
  o.dispatch();
  standin::hold(kStream);
  o.dispatch(kOther, second);
  REQUIRE(!standin::is_held(kOther));
  o.dispatch();
  o.dispatch(kOther, second);
  REQUIRE(standin::is_held(kOther));
  standin::release_at_query(3);
  must(ncclepGroupWait(o.group));
  REQUIRE(!standin::is_held(kOther));

  // A stream is not the one that had its handle before.
  for (int turn = 0; turn < 2; ++turn) {
    standin::remake(kOther);
    o.dispatch();
    o.dispatch(kOther);
  }
  standin::remake(kOther);
  o.dispatch(kOther);

  // Captures: an order of their own in each, and none between them and what is not captured.
  standin::capture(kStream, kOther);
  o.dispatch();
  o.dispatch(kOther);
  standin::capture(kOther);
  o.dispatch(kOther);
  standin::capture(0);
  o.dispatch();
  REQUIRE(o.info().was_captured && !o.info(second).was_captured);
  standin::capture(kOther);
  o.dispatch_few(kOther);
  o.dispatch(kOther, second);
  standin::capture(0);
  o.dispatch(kOther, second);
  o.dispatch();
  REQUIRE(o.info(second).was_captured);
}

// How the host waits for a plan's sizes.
void sizes() {
  Objects o;
  o.make();
  const auto dispatch = [&] { o.dispatch(); };
  const auto wait = [&] { o.wait_for_sizes(); };
  standin::plans = {kRows, 2, 4};
  for (const int max_pairs : {1, 3}) {
    ncclepPlanConfig_t config = o.plan_config(0);
    config.max_pairs = max_pairs;
    config.max_assignments = max_pairs == 1 ? 6 : 3;
    o.make_plan(config);
    must_fail("not received", dispatch);  // the host does not know yet how much arrives
    REQUIRE(!o.wait_for_sizes().has_room);
    must_fail("room for " + std::to_string(max_pairs) + " pairs", dispatch);
    // Receiving that fails leaves the plan as it was: it was received, with routes that nothing had
    // written.
    const Numbers routes = o.new_routes(2, 4);
    for (const int num_sms : {0, 8}) {
      if (num_sms > 0) standin::fail_after(0);
      REQUIRE(ncclepPlanReceive(o.plan, o.group, routes, 2, 4, num_sms, pointer(kStream)) !=
              ncclepSuccess);
      standin::fail_after(-1);
      must_fail("room for " + std::to_string(max_pairs) + " pairs", dispatch);
    }
  }
  standin::plans = {kRows, 1, 2};
  const ncclepPlan_t before = o.plan;
  o.make_plan();
  const ncclepPlan_t last = std::exchange(o.plan, before);
  must_fail("not that of the last plan", wait);
  o.plan = last;
  REQUIRE(o.wait_for_sizes().has_room);
  o.dispatch();
  // A routing that is refused: the plan cannot be used.
  standin::plans.bad_rank = 4;
  o.make_plan();
  REQUIRE(o.wait_for_sizes().first_bad_rank == 3);
  must_fail("not received", dispatch);

  // What was queued before may take as long as it likes, also on a stream that this one waits for.
  standin::plans = {kRows, 1, 2};
  must(ncclepGroupBegin(o.group, 0.01, nullptr, nullptr));
  for (const std::uintptr_t stream : {kStream, kOther}) {
    standin::hold(stream);
    must(ncclepGroupRefuse(o.group, ncclepPhasePlan, pointer(stream)));
    o.make_plan();
    standin::release_at_query(100);
    REQUIRE(o.wait_for_sizes().num_rows == kRows);
  }
  // A kernel may not; nor may a device fail.
  standin::plans.late_words = ~0u;
  o.make_plan();
  must_fail("not count the rows of a plan within 0.02 s", wait);
  standin::fail_after(0);
  must_fail("waiting for a plan's rows", wait);
  standin::release();
  REQUIRE(o.wait_for_sizes().num_rows == kRows);  // it has come meanwhile
  // The caller ends a wait that may take as long as it likes.
  standin::plans.late_words = 0;
  standin::hold(kStream);
  o.make_plan();
  is_interrupted = true;
  must_fail("the caller ended the call", wait);
  is_interrupted = false;
  standin::release();

  // Words come in any order: none is taken before it is there.
  must(ncclepGroupBegin(o.group, 60, nullptr, nullptr));
  for (std::uint32_t word = 0; word < 4 + kLocal; ++word) {
    const std::uint32_t rows = 10 + word;
    standin::plans = {rows * kLocal, rows + 1, rows + 2, rows + 3, 1u << word};
    o.make_plan();
    standin::release_at_query(3);
    const ncclepPlanSizes_t found = o.wait_for_sizes();
    REQUIRE(found.num_rows == rows * kLocal && found.num_pairs == rows + 1);
    REQUIRE(found.num_assignments == rows + 2 &&
            found.first_bad_rank == static_cast<int>(rows + 2));
    for (int i = 0; i < kLocal; ++i) REQUIRE(o.rows_of_expert.data<std::int64_t>()[i] == rows);
  }
  standin::plans = {kRows, 1, 2, 0, 1, true};
  o.make_plan();
  standin::release_at_query(3);
  must_fail("the plan has failed on the device", wait);
  must_fail("rank 1 in plan", [&] { must(ncclepGroupBegin(o.group, 60, nullptr, nullptr)); });
}

// Of a rank that is late it was said that it had entered the call, whichever it had entered.
void late_ranks() {
  struct Case {
    std::uint64_t own_call, peer_call, said;
    ncclepReason_t reason;
  };
  for (const Case& each : {Case{0, 0, 0, ncclepReasonLate}, Case{7, 0, 0, ncclepReasonLate},
                           Case{7, 7, 7, ncclepReasonLate}, Case{0, 7, 0, ncclepReasonLate},
                           Case{7, 9, 9, ncclepReasonDiffers}}) {
    Objects o;
    o.make();
    standin::plans = {kRows, 1, 2, 0, 0, true, each.own_call, each.peer_call};
    o.make_plan();
    ncclepFailure_t failure = NCCLEP_FAILURE_INIT;
    must(ncclepGroupGetFailure(o.group, &failure));
    REQUIRE(failure.reason == each.reason && failure.peer == 1);
    REQUIRE(failure.own_call == each.own_call && failure.peer_call == each.said);
  }
}

// Windows grow on all ranks or on none, and not while a graph holds them.
void growth() {
  Objects o;
  o.make();
  o.group = o.new_group(all_gather);
  const auto grow = [&] { o.reserve(800); };
  o.reserve(400);
  REQUIRE(o.info().growth == std::string("tokens 128 -> 400"));
  is_rank_late = true;
  must_fail("all_gather failed", grow);
  is_rank_late = false;
  REQUIRE(o.info().max_tokens == 512);  // a rank that did not come has left the windows
  fail_after(true, 2);
  must_fail("use smaller micro-batches", grow);
  fail_after(true, -1);
  REQUIRE(o.info().max_tokens == 0 && o.info().num_bytes == 0);
  o.reserve(400);
  standin::capture(kStream);
  must_fail("a CUDA graph holds calls of this group", grow);
  o.make_plan(kRows);
  standin::capture(0);
  must_fail("its windows cannot grow: a CUDA graph", grow);
}

// Windows grow and close when this rank's calls are over, whatever else the device does: they
// waited for all of it, such as another group's kernels, which may wait for a rank that waits here;
// and without a deadline.
void waiting() {
  Objects o;
  o.make();
  standin::hold(kOther);
  o.reserve(200);
  o.make_plan(kRows);
  must(ncclepLowLatencyDestroy(std::exchange(o.low_latency, nullptr)));
  REQUIRE(standin::is_held(kOther));
  must(ncclepGroupBegin(o.group, 0.4, nullptr, nullptr));
  standin::hold(kStream);
  o.make_plan(kRows);
  const std::string text = "its windows: its earlier calls were not over on the device within ";
  must_fail("leaving " + text + "0.2 s", [&] { o.reserve(400); });
  REQUIRE(o.info().num_bytes == 0);
  standin::release_at_query(3);
  o.reserve(400);
  // The longest deadline of a call counts: 1 s, with which the group was made.
  standin::hold(kStream);
  o.make_plan(kRows);
  must_fail("4 closing " + text + "1 s", [&] { must(ncclepGroupDestroy(o.group)); });
  REQUIRE(o.info().max_tokens == 512);
  standin::release();
}

// What is wrong with single values is a result with a text.
void results() {
  const ncclepCommConfig_t right{sizeof(right), {}, 2, 1, 0, 60.0, nccl_path, poll, nullptr};
  ncclepComm_t comm = nullptr;
  const auto connect = [&](const ncclepCommConfig_t& config) {
    must(ncclepCommCreate(&comm, &config));
  };
  const auto with = [&](auto ncclepCommConfig_t::* member, auto value) {
    ncclepCommConfig_t config = right;
    config.*member = value;
    return [=] { connect(config); };
  };
  using Config = ncclepCommConfig_t;
  must_fail("1 ncclepCommConfig_t: NULL", [&] { must(ncclepCommCreate(&comm, nullptr)); });
  must_fail("1 ncclepCommConfig_t of 16 bytes: this library, version", with(&Config::size, 16));
  must_fail("1 rank 2 of 2", with(&Config::rank, 2));
  must_fail("3 cannot open /nowhere", with(&Config::nccl_path, "/nowhere"));
  fake_wait_for_ranks(300);
  must_fail("4 no communicator over the 2 ranks", with(&Config::timeout_s, 0.01));
  is_interrupted = true;
  must_fail("5 the caller ended the call", [&] { connect(right); });
  is_interrupted = false;
  fake_wait_for_ranks(0);
  connect(right);

  ncclepGroup_t group = nullptr;
  ncclepGroupConfig_t of_group = NCCLEP_GROUP_CONFIG_INIT;
  of_group.num_experts = 3;
  must_fail("1 3 experts: from 1 to 4096, and a multiple of the 2 ranks",
            [&] { must(ncclepGroupCreate(&group, comm, &of_group)); });
  // The first dispatch failed, on every rank, on a GPU for which `auto` had chosen the engine.
  of_group.num_experts = 4;
  standin::shared_bytes = 133;
  must_fail(
      "the kernel of plan needs up to 133 bytes of shared memory in a CTA, and the GPU offers 132",
      [&] { must(ncclepGroupCreate(&group, comm, &of_group)); });
  must(ncclepCommDestroy(comm));
  must_fail("1 the native group was closed, or is NULL", [] { must(ncclepGroupDestroy(nullptr)); });
}

// The same of a call with each of these tensors replaced by one of another dtype, of
// another size, and of another number of dimensions, and with each of these numbers out of range.
template <typename Given, typename Call>
void must_refuse_each(Given given, std::vector<const ncclepTensor_t * Given::*> tensors,
                      std::vector<int Given::*> numbers, Call&& call) {
  const Given right = given;
  const auto attempt = [&] { must(call(&given)); };
  attempt();
  for (const auto tensor : tensors) {
    const ncclepTensor_t& it = *(right.*tensor);
    std::vector<std::int64_t> smaller(it.shape, it.shape + it.ndim);
    --smaller.back();
    for (const Numbers& wrong : {Numbers(ncclepFloat64, {it.shape, it.shape + it.ndim}),
                                 Numbers(it.dtype, smaller), Numbers(it.dtype, {})}) {
      given.*tensor = wrong;
      must_refuse(attempt);
    }
    given = right;
  }
  for (const auto number : numbers) {
    for (const int wrong : {INT_MIN, -1, 0, INT_MAX}) {
      given.*number = wrong;
      must_refuse(attempt);
    }
    given = right;
  }
}

// Kernels trust what the host passes on.
void arguments() {
  Objects o;
  o.make();
  using Plan = ncclepPlanConfig_t;
  Plan config = o.plan_config(32);
  config.kept = o.kept;
  config.lacked = o.lacked;
  const auto plan = [&](const Plan* given) {
    ncclepPlan_t made = nullptr;
    const ncclepResult_t result = ncclepPlanCreate(&made, o.group, given);
    if (made != nullptr) o.plans.push_back(made);
    return result;
  };
  must_refuse_each(config,
                   {&Plan::topk_idx, &Plan::counts, &Plan::token_routes, &Plan::routes, &Plan::kept,
                    &Plan::lacked},
                   {&Plan::most_tokens, &Plan::alignment, &Plan::num_sms}, plan);
  for (const std::int64_t wrong : {INT64_MIN, INT64_C(-1), INT64_C(1) << 32, INT64_MAX}) {
    for (const auto number : {&Plan::max_recv_rows, &Plan::max_pairs, &Plan::max_assignments}) {
      Plan given = config;
      given.*number = wrong;
      must_refuse([&] { must(plan(&given)); });
    }
  }
  o.make_plan();
  o.wait_for_sizes();
  using Rows = ncclepRows_t;
  must_refuse_each(o.rows_of(), {&Rows::tokens, &Rows::topk_w, &Rows::rows, &Rows::row_w},
                   {&Rows::num_sms},
                   [&](const Rows* given) { return ncclepDispatch(o.group, o.plan, given); });
  must_refuse_each(
      o.rows_of(), {&Rows::tokens, &Rows::topk_w, &Rows::rows, &Rows::row_w, &Rows::sums},
      {&Rows::num_sms}, [&](const Rows* given) { return ncclepCombine(o.group, o.plan, given); });
  using Few = ncclepLowLatencyDispatch_t;
  must_refuse_each(
      o.few_of(), {&Few::x, &Few::topk_idx, &Few::weights, &Few::counts}, {&Few::num_ctas},
      [&](const Few* given) { return ncclepLowLatencyDispatch(o.low_latency, given); });
  using Returned = ncclepLowLatencyCombine_t;
  must_refuse_each(
      o.returned(), {&Returned::y, &Returned::rows_of, &Returned::out}, {&Returned::num_ctas},
      [&](const Returned* given) { return ncclepLowLatencyCombine(o.low_latency, given); });
  Rows misaligned = o.rows_of();
  const Numbers x(ncclepBfloat16, {kTokens, kHidden}, 2);
  misaligned.tokens = x;
  must_refuse([&] { must(ncclepDispatch(o.group, o.plan, &misaligned)); });
}

}  // namespace

int main(int num_words, char** words) {
  const std::map<std::string, void (*)()> cases = {
      {"failures", failures}, {"order", order},         {"sizes", sizes},
      {"late", late_ranks},   {"growth", growth},       {"waiting", waiting},
      {"results", results},   {"arguments", arguments}, {"domains", domains},
      {"versions", versions}, {"phases", phases}};
  nccl_path = words[2];
  if (num_words > 3) emu::mistake = std::atoi(words[3]);
  fake_make_windows(words[1] == std::string("domains") ? 4 : 1);
  try {
    cases.at(words[1])();
  } catch (const Refused& refused) {
    standin::require(false, refused.text);
  }
  return 0;
}
