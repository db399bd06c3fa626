// Memory of a GPU that another process has, in this process's addresses: the allocation's file
// comes from its owner.  Mapping and unmapping may wait for running kernels, so that is done where
// a region is added and removed, never while a put is on its way.
#pragma once

#include <utility>

#include "driver.h"
#include "post.h"

namespace rma {

// Empty unless the region lies in one allocation whose memory can be shared.
inline File export_memory(const Driver& driver, void* data, std::size_t size, Letter& letter) {
  const auto at = reinterpret_cast<Driver::Address>(data);
  Driver::Address base = 0;
  std::size_t allocation_bytes = 0;
  std::uint64_t handle = 0;
  int file = -1;
  if (driver.range_of(&base, &allocation_bytes, at) != 0) return File();
  if (at - base + size > allocation_bytes || driver.retain(&handle, data) != 0) return File();
  if (driver.export_file(&file, handle, Driver::kFileHandle, 0) != 0) file = -1;
  driver.release(handle);
  letter.offset = at - base;
  letter.allocation_bytes = allocation_bytes;
  return File(file);
}

// A peer's region.
class PeerMemory {
 public:
  PeerMemory() = default;
  // This rank's own; null: it is not reached.
  PeerMemory(void* data, std::size_t size) : data_(static_cast<char*>(data)), size_(size) {}
  // Reached, if its owner has sent a file and this device can.
  PeerMemory(const Driver& driver, int device, const Mail& mail)
      : driver_(&driver), mapped_(mail.letter.allocation_bytes), size_(mail.letter.region_bytes) {
    std::uint64_t handle = 0;
    void* const file = reinterpret_cast<void*>(static_cast<std::intptr_t>(mail.file.number()));
    if (!mail.file || driver.import_file(&handle, file, Driver::kFileHandle) != 0) return;
    if (driver.reserve(&base_, mapped_, 0, 0, 0) != 0) base_ = 0;
    const bool is_mapped = base_ && driver.map(base_, mapped_, 0, handle, 0) == 0;
    driver.release(handle);
    const Driver::Access access = {{Driver::kDeviceType, device}, Driver::kReadWrite};
    if (is_mapped && driver.set_access(base_, mapped_, &access, 1) == 0) {
      data_ = reinterpret_cast<char*>(base_ + mail.letter.offset);
      return;
    }
    if (is_mapped) driver.unmap(base_, mapped_);
    if (base_) driver.free_reserved(std::exchange(base_, 0), mapped_);
  }
  PeerMemory(PeerMemory&& other) noexcept { *this = std::move(other); }
  PeerMemory& operator=(PeerMemory&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~PeerMemory() {
    if (base_ == 0) return;
    Driver::ok(driver_->unmap(base_, mapped_), "cuMemUnmap");
    driver_->free_reserved(base_, mapped_);
  }

  bool holds(u64 offset, u64 num_bytes) const {
    return num_bytes <= size_ && offset <= size_ - num_bytes;
  }
  // Null: it is not reached.
  char* data() const { return data_; }

 private:
  const Driver* driver_ = nullptr;
  Driver::Address base_ = 0;
  std::size_t mapped_ = 0;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace rma
