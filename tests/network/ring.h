// What two ranks share: a ring of messages from one to the other, in memory without a name.
#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>

#include "plugin.h"

namespace rma {

constexpr int kMaxRanks = 16, kSlots = 256, kBoxes = 16, kMaxRegions = 4096;
constexpr std::size_t kBoxBytes = 256 << 10;
constexpr std::size_t kDirectBytes = 512 << 10;  // a piece of a message that goes directly

struct Message {
  int to, signals;  // regions; -1: none
  u64 to_offset, size, signal_offset, value;
};

// A piece of a message.
struct Slot {
  Message message;
  u64 first, num_bytes;  // of the message's bytes
  u64 arrives_ns;
  int box;  // where the bytes are; -1: the source has copied them to their place
};

// From one rank to another, in the other's memory.
struct alignas(4096) Ring {
  std::atomic<bool> is_open, is_refused, is_silent;  // the last: its target
  alignas(64) std::atomic<u64> head;                 // the source's
  alignas(64) std::atomic<u64> tail;                 // the target's
  u64 word;                                          // the target's, for signals on a GPU
  std::atomic<bool> is_removed[kMaxRegions];         // the target's regions
  Slot slots[kSlots];
  char boxes[kBoxes][kBoxBytes];
};

// A ring's boxes, as its source knows them.
struct Boxes {
  std::array<u64, kBoxes> ends{};  // of the piece in the ring that used each last
  u64 count = 0;                   // that were used

  int next() const { return static_cast<int>(count % kBoxes); }
  bool is_free(u64 tail) const { return ends[next()] <= tail; }
  void use(u64 end) { ends[count++ % kBoxes] = end; }
};

inline Ring* map_rings(int file, int first, int count) {
  void* memory = mmap(nullptr, count * sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED, file,
                      first * static_cast<off_t>(sizeof(Ring)));
  return memory == MAP_FAILED ? nullptr : static_cast<Ring*>(memory);
}

}  // namespace rma
