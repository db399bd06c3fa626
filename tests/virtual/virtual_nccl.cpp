// Stands in for libnccl.so.2 where the ranks are threads of one process and share one GPU: the
// functions that csrc/nccl/nccl.h binds, so that windows, checks and kernels run as they are.
//
// A window is one range of addresses in which the memory of rank r begins at flat_base + r *
// stride, as in NCCL's LSA domain.  NCCL gives every process a range of its own; here all ranks
// share one, because writes through one address are not promised to be seen through another address
// of the same memory while kernels run (CUDA programming guide, "Virtual Aliasing Support").  The
// address that ncclMemAlloc returned is such a second one: the engine uses it between kernels only.
//
// What NCCL waits for without end has a deadline here (VIRTUAL_NCCL_DEADLINE_S, 60 s), after which
// every rank gets an error.
#include <cuda.h>
#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Result { kSuccess = 0, kUnhandledCudaError = 1, kInvalidArgument = 4, kRemoteError = 6 };

thread_local std::string last_error;

Result fail(Result result, const std::string& text) {
  last_error = text;
  return result;
}

// --- the driver ----------------------------------------------------------------------------------

// Macros of cuda.h turn some of the names into those of a version; so do these.
#define NAME_OF(name) NAME_OF_(name)
#define NAME_OF_(name) #name
#define DRIVER_FUNCTIONS(DO)        \
  DO(cuInit)                        \
  DO(cuGetErrorName)                \
  DO(cuDevicePrimaryCtxRetain)      \
  DO(cuCtxGetCurrent)               \
  DO(cuCtxSetCurrent)               \
  DO(cuCtxGetDevice)                \
  DO(cuCtxSetLimit)                 \
  DO(cuModuleGetLoadingMode)        \
  DO(cuStreamCreate)                \
  DO(cuMemGetAllocationGranularity) \
  DO(cuMemCreate)                   \
  DO(cuMemRelease)                  \
  DO(cuMemAddressReserve)           \
  DO(cuMemAddressFree)              \
  DO(cuMemMap)                      \
  DO(cuMemUnmap)                    \
  DO(cuMemSetAccess)                \
  DO(cuMemAlloc)                    \
  DO(cuMemFree)                     \
  DO(cuMemcpyHtoD)                  \
  DO(cuMemsetD8)

struct Driver {
#define DECLARE(name) decltype(&::name) p_##name = nullptr;
  DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE
  std::string problem;

  Driver() {
    const char* named = std::getenv("VIRTUAL_CUDA_LIBRARY");
    const char* path = named ? named : "libcuda.so.1";
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      problem = dlerror();
      return;
    }
#define FIND(name)                                                                \
  p_##name = reinterpret_cast<decltype(p_##name)>(dlsym(library, NAME_OF(name))); \
  if (p_##name == nullptr) problem = std::string(path) + " has no " + NAME_OF(name);
    DRIVER_FUNCTIONS(FIND)
#undef FIND
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// Calls a function of the driver; in a function that returns a Result.
#define CUDA(name, ...)                                                                 \
  if (const CUresult status = driver().p_##name(__VA_ARGS__); status != CUDA_SUCCESS) { \
    return fail_in(#name, status);                                                      \
  }

Result fail_in(const char* call, CUresult status) {
  const char* name = nullptr;
  driver().p_cuGetErrorName(status, &name);
  return fail(kUnhandledCudaError,
              std::string(call) + ": " + (name ? name : std::to_string(static_cast<int>(status))));
}

// Makes device 0 current unless the thread has one.
Result use_device(CUdevice* device) {
  if (!driver().problem.empty()) return fail(kUnhandledCudaError, driver().problem);
  CUDA(cuInit, 0);
  CUcontext context = nullptr;
  CUDA(cuCtxGetCurrent, &context);
  if (context == nullptr) {
    CUDA(cuDevicePrimaryCtxRetain, &context, 0);
    CUDA(cuCtxSetCurrent, context);
  }
  CUDA(cuCtxGetDevice, device);
  return kSuccess;
}

// --- memory --------------------------------------------------------------------------------------

// What windows are full of before anybody clears them.
constexpr unsigned char kGarbage = 0xA5;

struct Allocation {
  CUmemGenericAllocationHandle handle;
  std::size_t num_bytes;  // rounded up
  CUdevice device;
};

struct Memory {
  std::mutex mutex;
  std::map<CUdeviceptr, Allocation> allocations;
};

Memory& memory() {
  static Memory all;
  return all;
}

CUmemAllocationProp properties_on(CUdevice device) {
  CUmemAllocationProp properties;
  std::memset(&properties, 0, sizeof(properties));
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// Maps an allocation at an address that is reserved.
Result map_at(CUdeviceptr address, const Allocation& allocation) {
  CUDA(cuMemMap, address, allocation.num_bytes, 0, allocation.handle, 0);
  CUmemAccessDesc access;
  std::memset(&access, 0, sizeof(access));
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = allocation.device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUDA(cuMemSetAccess, address, allocation.num_bytes, &access, 1);
  return kSuccess;
}

// --- ranks ---------------------------------------------------------------------------------------

double deadline_s() {
  const char* text = std::getenv("VIRTUAL_NCCL_DEADLINE_S");
  return text ? std::atof(text) : 60.0;
}

// The start of NCCL's window struct in device memory, as csrc/nccl/window.cpp reads it.
struct WindowOnDevice {
  void* host_side;
  char* flat_base;
  int lsa_rank;
  int world_rank;
  std::uint32_t stride_4g;
};

struct Window {
  CUdeviceptr base = 0;
  std::size_t stride = 0, num_bytes = 0;  // `num_bytes`: of one rank's mapping, rounded up
  std::vector<CUdeviceptr> on_device;     // by rank: its WindowOnDevice
};

// The ranks of one communicator.
struct World {
  explicit World(int num_ranks) : num_ranks(num_ranks), offered(num_ranks), is_here(num_ranks) {}

  const int num_ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::string broken;  // why nothing works any more
  int num_met = 0;
  std::uint64_t num_meetings = 0;
  // What each rank brings to a meeting, and what the last one made of it.
  struct Offer {
    CUdeviceptr address = 0;
    std::size_t num_bytes = 0;
    Window* window = nullptr;
  };
  std::vector<Offer> offered;
  std::vector<bool> is_here;
  Window* made = nullptr;
  Result result = kSuccess;
  std::string text;

  // All ranks come; the last one does `work`, with the lock; everybody returns what it returned.
  template <typename Work>
  Result meet(int rank, const char* what, const Offer& offer, Work&& work, Window** window) {
    std::unique_lock<std::mutex> lock(mutex);
    if (broken.empty() && is_here[rank]) broken = std::string(what) + ": a rank came twice";
    if (!broken.empty()) return fail(kRemoteError, broken);
    offered[rank] = offer;
    is_here[rank] = true;
    const std::uint64_t meeting = num_meetings;
    if (++num_met == num_ranks) {
      last_error.clear();
      result = work();
      text = last_error;
      num_met = 0;
      is_here.assign(num_ranks, false);
      ++num_meetings;
      changed.notify_all();
    } else {
      const auto limit = std::chrono::duration<double>(deadline_s());
      changed.wait_for(lock, limit, [&] { return num_meetings != meeting || !broken.empty(); });
      if (num_meetings == meeting) {
        if (broken.empty()) {
          broken = std::string(what) + ": " + std::to_string(num_met) + " of " +
                   std::to_string(num_ranks) + " ranks came within " +
                   std::to_string(deadline_s()) + " s";
        }
        changed.notify_all();
        return fail(kRemoteError, broken);
      }
    }
    if (window != nullptr) *window = made;
    return result == kSuccess ? kSuccess : fail(result, text);
  }

  // By the last of a meeting.
  Result map_windows() {
    made = nullptr;
    auto window = std::make_unique<Window>();
    std::vector<Allocation> allocations;
    {
      const std::lock_guard<std::mutex> alone(memory().mutex);
      for (const Offer& offer : offered) {
        const auto found = memory().allocations.find(offer.address);
        if (found == memory().allocations.end()) {
          return fail(kInvalidArgument, "a window needs memory of ncclMemAlloc");
        }
        if (offer.num_bytes != offered[0].num_bytes || offer.num_bytes > found->second.num_bytes) {
          return fail(kInvalidArgument, "the ranks' windows have different sizes");
        }
        allocations.push_back(found->second);
      }
    }
    window->num_bytes = allocations[0].num_bytes;
    const std::uint32_t stride_4g = static_cast<std::uint32_t>((window->num_bytes - 1) >> 32) + 1;
    window->stride = static_cast<std::size_t>(stride_4g) << 32;
    CUDA(cuMemAddressReserve, &window->base, window->stride * num_ranks, 0, 0, 0);
    for (int r = 0; r < num_ranks; ++r) {
      const Result mapped = map_at(window->base + r * window->stride, allocations[r]);
      if (mapped != kSuccess) return mapped;
    }
    for (int r = 0; r < num_ranks; ++r) {
      WindowOnDevice head;
      std::memset(&head, 0, sizeof(head));
      head.flat_base = reinterpret_cast<char*>(window->base);
      head.lsa_rank = head.world_rank = r;
      head.stride_4g = stride_4g;
      CUdeviceptr address = 0;
      CUDA(cuMemAlloc, &address, sizeof(head));
      window->on_device.push_back(address);
      CUDA(cuMemcpyHtoD, address, &head, sizeof(head));
    }
    made = window.release();
    return kSuccess;
  }

  Result unmap_windows() {
    const std::unique_ptr<Window> window(offered[0].window);
    for (int r = 0; r < num_ranks; ++r) {
      CUDA(cuMemUnmap, window->base + r * window->stride, window->num_bytes);
      CUDA(cuMemFree, window->on_device[r]);
    }
    CUDA(cuMemAddressFree, window->base, window->stride * num_ranks);
    return kSuccess;
  }
};

struct UniqueId {
  char bytes[128];
};

// What ncclComm_t points to.
struct Communicator {
  std::shared_ptr<World> world;
  int rank;
  std::map<CUdeviceptr, Window*> windows;  // by this rank's WindowOnDevice
};

struct Worlds {
  std::mutex mutex;
  int num_ids = 0;
  std::map<std::string, std::weak_ptr<World>> by_id;
};

Worlds& worlds() {
  static Worlds all;
  return all;
}

}  // namespace

// --- NCCL's interface ----------------------------------------------------------------------------

struct Team {
  int num_ranks, rank, stride;
};

EXPORT int ncclGetVersion(int* version) {
  *version = 23007;
  return kSuccess;
}

EXPORT int ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  const std::lock_guard<std::mutex> alone(worlds().mutex);
  const std::string text = "virtual " + std::to_string(++worlds().num_ids);
  std::memcpy(id->bytes, text.data(), text.size());
  return kSuccess;
}

EXPORT int ncclCommInitRank(void** result, int num_ranks, UniqueId id, int rank) {
  *result = nullptr;
  if (rank < 0 || rank >= num_ranks) return fail(kInvalidArgument, "there is no such rank");
  std::shared_ptr<World> world;
  {
    const std::lock_guard<std::mutex> alone(worlds().mutex);
    std::weak_ptr<World>& known = worlds().by_id[std::string(id.bytes, sizeof(id.bytes))];
    world = known.lock();
    if (world == nullptr) known = world = std::make_shared<World>(num_ranks);
  }
  if (world->num_ranks != num_ranks) return fail(kInvalidArgument, "ranks differ in their number");
  const int met = world->meet(rank, "ncclCommInitRank", {}, [] { return kSuccess; }, nullptr);
  if (met == kSuccess) *result = new Communicator{world, rank, {}};
  return met;
}

EXPORT int ncclCommDestroy(void* communicator) {
  delete static_cast<Communicator*>(communicator);
  return kSuccess;
}

EXPORT int ncclCommAbort(void* communicator) {
  auto* mine = static_cast<Communicator*>(communicator);
  {
    const std::lock_guard<std::mutex> alone(mine->world->mutex);
    mine->world->broken = "rank " + std::to_string(mine->rank) + " aborted its communicator";
  }
  mine->world->changed.notify_all();
  delete mine;
  return kSuccess;
}

EXPORT Team ncclTeamLsa(void* communicator) {
  const auto* mine = static_cast<Communicator*>(communicator);
  return {mine->world->num_ranks, mine->rank, 1};
}

EXPORT int ncclMemAlloc(void** result, std::size_t num_bytes) {
  *result = nullptr;
  Allocation allocation{};
  if (const Result used = use_device(&allocation.device); used != kSuccess) return used;
  const CUmemAllocationProp properties = properties_on(allocation.device);
  std::size_t granularity = 0;
  CUDA(cuMemGetAllocationGranularity, &granularity, &properties,
       CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  allocation.num_bytes = (num_bytes + granularity - 1) / granularity * granularity;
  if (allocation.num_bytes == 0) return fail(kInvalidArgument, "no bytes");
  CUDA(cuMemCreate, &allocation.handle, allocation.num_bytes, &properties, 0);
  CUdeviceptr address = 0;
  CUDA(cuMemAddressReserve, &address, allocation.num_bytes, 0, 0, 0);
  if (const Result mapped = map_at(address, allocation); mapped != kSuccess) return mapped;
  CUDA(cuMemsetD8, address, kGarbage, allocation.num_bytes);
  const std::lock_guard<std::mutex> alone(memory().mutex);
  memory().allocations[address] = allocation;
  *result = reinterpret_cast<void*>(address);
  return kSuccess;
}

EXPORT int ncclMemFree(void* pointer) {
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  Allocation allocation;
  {
    const std::lock_guard<std::mutex> alone(memory().mutex);
    const auto found = memory().allocations.find(address);
    if (found == memory().allocations.end()) return fail(kInvalidArgument, "no such memory");
    allocation = found->second;
    memory().allocations.erase(found);
  }
  CUDA(cuMemUnmap, address, allocation.num_bytes);
  CUDA(cuMemAddressFree, address, allocation.num_bytes);
  CUDA(cuMemRelease, allocation.handle);
  return kSuccess;
}

EXPORT int ncclCommWindowRegister(void* communicator, void* buffer, std::size_t num_bytes,
                                  void** result, int) {
  *result = nullptr;
  auto* mine = static_cast<Communicator*>(communicator);
  CUdevice device;
  if (const Result used = use_device(&device); used != kSuccess) return used;
  World& world = *mine->world;
  World::Offer offer;
  offer.address = reinterpret_cast<CUdeviceptr>(buffer);
  offer.num_bytes = num_bytes;
  Window* window = nullptr;
  const Result met = world.meet(
      mine->rank, "ncclCommWindowRegister", offer, [&] { return world.map_windows(); }, &window);
  if (met != kSuccess) return met;
  const CUdeviceptr handle = window->on_device[mine->rank];
  mine->windows[handle] = window;
  *result = reinterpret_cast<void*>(handle);
  return kSuccess;
}

EXPORT int ncclCommWindowDeregister(void* communicator, void* handle) {
  auto* mine = static_cast<Communicator*>(communicator);
  const auto found = mine->windows.find(reinterpret_cast<CUdeviceptr>(handle));
  if (found == mine->windows.end()) return fail(kInvalidArgument, "no such window");
  World& world = *mine->world;
  World::Offer offer;
  offer.window = found->second;
  mine->windows.erase(found);
  // The last to come unmaps: nobody's kernels use the window any more.
  return world.meet(
      mine->rank, "ncclCommWindowDeregister", offer, [&] { return world.unmap_windows(); },
      nullptr);
}

EXPORT const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kUnhandledCudaError:
      return "unhandled cuda error";
    case kInvalidArgument:
      return "invalid argument";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unknown result";
  }
}

EXPORT const char* ncclGetLastError(void*) { return last_error.c_str(); }

// --- for the harness -----------------------------------------------------------------------------

// Makes `count` streams that do not wait for the default stream.  The first streams of a process
// have hardware queues of their own, as long as there are CUDA_DEVICE_MAX_CONNECTIONS: later ones
// share these, and a kernel that waits for another rank would hold up what comes behind it.
EXPORT int virtual_streams(int count, void** streams) {
  CUdevice device;
  if (const Result used = use_device(&device); used != kSuccess) return used;
  CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
  CUDA(cuModuleGetLoadingMode, &mode);
  if (mode != CU_MODULE_EAGER_LOADING) {
    std::fprintf(stderr, "CUDA started without CUDA_MODULE_LOADING=EAGER: ranks may hang\n");
  }
  // Threads' stacks grow when a kernel needs more than any before, and the driver waits for all
  // kernels then: so they are large enough for all from the start.
  CUDA(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 4096);
  for (int i = 0; i < count; ++i) {
    CUstream stream = nullptr;
    CUDA(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    streams[i] = stream;
  }
  return kSuccess;
}

// An allocator for torch under compute-sanitizer: every tensor is an allocation of its own, and
// none is ever freed, because freeing waits for all kernels, also for those that wait for this
// rank.
EXPORT void* virtual_malloc(std::size_t num_bytes, int, void*) {
  CUdeviceptr address = 0;
  if (driver().p_cuMemAlloc(&address, num_bytes) != CUDA_SUCCESS) return nullptr;
  return reinterpret_cast<void*>(address);
}

EXPORT void virtual_free(void*, std::size_t, int, void*) {}
