// A warp's ring of bulk copies: rows in, rows out, without passing through registers.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/bulk_copy.cuh"
#include "native/rows/cta_roles.h"

namespace ncclep::native {

struct Ring {
  char* pieces;         // [kRingStages][piece_bytes] of shared memory
  std::uint64_t* full;  // [kRingStages]: the load of a stage completes a phase
  unsigned int parities = 0;

  __device__ void init() {
    if (threadIdx.x % kWarpSize == 0) {
      for (int s = 0; s < kRingStages; ++s) init_barrier(full + s);
      fence_barriers();
    }
    __syncwarp();
  }

  // Keeps all stages but one loading.
  //
  //   load(s) -> bool   starts a load into stage s; false: there is nothing left to load
  //   store(s)          starts the stores of stage s
  //   stored(s)         they are on their way
  //
  // All are called by all lanes, with an s that is known at compile time.  At the end everything is
  // written.
  template <typename Load, typename Store, typename Stored>
  __device__ void run(Load&& load, Store&& store, Stored&& stored) {
    int loaded = 0;
#pragma unroll
    for (int s = 0; s < kRingStages - 1; ++s) {
      if (loaded == s && load(s)) ++loaded;
    }
    for (int round = 0;; ++round) {
#pragma unroll
      for (int s = 0; s < kRingStages; ++s) {
        const int turn = round * kRingStages + s;
        if (turn >= loaded) {
          wait_for_stores();
          return;
        }
        wait_for_load(full + s, parities >> s & 1);
        parities ^= 1u << s;
        store(s);
        commit_stores();
        stored(s);
        // The next load goes into the previous stage; every store but the last has read its stage.
        wait_for_reads_of_stores<1>();
        __syncwarp();
        if (loaded == turn + kRingStages - 1 && load((s + kRingStages - 1) % kRingStages)) ++loaded;
      }
    }
  }
};

}  // namespace ncclep::native
