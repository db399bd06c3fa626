// Where NCCL 2.28 has the memory of a window's ranks; newer releases have a function that says so.
#pragma once

#include <cstddef>
#include <vector>

namespace ncclep {

// Bytes of the struct that a window handle points to in device memory, as far as it is read.
constexpr std::size_t kWindowHeadBytes = 32;

// The ranks' addresses, by rank, from the first `num_bytes` bytes of that struct.  `head` may be
// longer than the part that is read.  Throws unless the addresses are plausible.
std::vector<char*> peers_in(const void* head, std::size_t num_bytes, int rank, int num_ranks);

}  // namespace ncclep
