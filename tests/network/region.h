// What a rank has registered, and what it has been asked to put.
#pragma once

#include <vector>

#include "peer_memory.h"
#include "ring.h"

namespace rma {

struct Region {
  int id, type;
  char* data;
  std::size_t size;
  bool is_never_reset;
  std::vector<u64> signals;       // of a GPU's memory that is never reset: the values
  std::vector<PeerMemory> peers;  // all ranks' regions of this number

  bool holds(u64 offset, u64 num_bytes) const {
    return num_bytes <= size && offset <= size - num_bytes;
  }
};

struct Request {
  Message message;
  u64 number;  // of this process's puts, from 1
  int target, from;
  u64 from_offset, sent, end;  // end: in the ring; 0: not all is sent
  bool is_lost;
};

}  // namespace rma
