// Operations that run one after the other, whatever streams they are queued on.
#pragma once

#include <cstdint>
#include <functional>

namespace ncclep {

// A CUDA event of the current device, without timing.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(std::uintptr_t stream);
  // Has what is queued on `stream` from now on wait until the event's work is over.
  void hold_back(std::uintptr_t stream) const;
  // Whether the work before the last record is over; true before the first.  Throws when the device
  // has failed.
  bool is_over() const;

 private:
  void* event_ = nullptr;  // cudaEvent_t
};

// The order of all kernels that use the windows of one communicator.  Groups of one communicator
// share it: their kernels wait for other ranks, and if two groups ran at once, in one order here
// and in the other order elsewhere, each could hold the SMs that the other one needs.
class StreamOrder {
 public:
  // Queues what `launch` queues on `stream`, after the operation before.  Between a CUDA graph and
  // what is queued without one the order is up to the caller: an event must not lead into a graph
  // that is being captured, or out of one.
  //
  // Returns whether the stream is being captured.
  bool queue(std::uintptr_t stream, const std::function<void()>& launch);
  // Whether all that was queued here, and not captured, is over.  Throws when the device has
  // failed.
  bool is_idle() const { return last_.done.is_over(); }

 private:
  // The last operation that was queued, or captured.
  struct Last {
    Event done;
    unsigned long long stream = 0;   // its number, which no later stream has
    unsigned long long capture = 0;  // the number of the capture; 0: none
  };

  Last last_, last_captured_;
};

}  // namespace ncclep
