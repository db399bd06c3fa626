// What is routed in a sequence, drawn at random, and the oracle for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "emulator.h"
#include "native/state.h"

// Where a group's counters stand at the start, with windows that are new.
struct Starts {
  std::uint64_t operations = 0, plans = 0, dispatches = 0, entries = 0, low_latency = 0;
  std::uint64_t calls = 0;  // the numbers of plans in calls
  std::uint32_t tickets = 0;

  // A little before each of them wraps.
  static Starts before_wraps() {
    const auto before = [](int bits) { return (std::uint64_t{1} << bits) - emu::between(1, 3); };
    return {before(32),
            before(32),
            before(32),
            before(16),
            before(32),
            before(14),
            static_cast<std::uint32_t>(before(32))};
  }
};

struct Sizes {
  int ranks, local, max_tokens, max_top_k, max_row_bytes;
  Starts starts;
  int experts() const { return ranks * local; }
};

struct Routing {
  int top_k, alignment;
  std::int64_t limit;                            // of rows; 0: exact mode
  bool may_drop;                                 // and there may be more than that
  std::vector<int> num_tokens;                   // by rank
  bool is_int64;                                 // what is named, otherwise int32
  std::vector<std::vector<std::int64_t>> named;  // by rank, [T * K]; -1: not routed
  std::vector<std::vector<int>> experts;         // the same without what is no expert

  // Ranks, one bit each, that name what is no expert, or an expert twice.  In exact mode there is
  // no plan then, on any rank.
  std::uint32_t bad_ranks;
  bool is_refused() const { return bad_ranks != 0 && limit == 0; }

  // What the oracle says.
  std::vector<std::vector<int>> slots;           // by source rank, [T * K]; -1: nowhere
  std::vector<std::vector<int>> routed, padded;  // by rank, of each of its experts
  std::vector<int> num_rows, num_dropped;        // by rank
  std::vector<int> num_needed;                   // by rank: rows if nothing were dropped

  // Rows of the tensors on a rank.
  std::int64_t room_of(int rank) const { return limit > 0 ? limit : num_rows[rank]; }
  int most_tokens() const { return *std::max_element(num_tokens.begin(), num_tokens.end()); }
  int most_chunks() const {
    return (most_tokens() + ncclep::native::kChunk - 1) / ncclep::native::kChunk;
  }
};

// Rows by expert, source rank and token; assignments are taken in the order of source rank, token,
// expert as long as there is room.
inline void find_slots(const Sizes& sizes, Routing& routing) {
  routing.slots.clear();
  for (const auto& experts : routing.experts) routing.slots.emplace_back(experts.size(), -1);
  for (auto* table : {&routing.routed, &routing.padded}) {
    table->assign(sizes.ranks, std::vector<int>(sizes.local, 0));
  }
  routing.num_rows.assign(sizes.ranks, 0);
  routing.num_dropped.assign(sizes.ranks, 0);
  const int top_k = routing.top_k, alignment = routing.alignment;
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    std::vector<std::vector<int*>> blocks(sizes.local);
    bool is_full = false;
    for (int source = 0; source < sizes.ranks; ++source) {
      for (int token = 0; token < routing.num_tokens[source]; ++token) {
        for (int local = 0; local < sizes.local; ++local) {
          for (int assignment = token * top_k; assignment < (token + 1) * top_k; ++assignment) {
            if (routing.experts[source][assignment] != rank * sizes.local + local) continue;
            const bool is_new = blocks[local].size() % alignment == 0;
            const int rows = routing.num_rows[rank] + (is_new ? alignment : 0);
            is_full = is_full || (routing.limit > 0 && rows > routing.limit);
            if (is_full) {
              ++routing.num_dropped[rank];
              continue;
            }
            routing.num_rows[rank] = rows;
            blocks[local].push_back(&routing.slots[source][assignment]);
          }
        }
      }
    }
    int start = 0;
    for (int local = 0; local < sizes.local; ++local) {
      const int assignments = static_cast<int>(blocks[local].size());
      for (int i = 0; i < assignments; ++i) *blocks[local][i] = start + i;
      routing.routed[rank][local] = assignments;
      start += routing.padded[rank][local] = (assignments + alignment - 1) / alignment * alignment;
    }
  }
}

// Takes what is named as the contract has it: an expert named twice counts once.
inline void find_experts(const Sizes& sizes, Routing& routing) {
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    auto& experts = routing.experts.emplace_back();
    const auto& named = routing.named[rank];
    for (int i = 0; i < static_cast<int>(named.size()); ++i) {
      const auto first = named.begin() + i / routing.top_k * routing.top_k;
      const bool is_one = 0 <= named[i] && named[i] < sizes.experts();
      const bool is_good =
          is_one && std::find(first, named.begin() + i, named[i]) == named.begin() + i;
      if (!is_good && named[i] != -1) routing.bad_ranks |= 1u << rank;
      experts.push_back(is_good ? static_cast<int>(named[i]) : -1);
    }
  }
}

// `bad` of 1000 assignments are no good.
inline Routing draw_routing(const Sizes& sizes, int bad) {
  Routing routing{};
  routing.top_k = emu::between(1, sizes.max_top_k);
  routing.alignment = emu::one_of({1, 2, 16});
  routing.is_int64 = emu::draw(2) == 0;
  const int unrouted = emu::one_of({0, 30, 60});  // percent
  // All experts, the first half, the first ones, or those of one rank.
  const int kind = emu::between(0, 3),
            first = kind == 3 ? emu::between(0, sizes.ranks - 1) * sizes.local : 0;
  const int wanted[] = {sizes.experts(), sizes.experts() / 2, 1, sizes.local};
  const int range = std::max(wanted[kind], routing.top_k);
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    const int num_tokens =
        emu::one_of({0, emu::between(1, sizes.max_tokens), emu::between(1, sizes.max_tokens),
                     sizes.max_tokens, sizes.max_tokens - 1});
    routing.num_tokens.push_back(num_tokens);
    auto& named = routing.named.emplace_back();
    std::vector<int> order(range);
    for (int token = 0; token < num_tokens; ++token) {
      std::iota(order.begin(), order.end(), first);
      for (int k = 0; k < routing.top_k; ++k) {
        std::swap(order[k], order[emu::between(k, range - 1)]);
        const bool is_routed = emu::between(0, 99) >= unrouted;
        named.push_back(is_routed ? order[k] % sizes.experts() : -1);
        if (emu::between(0, 999) >= bad) continue;
        // Beside the experts, far away, one that is an expert to whoever takes 32 bits of it, and
        // perhaps one named before.
        const std::int64_t far = INT64_C(1) << (routing.is_int64 ? 32 : 30);
        named.back() = emu::one_of<std::int64_t>(
            {-2, sizes.experts(), far, -far, named[token * routing.top_k]});
      }
    }
  }
  find_experts(sizes, routing);
  find_slots(sizes, routing);
  routing.num_needed = routing.num_rows;
  if (emu::between(0, 3) == 0) {
    const int most = *std::max_element(routing.num_rows.begin(), routing.num_rows.end());
    routing.limit =
        std::max(1, most * emu::between(5, 13) / 10 / routing.alignment) * routing.alignment;
    find_slots(sizes, routing);
    routing.may_drop = emu::between(0, 1) == 0;
    for (const int dropped : routing.num_dropped) routing.may_drop |= dropped > 0;
  }
  return routing;
}
