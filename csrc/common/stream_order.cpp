#include "common/stream_order.h"

#include <cuda_runtime.h>

#include "common/cuda.h"

namespace ncclep {

namespace {

cudaStream_t stream_of(std::uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

// The unique id of the capture that the stream takes part in; 0: none.
unsigned long long capture_of(std::uintptr_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  cuda_check(cudaStreamGetCaptureInfo(stream_of(stream), &status, &number),
             "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusNone ? 0 : number;
}

}  // namespace

bool is_being_captured(std::uintptr_t stream) { return capture_of(stream) != 0; }

OwnStream::OwnStream() {
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = stream;
}

// As with events.
OwnStream::~OwnStream() { cudaStreamDestroy(static_cast<cudaStream_t>(stream_)); }

std::uintptr_t OwnStream::get() const { return reinterpret_cast<std::uintptr_t>(stream_); }

void OwnStream::wait(const char* what) const {
  cuda_check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream_)), what);
}

void clear_memory(void* memory, std::size_t num_bytes) {
  const OwnStream stream;
  cuda_check(cudaMemsetAsync(memory, 0, num_bytes, stream_of(stream.get())), "cudaMemset");
  stream.wait("clearing memory");
}

Event::Event() {
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  event_ = event;
}

// An event may be destroyed before its work is over; the only possible errors come from CUDA
// shutting down.
Event::~Event() { cudaEventDestroy(event_of(event_)); }

void Event::record(std::uintptr_t stream) {
  cuda_check(cudaEventRecord(event_of(event_), stream_of(stream)), "cudaEventRecord");
}

void Event::hold_back(std::uintptr_t stream) const {
  cuda_check(cudaStreamWaitEvent(stream_of(stream), event_of(event_), 0), "cudaStreamWaitEvent");
}

bool Event::is_over() const {
  const cudaError_t status = cudaEventQuery(event_of(event_));
  if (status != cudaErrorNotReady) cuda_check(status, "waiting for the device");
  return status == cudaSuccess;
}

StreamOrder::Turn::Turn(StreamOrder& order, std::uintptr_t stream, bool& was_captured)
    : stream_(stream),
      capture_(capture_of(stream)),
      last_(capture_ != 0 ? order.last_captured_ : order.last_),
      was_captured_(was_captured) {
  // The id of a stream cannot be queried during capture, and waiting for itself costs nothing.
  if (capture_ == 0) cuda_check(cudaStreamGetId(stream_of(stream), &number_), "cudaStreamGetId");
  const bool follows = capture_ != 0 ? last_.capture == capture_ : last_.stream != number_;
  if (follows) last_.done.hold_back(stream);
}

void StreamOrder::Turn::end() {
  // Record now, not at the next operation: that one must not wait for work that the caller queues
  // here in between, which may itself wait for another rank.
  last_.done.record(stream_);
  last_.stream = number_;
  last_.capture = capture_;
  if (capture_ != 0) was_captured_ = true;
}

}  // namespace ncclep
