#include "visibility.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "emulator.h"

namespace emu {

namespace {

// Of stores into a block that were given to all, so many of the last ones may be missed.
constexpr std::size_t kHistory = 32;

struct Given {
  int cta, number;
  Change before;
};
struct Region {
  std::size_t size;
  std::unordered_map<std::uintptr_t, std::vector<Given>> history;  // by block
};
std::map<char*, Region> regions;                     // by where they begin
std::unordered_map<const void*, const Known*> said;  // by words
std::vector<char> is_fenced;                         // groups of bulk stores
std::map<int, const Known*> seen_by_ranks;

}  // namespace

constexpr int kCtas = 9, kRanks = 72;  // the last one is the network
struct Known {
  int last[kRanks * kCtas];  // of which `num_ctas` are used
};

namespace {

int num_ctas = 0;  // of all ranks that there are
std::deque<std::unique_ptr<Known>> all_known;
int last_given[kRanks * kCtas];

// A copy of what is known, to which more is added.
Known* more_than(const Known* known) {
  Known* const more = all_known.emplace_back(new Known).get();
  known == nullptr ? std::fill_n(more->last, num_ctas, 0)
                   : std::copy_n(known->last, num_ctas, more->last);
  return more;
}

int number_of(const Cta& cta) { return cta.rank * kCtas + cta.index % kCtas; }

bool has_seen(const Known* known, int cta, int number) {
  return number <= 0 || (known != nullptr && known->last[cta] >= number);
}

bool are_mates(const Fiber& one, const Fiber& other) {
  return one.thread / kWarpSize == other.thread / kWarpSize;
}

Region* find_region(const char* address) {
  auto next = regions.upper_bound(const_cast<char*>(address));
  if (next == regions.begin()) return nullptr;
  auto& [begin, region] = *--next;
  return address < begin + region.size ? &region : nullptr;
}

std::uintptr_t block_of(const char* address) {
  return reinterpret_cast<std::uintptr_t>(address) / kBlock;
}

// Calls use(where, size) for each part of a block.
template <typename Use>
void split(char* where, std::size_t num_bytes, Use&& use) {
  while (num_bytes > 0) {
    const std::size_t left = kBlock - reinterpret_cast<std::uintptr_t>(where) % kBlock;
    const std::size_t size = std::min(left, num_bytes);
    use(where, size);
    where += size;
    num_bytes -= size;
  }
}

// Gives the first `number` of a fiber's stores to all.
void give(Fiber& fiber, std::size_t number) {
  if (number == 0) return;
  View& view = fiber.view;
  const int cta = number_of(*fiber.cta);
  for (std::size_t i = 0; i < number; ++i) {
    Change& change = view.stores[i];
    std::swap_ranges(change.bytes, change.bytes + change.size, change.where);
    Region* region = find_region(change.where);
    if (region == nullptr) continue;
    std::vector<Given>& history = region->history[block_of(change.where)];
    if (history.size() == kHistory) history.erase(history.begin(), history.begin() + kHistory / 2);
    history.push_back({cta, ++last_given[cta], change});
  }
  view.stores.erase(view.stores.begin(), view.stores.begin() + number);
  view.to_warp -= std::min(view.to_warp, number);
  view.to_cta -= std::min(view.to_cta, number);
}

// A plain store that is about to happen.
void note_store(void* address, std::size_t num_bytes) {
  char* to = static_cast<char*>(address);
  note_access(to);
  if (!is_in_kernel() || self().is_on_stack(to)) return;
  if (note_store_to_shared(to, num_bytes) || find_region(to) == nullptr) return;
  split(to, num_bytes, [&](char* where, std::size_t size) {
    Change& change = self().view.open.emplace_back(Change{where, size, -1, {}});
    std::memcpy(change.bytes, where, size);
  });
}

// What a fence of the fiber that runs covers of what another one of its CTA has stored.
std::size_t covered(const Fiber& other) {
  const View& view = other.view;
  return &other == &self()          ? view.stores.size()
         : are_mates(other, self()) ? std::max(view.to_warp, view.to_cta)
                                    : view.to_cta;
}

}  // namespace

void add_memory(void* memory, std::size_t num_bytes) {
  if (num_bytes > 0) regions[static_cast<char*>(memory)] = {num_bytes, {}};
}

void begin_run(int num_ranks) {
  EMU_REQUIRE(num_ranks <= kRanks);
  num_ctas = num_ranks * kCtas;
}

void forget_memory(void* memory) {
  regions.erase(static_cast<char*>(memory));
  if (regions.empty()) {
    said.clear();
    is_fenced.clear();
    seen_by_ranks.clear();
    all_known.clear();
    std::fill_n(last_given, kRanks * kCtas, 0);
  }
}

void store_in_bulk(char* to, const std::vector<char>& bytes) {
  View& view = self().view;
  if (view.bulk < 0) {
    view.bulk = static_cast<long>(is_fenced.size());
    is_fenced.push_back(false);
  }
  split(to, bytes.size(), [&](char* where, std::size_t size) {
    Change& change = view.stores.emplace_back(Change{where, size, view.bulk, {}});
    std::memcpy(change.bytes, bytes.data() + (where - to), size);
  });
}

void store_for_all(void* to, const void* from, std::size_t num_bytes) {
  std::memcpy(to, from, num_bytes);
}

void load(void* to, const void* from, std::size_t num_bytes, const Known* seen, bool in_bulk) {
  note_access(from);
  std::memcpy(to, from, num_bytes);
  char* start = const_cast<char*>(static_cast<const char*>(from));
  const Region* region = find_region(start);
  if (region == nullptr || region->history.empty() || draw(2) == 0) return;
  split(start, num_bytes, [&](char* first, std::size_t size) {
    const auto history = region->history.find(block_of(first));
    if (history == region->history.end()) return;
    for (auto i = history->second.rbegin(); i != history->second.rend(); ++i) {
      const Change& before = i->before;
      const bool is_unfenced = in_bulk && before.bulk >= 0 && !is_fenced[before.bulk];
      if (has_seen(seen, i->cta, i->number) && !is_unfenced) return;
      char* begin = std::max(first, before.where);
      char* end = std::min(first + size, before.where + before.size);
      if (begin >= end) continue;
      std::memcpy(static_cast<char*>(to) + (begin - start), before.bytes + (begin - before.where),
                  end - begin);
    }
  });
}

Scope scope_of(const void* word) {
  return find_region(static_cast<const char*>(word)) == nullptr ? kCta : kGpu;
}

void note_read(const void* word, Scope scope) {
  const auto found = said.find(word);
  if (found != said.end()) learn(self().view.read[scope], found->second);
}

void note_write(const void* word, Scope scope, bool is_atomic) {
  const Known*& what = said[word];
  if (!is_atomic) what = nullptr;
  learn(what, self().view.released[scope]);
}

void begin_thread() {
  View& view = self().view;
  view.seen = view.seen_by_bulk = seen_by(self().rank);
  std::fill_n(view.released, kNumScopes, view.seen);
}

void learn(const Known*& own, const Known* other) {
  if (own == other || other == nullptr) return;
  int has_more = own == nullptr, has_less = 0;
  for (int i = 0; own != nullptr && i < num_ctas; ++i) {
    has_more |= other->last[i] > own->last[i];
    has_less |= other->last[i] < own->last[i];
  }
  if (!has_more) return;
  if (!has_less) {
    own = other;
    return;
  }
  Known* const both = more_than(own);
  for (int i = 0; i < num_ctas; ++i) both->last[i] = std::max(both->last[i], other->last[i]);
  own = both;
}

// Adds what the CTA of the fiber that runs has given.
static void learn_own(const Known*& known) {
  const int cta = number_of(*self().cta), number = last_given[cta];
  if (has_seen(known, cta, number)) return;
  Known* const more = more_than(known);
  more->last[cta] = number;
  known = more;
}

const Known* seen_by(int rank) { return seen_by_ranks[rank]; }

void settle() {
  View& view = self().view;
  if (view.open.empty()) return;
  for (auto i = view.open.rbegin(); i != view.open.rend(); ++i) {
    std::swap_ranges(i->bytes, i->bytes + i->size, i->where);
  }
  view.stores.insert(view.stores.end(), view.open.begin(), view.open.end());
  view.open.clear();
}

void show_to_warp() {
  settle();
  View& view = self().view;
  view.to_warp = view.stores.size();
  learn(warp().seen, view.seen);
}

void show_to_cta() {
  show_to_warp();
  View& view = self().view;
  view.to_cta = view.stores.size();
  learn(self().cta->seen, view.seen);
}

void acquire(Scope scope) {
  for (int i = 0; i <= scope; ++i) learn(self().view.seen, self().view.read[i]);
}

void release(Scope scope) {
  settle();
  Fiber& fiber = self();
  for (Fiber* other : fiber.cta->fibers) {
    if (scope != kCta) {
      give(*other, covered(*other));
    } else if (are_mates(*other, fiber)) {
      other->view.to_cta = covered(*other);
    }
  }
  learn_own(fiber.view.seen);
  std::fill_n(fiber.view.released, scope + 1, fiber.view.seen);
}

void fence_proxy() {
  View& view = self().view;
  view.seen_by_bulk = view.seen;
  if (view.bulk >= 0) is_fenced[std::exchange(view.bulk, -1)] = true;
  Cta& cta = *self().cta;
  if (std::exchange(cta.is_stored_into, false)) cta.stored_into.assign(cta.stored_into.size(), 0);
}

bool note_store_to_shared(const char* to, std::size_t num_bytes) {
  Cta& cta = *self().cta;
  const std::size_t offset = to - cta.dynamic.data();
  if (to < cta.dynamic.data() || offset >= cta.dynamic.size()) return false;
  for (std::size_t i = offset / kBlock; i <= (offset + num_bytes - 1) / kBlock; ++i) {
    cta.stored_into[i] = 1;
  }
  return cta.is_stored_into = true;
}

void require_fenced(const char* shared, std::size_t num_bytes) {
  const Cta& cta = *self().cta;
  const std::size_t offset = shared - cta.dynamic.data();
  EMU_REQUIRE(shared >= cta.dynamic.data() && offset + num_bytes <= cta.dynamic.size());
  if (!cta.is_stored_into) return;
  const auto first = cta.stored_into.begin() + offset / kBlock;
  if (std::find(first, first + (num_bytes + kBlock - 1) / kBlock, 1) ==
      first + (num_bytes + kBlock - 1) / kBlock)
    return;
  fail("a bulk copy uses shared memory that was stored into, without a fence");
}

void note_access(const void* address) {
  if (!is_measuring || !is_in_kernel()) return;
  const auto is_in = [at = static_cast<const char*>(address)](const std::vector<char>& memory) {
    return memory.data() <= at && at < memory.data() + memory.size();
  };
  const Cta& cta = *self().cta;
  const bool is_shared =
      is_in(cta.dynamic) || std::any_of(cta.statics.begin(), cta.statics.end(),
                                        [&](const auto& each) { return is_in(each.second); });
  if (is_shared || find_region(static_cast<const char*>(address)) != nullptr) take_step();
}

void give_some() {
  settle();
  View& view = self().view;
  if (!view.stores.empty()) give(self(), 1 + draw(view.stores.size()));
}

void end_thread() {
  settle();
  give(self(), self().view.stores.size());
  Cta& cta = *self().cta;
  learn_own(self().view.seen);
  learn(seen_by_ranks[cta.rank], self().view.seen);
  cta.fibers.erase(std::find(cta.fibers.begin(), cta.fibers.end(), &self()));
}

}  // namespace emu

// --- what the compiler calls ---------------------------------------------------------------------

#define EMU_ACCESS(bytes)                                                      \
  void __tsan_read##bytes(void* from) { emu::note_access(from); }              \
  void __tsan_write##bytes(void* to) { emu::note_store(to, bytes); }           \
  void __tsan_unaligned_read##bytes(void* from) { emu::note_access(from); }    \
  void __tsan_unaligned_write##bytes(void* to) { emu::note_store(to, bytes); } \
  void __tsan_volatile_read##bytes(void* from) { emu::note_access(from); }     \
  void __tsan_volatile_write##bytes(void* to) { emu::note_access(to); }
extern "C" {
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
void __tsan_read_range(void*, unsigned long) {}
void __tsan_write_range(void* to, unsigned long bytes) { emu::note_store(to, bytes); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
