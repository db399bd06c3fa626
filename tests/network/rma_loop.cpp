// A network without a network: an RMA plugin for NCCL over memory that processes of one machine
// share, so that kernels which put over GIN run between ranks on one GPU.
//
// The source's progress copies a message into a ring in memory of the target, 256 KB at a time; the
// target's progress copies it to its place when it has arrived, and then adds the signal.  Messages
// of one pair stay in order.  link.h says how links are slowed down and broken.
//
// A put that leaves the registered memory of its target writes nothing; both ranks see an error.
// The shared memory has no name, so nothing can be left behind.  Memory of a GPU goes through the
// host, so all ranks on a GPU together get no more than its PCIe link gives.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
#include "link.h"
#include "rma_plugin.h"

// What this process has put (messages and bytes), the bytes that have come, and the messages that
// were refused here because they would have left registered memory.
enum { kPuts, kBytes, kBytesIn, kRefused, kNumCounters };
extern "C" [[gnu::visibility("default")]] std::atomic<std::uint64_t>
    rma_loop_counters[kNumCounters];
std::atomic<std::uint64_t> rma_loop_counters[kNumCounters];

namespace {

using namespace rma;

constexpr int kMaxRanks = 16, kSlots = 16;
constexpr std::size_t kSlotBytes = 256 << 10;
// Sent to one target before the copies are waited for: the target gets none of them earlier.
constexpr int kSlotsAtOnce = 2;
constexpr u64 kConnectNs = 60'000'000'000;

Link link_;  // of this process
std::mutex link_mutex;
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

Ring* map(int file, int first, int count) {
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

}  // namespace

// Of this process, again, for all its links.
extern "C" [[gnu::visibility("default")]] Result rma_loop_read_environment() {
  const Lock lock(link_mutex);
  return read_environment(link_) ? kSuccess : kInvalidUsage;
}

namespace {

Group& group_of(void* group) { return *static_cast<Group*>(group); }
int id_of(void* region) { return region ? static_cast<Region*>(region)->id : -1; }

// --- the interface -------------------------------------------------------------------------------

Result init(void** instance, u64, void*) {
  *instance = &link_;  // anything but null
  return rma_loop_read_environment();
}
Result finalize(void*) { return kSuccess; }

Result devices(int* count) {
  *count = 1;
  return kSuccess;
}

Result properties(int, Properties* of) {
  static char name[] = "loop";
  *of = {};
  of->name = name;
  of->guid = 1;
  of->memory_types = kHost | kCuda;
  of->speed_mbps = 100'000;
  of->max_groups = 1024;
  of->max_receives = 8;  // NCCL's queues have 32 times as many places, which must be a power of two
  of->device_type = kProxyDevice;
  of->num_virtual = 1;
  of->max_p2p_bytes = of->max_collective_bytes = std::size_t{1} << 40;
  of->max_multi_request = 1;
  of->rail = of->plane = -1;
  return kSuccess;
}

Result listen(void*, int, void* handle, void** listener) {
  const int file = memfd_create("rma-loop", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kMaxRanks * sizeof(Ring)) != 0) return kSystemError;
  *static_cast<Handle*>(handle) = {getpid(), file};
  *listener = new int(file);
  return kSuccess;
}

Result close_listener(void* listener) {
  const std::unique_ptr<int> file(static_cast<int*>(listener));
  close(*file);
  return kSuccess;
}

Result connect(void*, void* handles[], int num_ranks, int rank, void* listener, void** made) {
  if (num_ranks > kMaxRanks) return kInvalidUsage;
  auto group = std::make_unique<Group>(num_ranks);
  group->in = map(*static_cast<int*>(listener), 0, num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    const Handle& other = *static_cast<Handle*>(handles[r]);
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", other.process, other.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    Ring* ring = map(file, rank, 1);
    close(file);
    if (ring == nullptr || group->in == nullptr) return kSystemError;
    ring->is_open = true;
    group->out.push_back(ring);
  }
  // The listener may be closed once all have opened it.
  for (const u64 start = now_ns();; sched_yield()) {
    if (std::all_of(group->in, group->in + num_ranks, [](Ring& r) { return r.is_open.load(); }))
      break;
    if (now_ns() - start > kConnectNs) return kSystemError;
  }
  *made = group.release();
  return kSuccess;
}

Result close_group(void* group) {
  delete &group_of(group);
  return kSuccess;
}

Result create_context(void* group, void*, void** context) {
  *context = group;
  return kSuccess;
}
Result destroy_context(void*) { return kSuccess; }

Result add_region(void* to, void* data, std::size_t size, int type, u64 flags, void** made) {
  Group& group = group_of(to);
  const Lock lock(group.mutex);
  if (type == kCuda && !group.use_gpu()) return kCudaError;
  const int id = static_cast<int>(group.regions.size());
  const bool is_never_reset = (flags & kNeverReset) != 0;
  group.regions.emplace_back(
      new Region{id, type, static_cast<char*>(data), size, is_never_reset, {}});
  *made = group.regions.back().get();
  return kSuccess;
}
Result add_dmabuf(void*, void*, std::size_t, int, u64, int, u64, void**) { return kInvalidUsage; }

Result remove_region(void* from, void* region) {
  const Lock lock(group_of(from).mutex);
  group_of(from).regions[id_of(region)]->size = 0;  // its place in the order stays
  return kSuccess;
}

Result put_signal(void* context, int, u64 from_offset, void* from, std::size_t size, u64 to_offset,
                  void* to, u32 rank, u64 signal_offset, void* signals, u64 value, u32 op, bool,
                  void** made) {
  Group& group = group_of(context);
  const Lock lock(group.mutex);
  const u64 number = ++rma_loop_counters[kPuts];
  if (size > 0 && !group.find(id_of(from), from_offset, size)) return kInvalidUsage;
  if (link_.has_begun(kError, number)) return kSystemError;
  rma_loop_counters[kBytes] += size;
  auto* request = new Request{};
  group.requests[request].reset(request);
  *made = request;
  request->number = number;
  request->target = static_cast<int>(rank);
  request->from = id_of(from);
  request->from_offset = from_offset;
  value = op == kIncrement ? 1 : value;
  request->message = {id_of(to), id_of(signals), to_offset, size, signal_offset, value};
  request->is_lost = link_.is(kDrop, number);
  if (!request->is_lost) group.waiting[rank].push_back(request);
  return kSuccess;
}

Result put(void* context, int index, u64 from_offset, void* from, std::size_t size, u64 to_offset,
           void* to, u32 rank, void** request) {
  return put_signal(context, index, from_offset, from, size, to_offset, to, rank, 0, nullptr, 0,
                    kAdd, true, request);
}

Result flush(void*, int, void*, u32, void** request) {
  *request = nullptr;  // what has a signal is in its place
  return kSuccess;
}

Result test(void* of, void* tested, int* is_done) {
  Group& group = group_of(of);
  const Lock lock(group.mutex);
  const auto& request = *static_cast<Request*>(tested);
  const Ring& ring = *group.out[request.target];
  if (ring.is_refused) return kRemoteError;
  const u64 tail = ring.tail.load(std::memory_order_acquire);
  *is_done = request.is_lost || (request.end > 0 && tail >= request.end);
  if (*is_done) group.requests.erase(tested);
  return kSuccess;
}

Result progress(void* context) {
  Group& group = group_of(context);
  const Lock lock(group.mutex);
  if (link_.has_begun(kSilent, rma_loop_counters[kPuts])) return kSuccess;
  const Within ours(group.driver.get(), group.context);
  if (!ours) return kCudaError;
  return group.progress() ? kSuccess : kCudaError;
}

Result last_error(void* context, bool* has_error) {
  *has_error = group_of(context).is_refused;
  return kSuccess;
}

}  // namespace

extern "C" {

[[gnu::visibility("default")]] Plugin ncclRmaPlugin_v14 = {
    "loop",         init,       devices,    properties,    listen,          connect,
    create_context, add_region, add_dmabuf, remove_region, destroy_context, close_group,
    close_listener, put,        put_signal, nullptr,       flush,           test,
    progress,       last_error, finalize,
};

}  // extern "C"
