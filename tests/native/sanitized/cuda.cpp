#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "standin.h"

// How many of the kernels that were noted in a capture, or outside of captures, come before.
struct Seen {
  unsigned long long capture = 0;
  int kernels = 0;
};

struct CUevent_st {
  Seen seen;
  int held_until = 0;  // the number of the release that ends its work
};

namespace standin {

namespace {

struct Stream {
  unsigned long long number;
  std::map<unsigned long long, int> seen;  // kernels, by capture; 0: outside of captures
  int held_until = 0;
};

struct Device {
  std::set<void*> allocated;
  int left_until_failure = -1, left_until_release = -1;  // calls; queries
  std::map<std::uintptr_t, Stream> streams;
  std::map<std::uintptr_t, unsigned long long> captures;  // by stream
  std::map<unsigned long long, int> kernels;              // by capture
  unsigned long long num_streams = 0, num_captures = 1;   // 0 is no capture
  int num_releases = 0, num_over = 0;                     // kernels, as the host knows
  std::vector<std::function<void()>> waiting;
} device;

Stream& stream_of(std::uintptr_t handle) {
  const auto found = device.streams.find(handle);
  if (found != device.streams.end()) return found->second;
  Stream made{++device.num_streams, {{0, device.num_over}}};
  return device.streams.emplace(handle, std::move(made)).first->second;
}

// 0: the stream is not being captured.
unsigned long long capture_of(std::uintptr_t stream) {
  const auto found = device.captures.find(stream);
  return found == device.captures.end() ? 0 : found->second;
}

cudaError_t result_of_query(bool is_over) {
  if (device.left_until_release >= 0 && device.left_until_release-- == 0) release();
  return result(is_over ? cudaSuccess : cudaErrorNotReady);
}

}  // namespace

cudaError_t result(cudaError_t otherwise) {
  if (device.left_until_failure < 0 || device.left_until_failure-- > 0) return otherwise;
  return cudaErrorMemoryAllocation;
}

void hold(std::uintptr_t stream) { stream_of(stream).held_until = device.num_releases + 1; }

bool is_held(std::uintptr_t stream) { return stream_of(stream).held_until > device.num_releases; }

void run_on_device(std::uintptr_t stream, std::function<void()> work) {
  if (is_held(stream)) {
    device.waiting.push_back(std::move(work));
  } else {
    work();
  }
}

void note_kernel(std::uintptr_t stream) {
  const unsigned long long capture = capture_of(stream);
  int &last = device.kernels[capture], &seen = stream_of(stream).seen[capture];
  require(seen == last, "a kernel does not wait for the one before, which is on another stream");
  seen = ++last;
}

void require(bool holds, const std::string& text) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", text.c_str());
  std::abort();
}

cudaError_t allocate(void** memory, std::size_t num_bytes) {
  if (const cudaError_t error = result(); error != cudaSuccess) return error;
  *memory = std::malloc(num_bytes);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xa5, num_bytes);
  device.allocated.insert(*memory);
  return cudaSuccess;
}

cudaError_t free(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  require(device.allocated.erase(memory) == 1, "memory is freed that was not allocated");
  std::free(memory);
  return cudaSuccess;
}

void fail_after(int num_calls) { device.left_until_failure = num_calls; }

int num_allocations() { return static_cast<int>(device.allocated.size()); }

void capture(std::uintptr_t first, std::uintptr_t second) {
  device.captures.clear();
  device.kernels.erase(device.num_captures);  // nothing of the last capture comes again
  for (auto& [handle, stream] : device.streams) stream.seen.erase(device.num_captures);
  ++device.num_captures;
  for (const std::uintptr_t stream : {first, second}) {
    if (stream != 0) device.captures[stream] = device.num_captures;
  }
}

void remake(std::uintptr_t stream) { device.streams.erase(stream); }

void release() {
  for (const std::function<void()>& work : std::exchange(device.waiting, {})) work();
  ++device.num_releases;
}

void release_at_query(int n) { device.left_until_release = n - 1; }

}  // namespace standin

using standin::capture_of;
using standin::device;
using standin::result;
using standin::stream_of;

static std::uintptr_t handle(cudaStream_t stream) {
  return reinterpret_cast<std::uintptr_t>(stream);
}

// --- what the host code calls --------------------------------------------------------------------

cudaError_t cudaDeviceSynchronize() {
  standin::release();
  device.num_over = device.kernels[0];
  for (auto& [handle, stream] : device.streams) stream.seen[0] = device.num_over;
  return result();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  void* memory = nullptr;
  if (const cudaError_t error = standin::allocate(&memory, sizeof(CUevent_st))) return error;
  *event = new (memory) CUevent_st{};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return standin::free(event); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const unsigned long long capture = capture_of(handle(stream));
  event->seen = {capture, stream_of(handle(stream)).seen[capture]};
  event->held_until = stream_of(handle(stream)).held_until;
  return result();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const unsigned long long capture = capture_of(handle(stream));
  // CUDA takes the first, and the stream is then part of the capture.
  standin::require(event->seen.capture == capture,
                   "a stream waits for an event of another capture, or across a capture's border");
  standin::Stream& waits = stream_of(handle(stream));
  waits.seen[capture] = std::max(waits.seen[capture], event->seen.kernels);
  waits.held_until = std::max(waits.held_until, event->held_until);
  return result();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  standin::require(event->seen.capture == 0, "an event of a capture is asked whether it is over");
  return standin::result_of_query(event->held_until <= device.num_releases);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return standin::result_of_query(!standin::is_held(handle(stream)));
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number) {
  standin::require(capture_of(handle(stream)) == 0,
                   "a stream that is captured has no number to ask for");
  *number = stream_of(handle(stream)).number;
  return result();
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* number) {
  *number = capture_of(handle(stream));
  *status = *number != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return result();
}
