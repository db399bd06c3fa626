// One way from a rank to another for NCCL's messages: a ring, and the memory that the receiver has
// offered for the messages to come.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>

#include "peer_memory.h"
#include "ring.h"

namespace rma {

// More than NCCL has under way on a connection.
constexpr u64 kMaxWorks = 64;

// Where the receiver wants a message.
struct Offer {
  int memory;  // its number at the receiver; -1: it cannot be shared
  u64 offset, size;
};

struct alignas(4096) Pipe {
  Ring ring;
  Address sender;  // takes letters about the receiver's memory
  std::atomic<bool> is_accepted;
  std::atomic<u64> num_offers;
  Offer offers[kMaxWorks];
};

// Maps it, or null.
inline Pipe* map_pipe(const File& file) {
  void* memory = mmap(nullptr, sizeof(Pipe), PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Pipe*>(memory);
}

// What NCCL has registered.
struct Memory {
  int id, type;  // id: -1: the peer does not know it
  char* data;
};

// A message that NCCL sends or receives: its thread fills it in and asks whether it is done, the
// NIC's does all else.
struct Work {
  char* data;
  u64 size, sent, end;  // end: in the ring
  int type;
  bool is_used = false;
  std::atomic<bool> is_done = false;
  struct Connection* connection = nullptr;
};

struct Connection {
  Pipe* pipe = nullptr;
  Post post;
  std::array<Work, kMaxWorks> works;
  std::atomic<u64> num_submitted = 0;  // by NCCL's thread
  u64 num_moved = 0, num_done = 0;     // by the NIC's: all sent or received; known to be
  std::atomic<bool> has_failed = false;

  Connection() {
    for (Work& work : works) work.connection = this;
  }
  Connection(const Connection&) = delete;
  virtual ~Connection() {
    if (pipe) munmap(pipe, sizeof(Pipe));
  }
  bool is_busy() const { return num_done < num_submitted.load(std::memory_order_acquire); }

  // Null: too many are under way.
  Work* submit(void* data, u64 size, int type) {
    const u64 number = num_submitted.load(std::memory_order_relaxed);
    Work& work = works[number % kMaxWorks];
    if (work.is_used) return nullptr;
    work.data = static_cast<char*>(data);
    work.size = size;
    work.type = type;
    work.sent = work.end = 0;
    work.is_used = true;
    work.is_done.store(false, std::memory_order_relaxed);
    num_submitted.store(number + 1, std::memory_order_release);
    return &work;
  }
};

struct Sender : Connection {
  bool is_greeted = false;
  u64 accepted_ns = 0;
  std::map<int, PeerMemory> peers;  // the receiver's memory
  u64 sent = 0;
  Boxes boxes;
};

struct Receiver : Connection {
  int num_memories = 0;
  u64 taken = 0, arrival_ns = 0;  // arrival: of the next slot; 0: unknown
};

}  // namespace rma
