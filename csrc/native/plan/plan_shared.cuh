// What plan's first kernel has in shared memory beside a tile of chunks (chunks.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/plan/chunks.cuh"
#include "native/state.h"

namespace ncclep::native {

// In shared memory, after the tile.
struct Shared {
  int* start;                                         // [columns + 1]: before this CTA
  int* total;                                         // [columns + 1]: of this rank
  int* arrived;                                       // [source][experts of this rank, then pairs]
  int *block_start, *block_rows, *block_assignments;  // [experts of this rank]
  int* assignments_of;                                // [R]
  std::uint32_t* bad_ranks;                           // [kRankWords]
  int* most_chunks;                                   // [1]: with several domains

  __device__ Shared(const TokenPartition& partition, char* memory)
      : start(reinterpret_cast<int*>(memory)),
        total(start + partition.part_size()),
        arrived(total + partition.part_size()),
        block_start(arrived + partition.num_experts + partition.num_ranks),
        block_rows(block_start + partition.num_local()),
        block_assignments(block_rows + partition.num_local()),
        assignments_of(block_assignments + partition.num_local()),
        bad_ranks(reinterpret_cast<std::uint32_t*>(assignments_of + partition.num_ranks)),
        most_chunks(reinterpret_cast<int*>(bad_ranks + kRankWords)) {}

  static std::size_t num_bytes(const TokenPartition& partition) {
    return sizeof(int) * (2 * partition.part_size() + partition.num_experts +
                          2 * partition.num_ranks + 3 * partition.num_local() + kRankWords + 1);
  }
};

}  // namespace ncclep::native
