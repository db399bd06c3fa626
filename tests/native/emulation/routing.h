// The routing of a sequence, drawn at random, and its oracle.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include "emulator.h"
#include "native/state.h"

// Where a group's counters stand when its windows are new: at 0, or just before they wrap.
struct Starts {
  bool wraps = false;
  std::uint64_t operations = at(32), plans = at(32), dispatches = at(32), entries = at(16);
  std::uint64_t low_latency = at(32), tickets = at(32), numbers_of_plans = at(14);

 private:
  std::uint64_t at(int bits) const {
    return wraps ? (std::uint64_t{1} << bits) - emu::between(1, 3) : 0;
  }
};

struct Sizes {
  int ranks, local, max_tokens, max_top_k, max_row_bytes;
  Starts starts;
  int domains = 1, rounds = 1;
  int experts() const { return ranks * local; }
  int domain_of(int rank) const { return rank * domains / ranks; }
  int local_rank_of(int rank) const { return rank % (ranks / domains); }
};

inline std::set<int> ranks_in(const ncclep::native::RankBits& bits) {
  std::set<int> ranks;
  for (int rank = 0; rank < ncclep::native::kMaxRanks; ++rank) {
    if (bits.words[rank / 32] >> rank % 32 & 1) ranks.insert(rank);
  }
  return ranks;
}

struct Assignment {
  int expert, index;  // local expert; token * K + k
  int slot;           // -1: dropped
};
// A token of a source rank, and its assignments on another rank, by expert.
struct Pair {
  int source, token;
  int index;  // among the source's pairs on that rank
  std::vector<Assignment> assignments;
};

struct Routing {
  int top_k, alignment;
  std::int64_t limit;                            // of rows; 0: exact mode
  bool may_drop;                                 // whether there may be more rows than that
  int least_chunks;                              // that hosts think that there are
  std::vector<int> num_tokens;                   // by rank
  bool is_int64;                                 // the indices, otherwise int32
  std::vector<std::vector<std::int64_t>> named;  // by rank, [T * K]; -1: not routed

  // The oracle.
  std::set<int> bad_ranks;                       // name an invalid expert, or one twice
  std::vector<std::vector<Pair>> pairs;          // by rank; by source rank and token
  std::vector<std::vector<int>> routed, padded;  // by rank, of each of its experts
  std::vector<int> num_rows, num_dropped;        // by rank

  // In exact mode a bad routing makes no plan, on any rank.
  bool is_refused() const { return !bad_ranks.empty() && limit == 0; }
  // Rows of a rank's tensors.
  std::int64_t room_of(int rank) const { return limit > 0 ? limit : num_rows[rank]; }
  std::size_t index_bytes() const { return is_int64 ? 8 : 4; }
  // Writes a rank's indices.
  void put_indices(int rank, char* to) const {
    for (const std::int64_t& expert : named[rank]) {
      std::memcpy(to, &expert, index_bytes());  // little-endian
      to += index_bytes();
    }
  }
  int most_tokens() const { return *std::max_element(num_tokens.begin(), num_tokens.end()); }
  // As hosts know it: in static mode an upper bound.
  int most_chunks() const {
    return std::max(least_chunks, ncclep::native::num_chunks_of(most_tokens()));
  }
};

// An expert named twice counts once.
inline void find_pairs(const Sizes& sizes, Routing& routing) {
  routing.pairs.resize(sizes.ranks);
  for (int source = 0; source < sizes.ranks; ++source) {
    std::vector<int> places(sizes.ranks, 0);
    for (int token = 0; token < routing.num_tokens[source]; ++token) {
      std::vector<Pair> by_rank(sizes.ranks);
      const auto named = routing.named[source].begin() + token * routing.top_k;
      for (int k = 0; k < routing.top_k; ++k) {
        const bool is_expert = 0 <= named[k] && named[k] < sizes.experts();
        if (is_expert && std::find(named, named + k, named[k]) == named + k) {
          const int expert = static_cast<int>(named[k]);
          by_rank[expert / sizes.local].assignments.push_back(
              {expert % sizes.local, token * routing.top_k + k, -1});
        } else if (named[k] != -1) {
          routing.bad_ranks.insert(source);
        }
      }
      for (int rank = 0; rank < sizes.ranks; ++rank) {
        auto& assignments = by_rank[rank].assignments;
        if (assignments.empty()) continue;
        std::sort(assignments.begin(), assignments.end(),
                  [](const Assignment& a, const Assignment& b) { return a.expert < b.expert; });
        routing.pairs[rank].push_back({source, token, places[rank]++, assignments});
      }
    }
  }
}

// Rows lie by expert, source rank and token.  Assignments are taken by source rank, token and
// expert as long as there is room.
inline void find_slots(const Sizes& sizes, Routing& routing) {
  const int alignment = routing.alignment;
  for (auto* table : {&routing.routed, &routing.padded}) {
    table->assign(sizes.ranks, std::vector<int>(sizes.local, 0));
  }
  routing.num_rows.assign(sizes.ranks, 0);
  routing.num_dropped.assign(sizes.ranks, 0);
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    std::vector<std::vector<Assignment*>> blocks(sizes.local);
    bool is_full = false;
    for (Pair& pair : routing.pairs[rank]) {
      for (Assignment& assignment : pair.assignments) {
        auto& block = blocks[assignment.expert];
        const int rows = routing.num_rows[rank] + (block.size() % alignment == 0 ? alignment : 0);
        is_full = is_full || (routing.limit > 0 && rows > routing.limit);
        assignment.slot = -1;
        if (is_full) {
          ++routing.num_dropped[rank];
        } else {
          routing.num_rows[rank] = rows;
          block.push_back(&assignment);
        }
      }
    }
    int slot = 0;
    for (int local = 0; local < sizes.local; ++local) {
      for (Assignment* assignment : blocks[local]) assignment->slot = slot++;
      routing.routed[rank][local] = static_cast<int>(blocks[local].size());
      slot = (slot + alignment - 1) / alignment * alignment;
      routing.padded[rank][local] =
          (routing.routed[rank][local] + alignment - 1) / alignment * alignment;
    }
  }
}

// Draws a routing in which `bad` of 1000 assignments are invalid, of all ranks or of the last ones:
// of none of the first 32 if there are more.  With `columns` the indices have
// that many columns for each token, and there is no limit.
inline Routing draw_routing(const Sizes& sizes, int bad, int columns = 0) {
  Routing routing{};
  const int num_named = emu::between(1, sizes.max_top_k);
  routing.top_k = columns > 0 ? columns : num_named;
  routing.alignment = emu::one_of({1, 2, 16});
  routing.is_int64 = emu::draw(2) == 0;
  const int unrouted = emu::one_of({0, 30, 60});  // percent
  const int last = sizes.ranks - 1;
  const int first_bad =
      last >= 32 ? emu::between(32, last) : emu::one_of({0, emu::between(0, last), last});
  // All experts, the first half, the first ones, or those of one rank.
  const int kind = emu::between(0, 3),
            first = kind == 3 ? emu::between(0, sizes.ranks - 1) * sizes.local : 0;
  const int wanted[] = {sizes.experts(), sizes.experts() / 2, 1, sizes.local};
  const int range = std::max(wanted[kind], num_named);
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    const int num_tokens =
        emu::one_of({0, emu::between(1, sizes.max_tokens), emu::between(1, sizes.max_tokens),
                     sizes.max_tokens, sizes.max_tokens - 1});
    routing.num_tokens.push_back(num_tokens);
    auto& named = routing.named.emplace_back(num_tokens * routing.top_k, -1);
    std::vector<int> order(range);
    for (int token = 0; token < num_tokens; ++token) {
      std::int64_t* const of_token = named.data() + token * routing.top_k;
      std::iota(order.begin(), order.end(), first);
      for (int k = 0; k < num_named; ++k) {
        std::swap(order[k], order[emu::between(k, range - 1)]);
        if (emu::between(0, 99) >= unrouted) of_token[k] = order[k] % sizes.experts();
        if (rank < first_bad || emu::between(0, 999) >= bad) continue;
        // Just outside the experts, far outside, an expert if only 32 bits are read, or perhaps
        // an expert named before.
        const std::int64_t far = INT64_C(1) << (routing.is_int64 ? 32 : 30);
        of_token[k] = emu::one_of<std::int64_t>({-2, sizes.experts(), far, -far, of_token[0]});
      }
    }
  }
  find_pairs(sizes, routing);
  find_slots(sizes, routing);
  if (columns == 0 && emu::between(0, 3) == 0) {
    const int most = *std::max_element(routing.num_rows.begin(), routing.num_rows.end());
    routing.limit =
        std::max(1, most * emu::between(5, 13) / 10 / routing.alignment) * routing.alignment;
    find_slots(sizes, routing);
    routing.least_chunks = ncclep::native::num_chunks_of(emu::one_of({0, sizes.max_tokens}));
    routing.may_drop = emu::between(0, 1) == 0;
    for (const int dropped : routing.num_dropped) routing.may_drop |= dropped > 0;
  }
  return routing;
}
