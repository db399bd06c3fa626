// Runs operations one after the other, whatever streams they are queued on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ncclep {

// A CUDA event of the current device, without timing.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(std::uintptr_t stream);
  // Makes work queued on `stream` from now on wait until the event's work is over.
  void hold_back(std::uintptr_t stream) const;
  // Whether the work before the last record is over; true before the first.  Throws when the device
  // has failed.
  bool is_over() const;

 private:
  void* event_ = nullptr;  // cudaEvent_t
};

// A stream of the current device that waits for no other one, not even for the default stream: what
// the host waits for there is over without what the caller has queued.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  std::uintptr_t get() const;
  // Waits on the host for all that was queued; `what` names it in errors.
  void wait(const char* what) const;

 private:
  void* stream_ = nullptr;  // cudaStream_t
};

// Zeroes device memory, and waits for that alone.
void clear_memory(void* memory, std::size_t num_bytes);

// Whether work queued on the stream is being captured in a CUDA graph.
bool is_being_captured(std::uintptr_t stream);

// The order of all kernels that use the windows of one communicator.  Groups of one communicator
// share it: their kernels wait for other ranks, and if two groups ran at once, in one order here
// and in the other order on another rank, each could hold the SMs that the other one needs (a
// deadlock).
class StreamOrder {
 public:
  class Turn;
  // Whether everything queued here outside captures is over.  Throws when the device has failed.
  bool is_idle() const { return last_.done.is_over(); }

 private:
  // The last operation that was queued, or captured.
  struct Last {
    Event done;
    unsigned long long stream = 0;   // its id, which CUDA never reuses
    unsigned long long capture = 0;  // the id of the capture; 0: none
  };

  Last last_, last_captured_;
};

// An operation's turn: what is queued on `stream` between construction and `end` comes after the
// previous operation.  The caller orders CUDA graphs against work queued outside them: no event may
// lead into or out of a graph that is being captured.
class StreamOrder::Turn {
 public:
  Turn(StreamOrder& order, std::uintptr_t stream, bool& was_captured);
  // Says so in `was_captured` if the stream is being captured.  Not called after an error: then
  // there is no operation.
  void end();

 private:
  std::uintptr_t stream_;
  unsigned long long capture_, number_ = 0;  // ids; 0: none
  Last& last_;
  bool& was_captured_;
};

}  // namespace ncclep
