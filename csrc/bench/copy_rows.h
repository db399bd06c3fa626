// Copies rows to or from the memory of other ranks: the bandwidth that NVLink gives to copies of
// whole rows, which is the ceiling of dispatch and combine.
#pragma once

#include <cstdint>
#include <vector>

namespace ncclep::bench {

constexpr int kMaxPeers = 32;

struct CopyRows {
  bool push;                 // local row i -> row peer_row[i] of a peer; else the reverse
  char* local;               // [num_rows, row_bytes]
  std::vector<char*> peers;  // each peer's rows, by rank
  const int* peer_of_row;    // int32 [num_rows], device memory
  const int* peer_row;       // int32 [num_rows], device memory
  int num_rows;
  int row_bytes;  // a multiple of 16
};

// Queues the copy on `stream`, with one CTA on each of `num_sms` SMs.
void copy_rows(const CopyRows& job, int num_sms, std::uintptr_t stream);

}  // namespace ncclep::bench
