// A stand-in for CUDA's driver, as far as the test network uses it: memory of a "GPU" is memory of
// the host in a file, so that processes share it as they share a GPU's.  Copies run as late as they
// may: when somebody waits for them, or asks for the second time.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

#include "driver.h"

#define FAKE extern "C" [[gnu::visibility("default")]]

namespace {

using Address = Driver::Address;
using Lock = std::lock_guard<std::recursive_mutex>;
using Stream = std::deque<std::function<void()>>;

struct Event {
  bool is_done = true, was_asked = false;
  Stream* stream = nullptr;
};
struct Mapping {
  std::size_t size;
  int file;  // -1: it cannot be shared
};

constexpr int kInvalid = 1;
std::recursive_mutex mutex;  // of the mappings
std::map<Address, Mapping> mappings;
char contexts[2];  // that of the program, and the network's
thread_local void* current = &contexts[0];

char* at(Address address) { return reinterpret_cast<char*>(address); }

void run(Stream& stream) {
  for (; !stream.empty(); stream.pop_front()) stream.front()();
}

}  // namespace

// --- for tests ---

FAKE void* fake_allocate(std::size_t size, bool is_shared) {
  const int file = memfd_create("fake-gpu", MFD_CLOEXEC);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (ftruncate(file, static_cast<off_t>(size)) != 0 || memory == MAP_FAILED) return nullptr;
  const Lock lock(mutex);
  mappings[reinterpret_cast<Address>(memory)] = {size, is_shared ? file : -1};
  return memory;
}
FAKE std::size_t fake_num_mappings() {
  const Lock lock(mutex);
  return mappings.size();
}

// --- the driver ---

FAKE int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
FAKE int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
FAKE int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
FAKE int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
FAKE int cuDeviceGetAttribute(int* value, int, int) {
  *value = 1;
  return 0;
}
FAKE int cuCtxCreate_v2(void** context, unsigned, int) {
  *context = current = &contexts[1];
  return 0;
}
FAKE int cuCtxDestroy_v2(void*) { return 0; }
FAKE int cuStreamCreate(void** stream, unsigned) {
  *stream = new Stream;
  return 0;
}
FAKE int cuStreamDestroy_v2(void* stream) {
  delete static_cast<Stream*>(stream);
  return 0;
}
FAKE int cuStreamSynchronize(void* stream) {
  run(*static_cast<Stream*>(stream));
  return 0;
}
FAKE int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return 0;
}
FAKE int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
FAKE int cuEventRecord(void* event, void* stream) {
  auto* const recorded = static_cast<Event*>(event);
  *recorded = {false, false, static_cast<Stream*>(stream)};
  recorded->stream->push_back([=] { recorded->is_done = true; });
  return 0;
}
FAKE int cuEventQuery(void* event) {
  auto* const asked = static_cast<Event*>(event);
  if (asked->was_asked && !asked->is_done) run(*asked->stream);
  asked->was_asked = true;
  return asked->is_done ? 0 : Driver::kNotReady;
}
FAKE int cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t size, void* stream) {
  if (current != &contexts[1]) return kInvalid;
  static_cast<Stream*>(stream)->push_back([=] { memcpy(to, at(from), size); });
  return 0;
}
FAKE int cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t size, void* stream) {
  if (current != &contexts[1]) return kInvalid;
  static_cast<Stream*>(stream)->push_back([=] { memcpy(at(to), from, size); });
  return 0;
}
FAKE int cuStreamWriteValue64_v2(void* stream, Address to, std::uint64_t value, unsigned) {
  run(*static_cast<Stream*>(stream));
  __atomic_store_n(reinterpret_cast<std::uint64_t*>(to), value, __ATOMIC_RELEASE);
  return 0;
}
FAKE int cuMemcpyBatchAsync_v2(Address* to, Address* from, std::size_t* sizes, std::size_t count,
                               Driver::CopyOptions*, std::size_t*, std::size_t, void* stream) {
  if (current != &contexts[1]) return kInvalid;
  for (std::size_t i = count; i-- > 0;) {  // any order is right
    static_cast<Stream*>(stream)->push_back(
        [to = to[i], from = from[i], size = sizes[i]] { memcpy(at(to), at(from), size); });
  }
  return 0;
}
FAKE int cuMemHostRegister_v2(void*, std::size_t, unsigned) { return 0; }
FAKE int cuMemHostUnregister(void*) { return 0; }

FAKE int cuMemGetAddressRange_v2(Address* base, std::size_t* size, Address address) {
  const Lock lock(mutex);
  auto found = mappings.upper_bound(address);
  if (found == mappings.begin()) return kInvalid;
  --found;
  if (address - found->first >= found->second.size) return kInvalid;
  *base = found->first;
  *size = found->second.size;
  return 0;
}
// A handle is a file.
FAKE int cuMemRetainAllocationHandle(std::uint64_t* handle, void* address) {
  const Lock lock(mutex);
  Address base = 0;
  std::size_t size = 0;
  if (cuMemGetAddressRange_v2(&base, &size, reinterpret_cast<Address>(address)) != 0) {
    return kInvalid;
  }
  const int file = mappings[base].file;
  *handle = file < 0 ? UINT64_MAX : static_cast<std::uint64_t>(dup(file));
  return 0;
}
FAKE int cuMemExportToShareableHandle(void* file, std::uint64_t handle, int, unsigned long long) {
  if (handle == UINT64_MAX) return kInvalid;
  *static_cast<int*>(file) = dup(static_cast<int>(handle));
  return 0;
}
FAKE int cuMemImportFromShareableHandle(std::uint64_t* handle, void* file, int) {
  *handle = static_cast<std::uint64_t>(dup(static_cast<int>(reinterpret_cast<Address>(file))));
  return 0;
}
FAKE int cuMemRelease(std::uint64_t handle) {
  if (handle != UINT64_MAX) close(static_cast<int>(handle));
  return 0;
}
FAKE int cuMemAddressReserve(Address* address, std::size_t size, std::size_t, Address,
                             unsigned long long) {
  void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = reinterpret_cast<Address>(memory);
  return memory == MAP_FAILED ? kInvalid : 0;
}
FAKE int cuMemAddressFree(Address address, std::size_t size) { return munmap(at(address), size); }
FAKE int cuMemMap(Address address, std::size_t size, std::size_t, std::uint64_t handle,
                  unsigned long long) {
  void* memory = mmap(at(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      static_cast<int>(handle), 0);
  if (memory == MAP_FAILED) return kInvalid;
  const Lock lock(mutex);
  mappings[address] = {size, -1};
  return 0;
}
FAKE int cuMemUnmap(Address address, std::size_t size) {
  const Lock lock(mutex);
  if (mappings.erase(address) == 0) return kInvalid;
  mmap(at(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return 0;
}
FAKE int cuMemSetAccess(Address, std::size_t, const Driver::Access*, std::size_t) { return 0; }
