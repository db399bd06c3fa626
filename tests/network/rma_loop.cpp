// A network without a network: an RMA plugin for NCCL over memory that processes of one machine
// share, so that kernels which put over GIN run between ranks on one GPU.
//
// A put that leaves the registered memory of its target writes nothing; both ranks see an error.
// The shared memory has no name, so nothing can be left behind.  Between GPUs, or within one, bytes
// are copied directly where both memories come from NCCL's allocator or another that can share
// them; all others pass the memory of the host.
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cstdio>

#include "group.h"
#include "rma_plugin.h"

std::atomic<std::uint64_t> rma_loop_counters[kNumCounters];

using namespace rma;

// Of this process, again, for all its links.
extern "C" [[gnu::visibility("default")]] Result rma_loop_read_environment() {
  const Lock lock(link_mutex);
  return read_environment(link_) ? kSuccess : kInvalidUsage;
}

namespace {

constexpr u64 kConnectNs = 60'000'000'000;
constexpr unsigned kRestUs = 50;

struct Listener {
  File rings;
  Post post;
};

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
  of->max_receives = static_cast<int>(link_.receives);
  of->device_type = kProxyDevice;
  of->num_virtual = 1;
  of->max_p2p_bytes = of->max_collective_bytes = std::size_t{1} << 40;
  of->max_multi_request = 1;
  of->rail = of->plane = -1;
  return kSuccess;
}

Result listen(void*, int, void* handle, void** listener) {
  auto made = std::make_unique<Listener>();
  made->rings = File(memfd_create("rma-loop", MFD_CLOEXEC));
  const int file = made->rings.number();
  if (file < 0 || ftruncate(file, kMaxRanks * sizeof(Ring)) != 0 || !made->post) {
    return kSystemError;
  }
  *static_cast<Handle*>(handle) = {getpid(), file, made->post.address()};
  *listener = made.release();
  return kSuccess;
}

Result close_listener(void* listener) {
  delete static_cast<Listener*>(listener);
  return kSuccess;
}

Result connect(void*, void* handles[], int num_ranks, int rank, void* listener, void** made) {
  if (num_ranks > kMaxRanks) return kInvalidUsage;
  auto& own = *static_cast<Listener*>(listener);
  auto group = std::make_unique<Group>(rank, num_ranks, std::move(own.post));
  group->in = map_rings(own.rings.number(), 0, num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    const Handle& other = *static_cast<Handle*>(handles[r]);
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", other.process, other.file);
    const File file(open(path, O_RDWR | O_CLOEXEC));
    Ring* ring = map_rings(file.number(), rank, 1);
    if (ring == nullptr || group->in == nullptr) return kSystemError;
    ring->is_open = true;
    group->out.push_back(ring);
    group->posts.push_back(other.post);
  }
  // The listener may be closed once all have opened it.
  for (const u64 start = now_ns();; sched_yield()) {
    if (std::all_of(group->in, group->in + num_ranks, [](Ring& r) { return r.is_open.load(); }))
      break;
    if (now_ns() - start > kConnectNs) return kSystemError;
  }
  group->is_silent();  // so that others know it from the start
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
  *made = group_of(to).add_region(data, size, type, (flags & kNeverReset) != 0);
  return *made ? kSuccess : kCudaError;
}
Result add_dmabuf(void*, void*, std::size_t, int, u64, int, u64, void**) { return kInvalidUsage; }

Result remove_region(void* from, void* region) {
  group_of(from).remove_region(*static_cast<Region*>(region));
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
  Request* const request = group.add_request();
  *made = request;
  request->number = number;
  request->target = static_cast<int>(rank);
  request->from = id_of(from);
  request->from_offset = from_offset;
  value = op == kIncrement ? 1 : value;
  request->message = {id_of(to), id_of(signals), to_offset, size, signal_offset, value};
  request->is_lost = link_.is(kDrop, number);
  if (!request->is_lost) group.send_later(request);
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

// Without the lock: NCCL asks about each message on its way, all the time, in the thread that puts.
Result test(void* of, void* tested, int* is_done) {
  Group& group = group_of(of);
  auto* const request = static_cast<Request*>(tested);
  const Ring& ring = *group.out[request->target];
  if (ring.is_refused) return kRemoteError;
  *is_done = request->is_lost ||
             (request->end > 0 && ring.tail.load(std::memory_order_acquire) >= request->end);
  if (!*is_done) return kSuccess;
  const Lock lock(group.mutex);
  group.end_request(request);
  return kSuccess;
}

// NCCL calls it all the time, in a thread for each communicator.
Result progress(void* context) {
  Group& group = group_of(context);
  bool rests = false;
  {
    const Lock lock(group.mutex);
    if (group.is_silent()) return kSuccess;
    if (group.has_failed || !group.progress()) group.has_failed = true;
    if (group.has_failed) return kCudaError;
    rests = group.is_resting();
  }
  if (rests) usleep(kRestUs);  // leaves the core to other ranks of this machine
  return kSuccess;
}

Result last_error(void* context, bool* has_error) {
  Group& group = group_of(context);
  const Lock lock(group.mutex);
  *has_error = group.is_refused || group.has_failed;
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
