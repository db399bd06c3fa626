#include "visibility.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "emulator.h"

namespace emu {

namespace {

// Of stores that were given to all, so many of the last ones may be missed.
constexpr std::size_t kMemory = 4096;

struct Window {
  char *begin, *end;
};
std::vector<Window> windows;
struct Given {
  long number;
  Change before;
};
std::deque<Given> given;
long number_given = 0;
std::map<int, std::vector<std::shared_ptr<Cta>>> grids;  // by rank

bool are_mates(const Fiber& one, const Fiber& other) {
  return one.thread / kWarpSize == other.thread / kWarpSize;
}

bool is_in_window(const char* address) {
  for (const Window& window : windows) {
    if (window.begin <= address && address < window.end) return true;
  }
  return false;
}

// Gives the first `number` of a fiber's stores to all.
void give(View& view, std::size_t number) {
  for (std::size_t i = 0; i < number; ++i) {
    Change& change = view.stores[i];
    std::swap_ranges(change.bytes.begin(), change.bytes.end(), change.where);
    given.push_back({++number_given, std::move(change)});
    if (given.size() > kMemory) given.pop_front();
  }
  view.stores.erase(view.stores.begin(), view.stores.begin() + number);
  view.to_warp -= std::min(view.to_warp, number);
  view.to_cta -= std::min(view.to_cta, number);
  view.to_device -= std::min(view.to_device, number);
}

// A plain store that is about to happen.
void note_store(void* address, std::size_t num_bytes) {
  char* to = static_cast<char*>(address);
  if (!is_in_window(to) || self().cta == nullptr) return;
  self().view.open.push_back({to, {to, to + num_bytes}});
}

}  // namespace

void add_window(char* memory, std::size_t num_bytes) {
  windows.push_back({memory, memory + num_bytes});
}

void note_grid(int rank, std::vector<std::shared_ptr<Cta>> ctas) { grids[rank] = std::move(ctas); }

void forget_windows() {
  windows.clear();
  given.clear();
}

void store(char* to, const std::vector<char>& bytes) {
  if (is_in_window(to)) {
    self().view.stores.push_back({to, bytes});
  } else {
    std::memcpy(to, bytes.data(), bytes.size());
  }
}

void store_for_all(void* to, const void* from, std::size_t num_bytes) {
  std::memcpy(to, from, num_bytes);
}

void load(void* to, const void* from, std::size_t num_bytes, long seen) {
  std::memcpy(to, from, num_bytes);
  const char* start = static_cast<const char*>(from);
  if (given.empty() || given.back().number <= seen || !is_in_window(start) || draw(2) == 0) return;
  for (auto i = given.rbegin(); i != given.rend() && i->number > seen; ++i) {
    const auto& [where, bytes] = i->before;
    const char* first = std::max<const char*>(start, where);
    const char* end = std::min<const char*>(start + num_bytes, where + bytes.size());
    if (first >= end) continue;
    std::memcpy(static_cast<char*>(to) + (first - start), bytes.data() + (first - where),
                end - first);
  }
}

long num_given() { return number_given; }

void settle() {
  View& view = self().view;
  if (view.open.empty()) return;
  for (auto i = view.open.rbegin(); i != view.open.rend(); ++i) {
    std::swap_ranges(i->bytes.begin(), i->bytes.end(), i->where);
  }
  for (Change& change : view.open) view.stores.push_back(std::move(change));
  view.open.clear();
}

void show_to_warp() {
  settle();
  View& view = self().view;
  view.to_warp = view.stores.size();
  warp().seen = std::max(warp().seen, view.seen);
}

void show_to_cta() {
  show_to_warp();
  View& view = self().view;
  view.to_cta = view.stores.size();
  self().cta->seen = std::max(self().cta->seen, view.seen);
}

void fence_cta() {
  show_to_cta();
  for (Fiber* mate : self().cta->fibers) {
    if (are_mates(*mate, self())) mate->view.to_cta = mate->view.to_warp;
  }
  self().view.seen = std::max(self().view.seen, self().cta->seen);
}

// What a fence of the fiber that runs covers of what another one of its CTA has stored.
static std::size_t covered(const Fiber& other) {
  const View& view = other.view;
  return &other == &self()          ? view.stores.size()
         : are_mates(other, self()) ? std::max(view.to_warp, view.to_cta)
                                    : view.to_cta;
}

void fence_device() {
  fence_cta();
  for (Fiber* other : self().cta->fibers) {
    other->view.to_device = std::max(other->view.to_device, covered(*other));
  }
}

void release() {
  settle();
  for (const auto& cta : grids[self().rank]) {
    for (Fiber* other : cta->fibers) {
      const bool is_here = other->cta == self().cta;
      give(other->view, std::max(other->view.to_device, is_here ? covered(*other) : 0));
    }
  }
}

void acquire() { self().view.seen = number_given; }

void give_some() {
  settle();
  View& view = self().view;
  if (!view.stores.empty()) give(view, 1 + draw(view.stores.size()));
}

void end_thread() {
  settle();
  give(self().view, self().view.stores.size());
  auto& fibers = self().cta->fibers;
  fibers.erase(std::find(fibers.begin(), fibers.end(), &self()));
}

}  // namespace emu

// --- what the compiler calls ---------------------------------------------------------------------

#define EMU_ACCESS(bytes)                                                      \
  void __tsan_read##bytes(void*) {}                                            \
  void __tsan_write##bytes(void* to) { emu::note_store(to, bytes); }           \
  void __tsan_unaligned_read##bytes(void*) {}                                  \
  void __tsan_unaligned_write##bytes(void* to) { emu::note_store(to, bytes); } \
  void __tsan_volatile_read##bytes(void*) {}                                   \
  void __tsan_volatile_write##bytes(void*) {}

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
// What a GPU answers with a fault; a CPU takes it.
struct Place {
  const char* file;
  unsigned line, column;
};
void __ubsan_handle_type_mismatch_v1_abort(const Place* place, unsigned long address) {
  emu::fail(std::string(place->file) + ":" + std::to_string(place->line) +
            ": a misaligned access, at ..." + std::to_string(address % 64));
}
}
