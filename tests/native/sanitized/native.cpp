#include "native.h"

#include <cuda_runtime.h>

#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cases.h"
#include "native/host/call.h"
#include "native_fixtures.h"
#include "standin.h"

namespace {

void plan_exactly(Group& group, Batch& batch) {
  const std::uint32_t ticket = batch.make_plan(group, false, 1, 1);
  REQUIRE(refuses([&] { batch.move(group); }, "not received"));  // nobody knows how much arrives
  const auto sizes = group.wait_for_sizes(batch.plan, ticket, batch.rows_of_expert, kStream, [] {});
  REQUIRE(sizes && sizes->num_rows == 2 && sizes->num_assignments == 2);
  REQUIRE(refuses([&] { batch.move(group); }, "room for 1 pairs and 1 assignments"));
  batch.receive(group, 1, 2);
}

void live_with_group() {
  Life life;
  Group& group = life.make_group();
  Batch batch, fixed;
  REQUIRE(refuses([&] { batch.move(group); }, "windows"));
  life.grow(group, kTokens);
  life.grow(group, kTokens + 200);
  plan_exactly(group, batch);
  batch.move(group);
  fixed.make_plan(group, true, 2, 2);
  fixed.move(group);
  REQUIRE(!group.was_captured());
  standin::capture({kStream, kOtherStream});
  fixed.move(group);
  standin::capture({});
  group.refuse(Phase::kCombine, kStream);
  REQUIRE(group.was_captured() && !group.failure() && group.bad_ranks(true) == 0);
  group.wait_until_idle([] {});
  group.close();
}

void live_with_low_latency() {
  Life life;
  life.open_group();
  LowLatency& ll = life.open_low_latency();
  FewTokens tokens;
  tokens.dispatch(ll, true, kStream);
  tokens.combine(ll, true, true, kOtherStream);
  tokens.dispatch(ll, false, kStream);
  ll.complete_dispatch(tokens.counts, kOtherStream);
  ll.combine(tokens.few, tokens.rows_of.tensor, tokens.out, true, false, 8, kStream);
  ll.combine(tokens.few, tokens.rows_of.tensor, tokens.out, false, true, 8, kStream);
  ll.close();
  REQUIRE(refuses([&] { tokens.dispatch(ll, true, kStream); }, "was closed"));
  REQUIRE(refuses([&] { ll.complete_dispatch(tokens.counts, kStream); }, "was closed"));
  REQUIRE(refuses([&] { tokens.combine(ll, true, true, kStream); }, "was closed"));
}

// The capture of a life that failed ends with it.
void with_all_failures(void (*life)()) {
  life();
  with_every_call_failing(standin::fail_after, [&] {
    standin::capture({});
    life();
  });
  with_every_call_failing(fail_nccl_after, life);
}

}  // namespace

void native_group() { with_all_failures(live_with_group); }

void native_low_latency() { with_all_failures(live_with_low_latency); }

void closed_group() {
  Life life;
  Group& group = life.open_group();
  LowLatency& ll = life.open_low_latency();
  Batch batch;
  FewTokens tokens;
  plan_exactly(group, batch);
  group.close();
  group.drop();
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { group.allocate(kTokens, kTopK, 32); }, [&] { group.clear(); },
           [&] { batch.move(group); }, [&] { batch.make_plan(group, false, 1, 2); },
           [&] { batch.make_plan(group, true, 1, 2); },
           [&] { group.refuse(Phase::kDispatch, kStream); }, [&] { batch.receive(group, 1, 2); },
           [&] { group.wait_for_sizes(batch.plan, 1, batch.rows_of_expert, kStream, [] {}); },
           [&] { tokens.dispatch(ll, true, kStream); },
           [&] { tokens.combine(ll, true, true, kStream); }}) {
    error_of(call);
  }
  group.open();  // nothing is there to open
  group.close();
  REQUIRE(group.windows().empty() && group.num_bytes() == 0 && !group.failure());
  REQUIRE(group.bad_ranks(true) == 0);
  group.wait_until_idle([] {});
}

// The stand-in ends the program when an operation does not wait for the one before, or waits for an
// event that is not its capture's.
void order() {
  Life life;
  Group &first = life.open_group(), &second = life.open_group(1, 2 * kExperts);
  LowLatency& ll = life.open_low_latency();
  Batch batch, other(2 * kExperts);
  FewTokens tokens;
  batch.make_plan(first, true, 2, 2);
  other.make_plan(second, true, 2, 2, kOtherStream);
  tokens.dispatch(ll, true, kStream);
  other.move(second);
  tokens.combine(ll, true, true, kStream);
  batch.move(first);
  first.refuse(Phase::kCombine, kStream);

  // An operation waits for the one before, and for nothing that was queued after that.
  batch.dispatch(first, kStream);
  standin::hold(kStream);
  other.dispatch(second, kOtherStream);
  REQUIRE(!standin::is_held(kOtherStream));
  batch.dispatch(first, kStream);
  other.dispatch(second, kOtherStream);
  REQUIRE(standin::is_held(kOtherStream));
  int num_polls = 0;
  first.wait_until_idle([&] {
    ++num_polls;
    standin::release();
  });
  REQUIRE(num_polls == 1);

  // A stream is not the one that had its handle before.
  standin::remake(kOtherStream);
  batch.dispatch(first, kStream);
  batch.dispatch(first, kOtherStream);
  standin::remake(kOtherStream);
  batch.dispatch(first, kOtherStream);

  // Captures: an order of their own in each, and none between them and what is not captured.
  standin::capture({kStream, kOtherStream});
  batch.dispatch(first, kStream);
  batch.dispatch(first, kOtherStream);
  standin::capture({kOtherStream});
  batch.dispatch(first, kOtherStream);
  standin::capture({});
  batch.dispatch(first, kStream);
  REQUIRE(first.was_captured() && !second.was_captured());
  standin::capture({kOtherStream});
  tokens.dispatch(ll, true, kOtherStream);
  other.dispatch(second, kOtherStream);
  standin::capture({});
  other.dispatch(second, kOtherStream);
  batch.dispatch(first, kStream);
  REQUIRE(first.was_captured() && second.was_captured());
  cudaDeviceSynchronize();
}

void calls() {
  Life life;
  Group& group = life.open_group();
  std::set<std::uint64_t> known;  // no two calls look alike

  struct Rows {
    Phase phase;
    std::uint64_t plan;
    DType dtype;
    int hidden;
    bool has_weights;
  };
  const Rows rows{Phase::kDispatch, 1, DType::kBFloat16, 8, true};
  const auto call_of_rows = [&](const Rows& call, int num_tokens = kTokens) {
    const Owned counts{DType::kInt64, {2 * kExperts / kRanks + 1}},
        token_routes{DType::kInt32, {4, num_tokens}}, x{call.dtype, {num_tokens, call.hidden}},
        y{call.dtype, {2, call.hidden}}, topk_w{DType::kFloat32, {num_tokens, kTopK}},
        row_w{DType::kFloat32, {2}}, routes{DType::kInt32, {group.routes_size(2, 2, 1)}};
    const auto if_weights = [&](const Owned& w) {
      return call.has_weights ? std::optional(w.tensor) : std::nullopt;
    };
    Plan plan{counts, token_routes, /*num_chunks*/ 1, kTopK, call.plan};
    group.plan_receive(plan, 2, 2, routes, 8, kStream);
    plan.num_rows = 2;
    REQUIRE(standin::take_calls().empty());
    if (call.phase == Phase::kDispatch) {
      group.dispatch(plan, x, if_weights(topk_w), y, if_weights(row_w), 8, kStream);
    } else {
      const Owned sums(call.dtype, {2, call.hidden});
      group.combine(plan, y, if_weights(row_w), sums.tensor, x, if_weights(topk_w), 8, kStream);
    }
    const auto found = standin::take_calls();
    REQUIRE(found.size() == 1 && found[0] >> 48 == 0);
    return found[0];
  };
  const auto add_rows = [&](const Rows& call) {
    const std::uint64_t word = call_of_rows(call);
    REQUIRE(known.insert(word).second);
    REQUIRE((ncclep::native::values_of(word) ==
             std::map<std::string, std::int64_t>{{"phase", static_cast<int>(call.phase)},
                                                 {"plan", call.plan},
                                                 {"dtype", static_cast<int>(call.dtype)},
                                                 {"hidden size", call.hidden},
                                                 {"presence of weights", call.has_weights}}));
  };
  add_rows(rows);
  const auto differing = [&](auto&& change) {
    Rows other = rows;
    change(other);
    add_rows(other);
  };
  differing([](Rows& call) { call.phase = Phase::kCombine; });
  differing([](Rows& call) { call.dtype = DType::kFloat16; });
  differing([](Rows& call) { call.hidden = 16; });
  differing([](Rows& call) { call.has_weights = false; });
  for (int bit = 1; bit < 14; ++bit) {
    differing([&](Rows& call) { call.plan = 1 + (1ull << bit); });
  }
  // What ranks need not have alike is in no word, nor is a number of plans that has not its bits.
  REQUIRE(call_of_rows(rows, kTokens - 1) == call_of_rows(rows));
  Rows later = rows;
  later.plan += 1 << 14;
  REQUIRE(call_of_rows(later) == call_of_rows(rows));

  const auto add_plan = [&](int top_k, int alignment, std::int64_t max_recv_rows, bool drops) {
    const Owned counts{DType::kInt64, {2 * kExperts / kRanks + 1}},
        token_routes{DType::kInt32, {4, kTokens}}, topk{DType::kInt64, {kTokens, top_k}},
        kept{DType::kInt32, {kTokens, top_k}}, routes{DType::kInt32, {group.routes_size(2, 2, 1)}};
    Plan plan{counts, token_routes, /*num_chunks*/ 1, top_k, 1};
    const auto if_drops = drops ? std::optional(kept.tensor) : std::nullopt;
    group.plan(plan, topk, alignment, max_recv_rows, if_drops, {}, 2, 2, routes, 8, kStream);
    const auto found = standin::take_calls();
    if (max_recv_rows == 0) {
      REQUIRE(found.empty());  // the hosts agree
      return;
    }
    // Of its three kernels the first one compares.
    REQUIRE(found.size() == 1 && found[0] >> 48 == 0);
    REQUIRE(known.insert(found[0]).second == drops);
    REQUIRE((ncclep::native::values_of(found[0]) ==
             std::map<std::string, std::int64_t>{{"phase", static_cast<int>(Phase::kPlan)},
                                                 {"top_k", top_k},
                                                 {"alignment", alignment},
                                                 {"max_recv_rows", max_recv_rows}}));
  };
  add_plan(kTopK, 1, 0, false);
  for (const bool drops : {true, false}) {  // the word is the same
    add_plan(kTopK, 1, 2, drops);
    add_plan(1, 1, 2, drops);
    add_plan(kTopK, 256, 2, drops);
    add_plan(kTopK, 1, 3, drops);
    add_plan(kTopK, 1, INT32_MAX, drops);
  }
}

void sizes() {
  Life life;
  // So short that a wait is over before it calls `poll` for the first time.
  Group& group = life.open_group(/*timeout_s*/ 0.01);
  Batch batch;
  const auto wait = [&](std::uint32_t ticket, const std::function<void()>& poll) {
    return group.wait_for_sizes(batch.plan, ticket, batch.rows_of_expert, kStream, poll);
  };
  const auto count = [&] { return batch.make_plan(group, false, 1, 2); };
  std::uint32_t ticket = count();
  REQUIRE(refuses([&] { wait(ticket + 1, [] {}); }, "not that of the last plan"));
  REQUIRE(refuses([&] { wait(0, [] {}); }, "not that of the last plan"));
  REQUIRE(wait(ticket, [] {})->num_rows == 2);
  // A routing that is refused: nobody may go on with the plan.
  standin::sizes.bad_ranks = 4;
  batch.plan = {batch.counts, batch.token_routes, 1, kTopK, 1};
  REQUIRE(wait(count(), [] {})->bad_ranks == 4);
  batch.receive(group, 1, 2);
  REQUIRE(refuses([&] { batch.move(group); }, "not received"));
  standin::sizes.bad_ranks = 0;

  // What was queued before may take as long as it likes, also on a stream that this one waits for.
  int num_polls = 0;
  const auto wait_for_stream = [&](std::uintptr_t stream) {
    standin::hold(stream);
    if (stream != kStream) group.refuse(Phase::kPlan, stream);
    ticket = count();
    num_polls = 0;
    const auto found = wait(ticket, [&] {
      if (++num_polls == 3) standin::release();
    });
    REQUIRE(found->num_rows == 2 && num_polls == 3);
  };
  wait_for_stream(kStream);
  wait_for_stream(kOtherStream);
  // Ctrl-C, and a device that fails.
  standin::hold(kStream);
  ticket = count();
  REQUIRE(refuses([&] { wait(ticket, [] { ncclep::fail("Ctrl-C"); }); }, "Ctrl-C"));
  num_polls = 0;
  const auto fail_once = [&] {
    REQUIRE(++num_polls == 1);
    standin::fail_after(0);
  };
  REQUIRE(refuses([&] { wait(ticket, fail_once); }, "waiting for a plan's rows"));
  standin::release();
  REQUIRE(wait(ticket, [] {}).has_value());  // it has come meanwhile
  // But a kernel may not.
  standin::sizes.late_words = ~0u;
  ticket = count();
  num_polls = 0;
  const auto give_up = [&] { REQUIRE(++num_polls < 100); };
  REQUIRE(refuses([&] { wait(ticket, give_up); }, "not count the rows of a plan within 0.02 s"));
  standin::release();
  REQUIRE(wait(ticket, [] {}).has_value());

  // Words come in any order: none is taken before it is there.
  group.set_timeout(60);
  const int num_local = kExperts / kRanks;
  for (int word = 0; word < 4 + num_local; ++word) {
    const unsigned int rows = 10 + word;
    standin::sizes = {rows * num_local, rows + 1, rows + 2, rows + 3, false, 1u << word};
    num_polls = 0;
    const auto found = wait(count(), [&] {
      ++num_polls;
      standin::release();
    });
    REQUIRE(num_polls == 1);
    REQUIRE(found->num_rows == rows * num_local && found->num_pairs == rows + 1);
    REQUIRE(found->num_assignments == rows + 2 && found->bad_ranks == rows + 3);
    const auto* of_expert = static_cast<const std::int64_t*>(batch.rows_of_expert.tensor.data);
    for (int local = 0; local < num_local; ++local) REQUIRE(of_expert[local] == rows);
  }
  standin::sizes.fails = true;
  REQUIRE(!wait(count(), [] { standin::release(); }) && group.failure()->peer == 1);
}

void growth() {
  Life life;
  Group& group = life.make_group();
  int num_gathered = 0;
  bool fails = false;
  // Every rank says what this one does.
  const AllGather all_gather = [&](const void* mine, std::size_t num_bytes, void* all,
                                   const char*) {
    if (fails) throw ncclep::PeerError("rank 2 did not come");
    ++num_gathered;
    for (int rank = 0; rank < kRanks; ++rank) {
      std::memcpy(static_cast<char*>(all) + rank * num_bytes, mine, num_bytes);
    }
  };
  const auto reserve = [&](int num_tokens, std::uintptr_t stream = kStream) {
    group.reserve(num_tokens, kTopK, 32, stream, all_gather);
  };
  reserve(kTokens);
  REQUIRE(group.growth() == "tokens 0 -> 5, top-k 0 -> 2, row bytes 0 -> 32");
  REQUIRE(group.fits(kTokens, kTopK, 32) && num_gathered > 0);
  num_gathered = 0;
  reserve(kTokens);
  REQUIRE(num_gathered == 0);  // large enough

  // No memory: all ranks hear of it, and no windows are left.
  fail_nccl_after(2);
  REQUIRE(refuses([&] { reserve(400); }, "use smaller micro-batches"));
  fail_nccl_after(-1);
  REQUIRE(group.windows().empty() && !group.fits(1, 1, 16));
  fails = true;
  REQUIRE(refuses([&] { reserve(400); }, "rank 2 did not come"));
  fails = false;
  reserve(400);
  const auto low_latency =
      LowLatency::make(life.groups.front(),
                       {kTokens, kHidden, kTopK, DType::kFloat32, DType::kFloat32, 4}, all_gather);
  low_latency->close();

  // A graph holds the windows, or is about to.
  standin::capture({kOtherStream});
  REQUIRE(refuses([&] { reserve(800, kOtherStream); }, "a CUDA graph holds calls of this group"));
  Batch batch;
  batch.make_plan(group, true, 2, 2, kOtherStream);
  standin::capture({});
  REQUIRE(group.was_captured());
  REQUIRE(refuses([&] { reserve(800); }, "its windows cannot grow: a CUDA graph holds"));
  REQUIRE(group.fits(400, kTopK, 32));
}
