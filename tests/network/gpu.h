// The GPU of a rank, as the network uses it: copies in streams of a context of its own.
#pragma once

#include <array>
#include <cstring>
#include <memory>

#include "driver.h"
#include "ring.h"

namespace rma {

struct Gpu {
  Driver driver;
  int device = 0;
  void *in_stream = nullptr, *out_stream = nullptr;
  bool writes_values = false;  // a stream can, without a copy

  // Null: that failed.  A context of the GPU is current.  Copies have one of their own: calls in
  // the other one, which load a kernel or allocate memory, may wait for a kernel that waits for a
  // copy, and copies would wait for such a call.  A network card calls no driver.
  static std::unique_ptr<Gpu> open() {
    auto gpu = std::make_unique<Gpu>();
    Driver& driver = gpu->driver;
    void* before = nullptr;
    if (!driver.open() || driver.get_context(&before) != 0 || before == nullptr) return nullptr;
    int can_write = 0;
    if (driver.get_device(&gpu->device) != 0 ||
        driver.get_attribute(&can_write, Driver::kCanWriteValues, gpu->device) != 0 ||
        !Driver::ok(driver.new_context(&gpu->context_, 0, gpu->device), "cuCtxCreate")) {
      return nullptr;
    }
    gpu->writes_values = can_write != 0;
    const bool is_ready = driver.new_stream(&gpu->in_stream, Driver::kNonBlocking) == 0 &&
                          driver.new_stream(&gpu->out_stream, Driver::kNonBlocking) == 0;
    return driver.set_context(before) == 0 && is_ready ? std::move(gpu) : nullptr;
  }
  Gpu() = default;
  Gpu(const Gpu&) = delete;
  ~Gpu() {
    if (context_ == nullptr) return;
    enter();
    if (in_stream) driver.end_stream(in_stream);
    if (out_stream) driver.end_stream(out_stream);
    leave();
    driver.end_context(context_);
  }

  // Makes the context current until `leave`, unless it is already.  A graph that another thread
  // captures meanwhile does not hear of the calls.
  bool enter() {
    if (is_entered_) return true;
    is_entered_ = driver.get_context(&before_) == 0 && driver.set_context(context_) == 0;
    capture_ = Driver::kRelaxedCapture;
    if (is_entered_) driver.exchange_capture(&capture_);
    return is_entered_;
  }
  void leave() {
    if (!is_entered_) return;
    driver.exchange_capture(&capture_);
    driver.set_context(before_);
    is_entered_ = false;
  }
  bool wait(void* stream) {
    return enter() && Driver::ok(driver.wait(stream), "cuStreamSynchronize");
  }

 private:
  void *context_ = nullptr, *before_ = nullptr;
  int capture_ = 0;
  bool is_entered_ = false;
};

// Leaves the context of a GPU, if there is one, at the end of a scope.
struct Leaving {
  Gpu* gpu;
  ~Leaving() {
    if (gpu) gpu->leave();
  }
};

// From memory into a box, and from a box into memory.
inline bool fill(char* box, const char* from, std::size_t size, int type, Gpu* gpu) {
  if (type == kHost) {
    memcpy(box, from, size);
    return true;
  }
  const auto at = reinterpret_cast<Driver::Address>(from);
  return gpu->enter() &&
         Driver::ok(gpu->driver.to_host(box, at, size, gpu->out_stream), "cuMemcpyDtoHAsync");
}
inline bool empty(const char* box, char* to, std::size_t size, int type, Gpu* gpu) {
  if (type == kHost) {
    memcpy(to, box, size);
    return true;
  }
  const auto at = reinterpret_cast<Driver::Address>(to);
  return gpu->enter() &&
         Driver::ok(gpu->driver.to_device(at, box, size, gpu->in_stream), "cuMemcpyHtoDAsync");
}

// Copies from GPU to GPU that begin together, in any order: puts whose bytes overlap have none.
struct CopyList {
  static constexpr std::size_t kMost = 64;
  std::array<Driver::Address, kMost> to, from;
  std::array<std::size_t, kMost> sizes;
  std::size_t count = 0;

  void add(char* target, const char* source, std::size_t size) {
    to[count] = reinterpret_cast<Driver::Address>(target);
    from[count] = reinterpret_cast<Driver::Address>(source);
    sizes[count++] = size;
  }
  // By copy engines, not by multiprocessors: kernels that wait for these bytes may have them all.
  bool begin(Gpu& gpu) {
    Driver::CopyOptions options = {Driver::kInStreamOrder, {}, {}, Driver::kOverlapWithKernels};
    std::size_t first = 0;
    const int error = gpu.enter() ? gpu.driver.copy_all(to.data(), from.data(), sizes.data(), count,
                                                        &options, &first, 1, gpu.out_stream)
                                  : -1;
    count = 0;
    return Driver::ok(error, "cuMemcpyBatchAsync");
  }
};

// What has been done with slots of rings, in order, some of it by copies under way.
// Ends: how far that has come.
template <class Ends>
class Batches {
 public:
  bool open(const Driver& driver) {
    bool is_ready = true;
    for (Batch& batch : batches_) {
      is_ready = driver.new_event(&batch.event, Driver::kNoTiming) == 0 && is_ready;
    }
    return is_ready;
  }
  void close(const Driver& driver) {
    for (Batch& batch : batches_) {
      if (batch.event) driver.end_event(batch.event);
    }
  }

  bool is_empty() const { return count_ == 0; }
  bool is_full() const { return count_ == batches_.size(); }
  // stream: where copies of it are; null: there are none.
  bool add(Gpu* gpu, void* stream, const Ends& ends) {
    Batch& batch = batches_[(first_ + count_++) % batches_.size()];
    batch.ends = ends;
    batch.has_copies = stream != nullptr;
    return !stream || Driver::ok(gpu->driver.record(batch.event, stream), "cuEventRecord");
  }
  // Publishes the ends of those that are complete.
  // asks: the driver, about copies; otherwise it stops there.
  template <class Publish>
  bool finish(Gpu* gpu, bool asks, Publish publish) {
    for (; count_ > 0; --count_, first_ = (first_ + 1) % batches_.size()) {
      const Batch& batch = batches_[first_];
      if (batch.has_copies) {
        if (!asks) return true;
        if (!gpu->enter()) return false;
        const int error = gpu->driver.query(batch.event);
        if (error == Driver::kNotReady) return true;
        if (!Driver::ok(error, "cuEventQuery")) return false;
      }
      publish(batch.ends);
    }
    return true;
  }

 private:
  struct Batch {
    void* event = nullptr;
    bool has_copies = false;
    Ends ends{};
  };
  std::array<Batch, 4> batches_;
  std::size_t first_ = 0, count_ = 0;
};

}  // namespace rma
