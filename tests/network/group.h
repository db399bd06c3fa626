// What the ranks of a group share, and how messages go through it.
//
// The source's progress copies a message into a ring in memory of the target, 256 KB at a time; the
// target's progress copies it to its place when it has arrived, and then adds the signal.  Messages
// of one pair stay in order.  link.h says how links are slowed down and broken.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"
#include "link.h"
#include "rma_plugin.h"

// What this process has put (messages and bytes), the bytes that have come, and the messages that
// were refused here because they would have left registered memory.
enum { kPuts, kBytes, kBytesIn, kRefused, kNumCounters };
extern "C" [[gnu::visibility("default")]] std::atomic<std::uint64_t>
    rma_loop_counters[kNumCounters];

namespace rma {

constexpr int kMaxRanks = 16, kSlots = 16;
constexpr std::size_t kSlotBytes = 256 << 10;
// Sent to one target before the copies are waited for: the target gets none of them earlier.
constexpr int kSlotsAtOnce = 2;

inline Link link_;  // of this process
inline std::mutex link_mutex;
using Lock = std::lock_guard<std::mutex>;

// --- what ranks share ----------------------------------------------------------------------------

struct Message {
  int to, signals;  // regions; -1: none
  u64 to_offset, size, signal_offset, value;
};

struct Slot {
  Message message;
  u64 first, num_bytes;  // of the message's bytes
  u64 arrives_ns;
  char data[kSlotBytes];
};

// From one rank to another, in the other's memory.
struct alignas(4096) Ring {
  std::atomic<bool> is_open, is_refused;
  alignas(64) std::atomic<u64> head;  // the source's
  alignas(64) std::atomic<u64> tail;  // the target's
  u64 word;                           // the target's, for signals on a GPU
  Slot slots[kSlots];
};

struct Handle {
  int process, file;
};
static_assert(sizeof(Handle) <= kHandleBytes);

inline Ring* map(int file, int first, int count) {
  void* memory = mmap(nullptr, count * sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED, file,
                      first * static_cast<off_t>(sizeof(Ring)));
  return memory == MAP_FAILED ? nullptr : static_cast<Ring*>(memory);
}

// --- a group of ranks ----------------------------------------------------------------------------

struct Region {
  int id, type;
  char* data;
  std::size_t size;
  bool is_never_reset;
  std::vector<u64> signals;  // of a GPU's memory that is never reset: the values

  bool holds(u64 offset, u64 num_bytes) const {
    return num_bytes <= size && offset <= size - num_bytes;
  }
};

struct Request {
  Message message;
  u64 number;  // of this process's puts, from 1
  int target, from;
  u64 from_offset, sent, end;  // end: in the ring; 0: not all is sent
  bool is_lost;
};

struct Group {
  int num_ranks;
  Ring* in = nullptr;           // by source
  std::vector<Ring*> out;       // by target
  std::vector<u64> arrival_ns;  // of the next slot, by source; 0: unknown
  std::vector<std::unique_ptr<Region>> regions;
  std::vector<std::deque<Request*>> waiting;  // by target
  std::map<void*, std::unique_ptr<Request>> requests;
  bool is_refused = false;
  std::mutex mutex;  // of all this
  std::unique_ptr<Driver> driver;
  void *context = nullptr, *in_stream = nullptr, *out_stream = nullptr;

  explicit Group(int ranks) : num_ranks(ranks), arrival_ns(ranks), waiting(ranks) {}
  ~Group() {
    const Within ours(driver.get(), context);
    for (Ring* ring : out) unmap(ring, 1);
    if (in) unmap(in, num_ranks);
    if (driver) {
      driver->end_stream(in_stream);
      driver->end_stream(out_stream);
      driver->end_context(context);
    }
  }

  void unmap(Ring* rings, int count) {
    if (driver) driver->unpin(rings);
    munmap(rings, count * sizeof(Ring));
  }

  // Before the first memory of a GPU; a context of that GPU is current.  Copies have one of their
  // own: calls in the other one, which load a kernel or allocate memory, may wait for a kernel that
  // waits for a copy, and copies would wait for such a call.  A network card calls no driver.
  bool use_gpu() {
    if (driver) return true;
    auto opened = std::make_unique<Driver>();
    void* before = nullptr;
    int device = 0;
    if (!opened->open() || opened->get_context(&before) != 0 || before == nullptr) return false;
    if (opened->get_device(&device) != 0 || opened->new_context(&context, 0, device) != 0) {
      return false;
    }
    bool is_ready =
        opened->new_stream(&in_stream, 1) == 0 && opened->new_stream(&out_stream, 1) == 0;
    is_ready = is_ready && opened->pin(in, num_ranks * sizeof(Ring), 1) == 0;
    for (Ring* ring : out) is_ready = is_ready && opened->pin(ring, sizeof(Ring), 1) == 0;
    is_ready = opened->set_context(before) == 0 && is_ready;
    if (is_ready) driver = std::move(opened);
    return is_ready;
  }

  bool to_memory(const Region& to, u64 offset, const void* data, std::size_t size) {
    char* const at = to.data + offset;
    if (to.type == kCuda)
      return driver->to_device(reinterpret_cast<u64>(at), data, size, in_stream) == 0;
    memcpy(at, data, size);
    return true;
  }
  bool from_memory(const Region& from, u64 offset, void* data, std::size_t size, void* stream) {
    const char* const at = from.data + offset;
    if (from.type == kCuda)
      return driver->to_host(data, reinterpret_cast<u64>(at), size, stream) == 0;
    memcpy(data, at, size);
    return true;
  }
  // When what begins at `start` has passed one end of this process's link.
  static u64 pass(u64& free_ns, u64 start, std::size_t size) {
    const Lock lock(link_mutex);
    return link_.pass(free_ns, start, size);
  }
  bool wait(void* stream) { return !driver || driver->wait(stream) == 0; }

  // Null unless memory is registered there.
  Region* find(int id, u64 offset, u64 size) const {
    Region* region = 0 <= id && id < static_cast<int>(regions.size()) ? regions[id].get() : nullptr;
    return region && region->holds(offset, size) ? region : nullptr;
  }

  bool add_signal(u64& word, Region& signals, u64 offset, u64 value) {
    if (signals.type == kHost) {
      __atomic_fetch_add(reinterpret_cast<u64*>(signals.data + offset), value, __ATOMIC_RELEASE);
      return true;
    }
    if (!wait(in_stream)) return false;  // what came before is in its place, and `word` is free
    if (signals.is_never_reset) {
      signals.signals.resize(signals.size / 8);
      word = signals.signals[offset / 8] += value;
    } else {
      if (!from_memory(signals, offset, &word, 8, in_stream) || !wait(in_stream)) return false;
      word += value;
    }
    return to_memory(signals, offset, &word, 8) && wait(in_stream);
  }

  bool deliver(Ring& ring, const Slot& slot) {
    const Message& message = slot.message;
    Region* to = find(message.to, message.to_offset, message.size);
    Region* signals = find(message.signals, message.signal_offset, 8);
    const bool is_right = signals && message.signal_offset % 8 == 0;
    if ((message.size > 0 && !to) || (message.signals >= 0 && !is_right)) {
      rma_loop_counters[kRefused] += slot.first + slot.num_bytes == message.size;
      ring.is_refused = is_refused = true;
      return true;
    }
    rma_loop_counters[kBytesIn] += slot.num_bytes;
    const u64 offset = message.to_offset + slot.first;
    if (slot.num_bytes > 0 && !to_memory(*to, offset, slot.data, slot.num_bytes)) return false;
    if (!signals || slot.first + slot.num_bytes < message.size) return true;
    return add_signal(ring.word, *signals, message.signal_offset, message.value);
  }

  // Copies what has arrived from `source` to its place, up to the returned position in its ring;
  // -1: that failed.  The copies may still be under way.
  std::int64_t receive(int source) {
    Ring& ring = in[source];
    const u64 head = ring.head.load(std::memory_order_acquire);
    u64 tail = ring.tail.load(std::memory_order_relaxed);
    for (u64& arrival = arrival_ns[source]; tail < head; ++tail, arrival = 0) {
      const Slot& slot = ring.slots[tail % kSlots];
      if (arrival == 0) {
        const u64 start = slot.arrives_ns - link_.duration_ns(slot.num_bytes);
        arrival = pass(link_.in_free_ns, start, slot.num_bytes);
      }
      if (now_ns() < arrival) break;
      if (!deliver(ring, slot)) return -1;
    }
    return static_cast<std::int64_t>(tail);
  }

  // Copies what waits for `target` into its ring, as `receive`.
  std::int64_t send(int target) {
    Ring& ring = *out[target];
    u64 head = ring.head.load(std::memory_order_relaxed);
    const u64 end =
        std::min(ring.tail.load(std::memory_order_acquire) + kSlots, head + kSlotsAtOnce);
    for (auto& queue = waiting[target]; !queue.empty() && head < end; ++head) {
      Request& request = *queue.front();
      if (link_.has_begun(kStop, request.number)) break;
      Slot& slot = ring.slots[head % kSlots];
      slot.message = request.message;
      slot.first = request.sent;
      slot.num_bytes = std::min(kSlotBytes, request.message.size - request.sent);
      const u64 offset = request.from_offset + slot.first;
      const Region* from = find(request.from, offset, slot.num_bytes);
      if (slot.num_bytes > 0) {
        if (!from || !from_memory(*from, offset, slot.data, slot.num_bytes, out_stream)) return -1;
      }
      slot.arrives_ns = pass(link_.out_free_ns, now_ns(), slot.num_bytes);
      slot.arrives_ns += static_cast<u64>(link_.latency_us * 1e3);
      if (link_.is(kDelay, request.number)) slot.arrives_ns += link_.delay_ms * 1'000'000;
      request.sent += slot.num_bytes;
      if (request.sent < request.message.size) continue;
      request.end = head + 1;
      queue.pop_front();
    }
    return static_cast<std::int64_t>(head);
  }

  // Receives and sends what can be; both at the same time, as a network does.
  bool progress() {
    std::vector<std::int64_t> heads, tails;
    for (int rank = 0; rank < num_ranks; ++rank) {
      heads.push_back(send(rank));
      tails.push_back(receive(rank));
      if (heads.back() < 0 || tails.back() < 0) return false;
    }
    if (!wait(out_stream)) return false;
    for (int rank = 0; rank < num_ranks; ++rank) {
      out[rank]->head.store(heads[rank], std::memory_order_release);
    }
    if (!wait(in_stream)) return false;
    for (int rank = 0; rank < num_ranks; ++rank) {
      in[rank].tail.store(tails[rank], std::memory_order_release);
    }
    return true;
  }
};

}  // namespace rma
