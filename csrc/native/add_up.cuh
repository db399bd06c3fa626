// One warp's pipeline that makes rows out of sums of rows: bulk copies into a ring of stages in
// shared memory, fp32 sums in registers, bulk copies out.
//
// Rows travel in pieces of kPiece bytes, a stage each, so that a sum stays in registers whatever
// the row's length.  Example: a row of 5 KB that is the sum of two rows takes six stages:
//
//     row 0 bytes 0-2K, row 1 bytes 0-2K -> out; row 0 2K-4K, row 1 2K-4K -> out; row 0 4K-5K, ...
//
// A bulk copy over NVLink frees its stage only after some microseconds, so what bounds a pushing
// warp is how many bytes it has on their way out: kOutStages is chosen for that.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/bulk_copy.cuh"
#include "native/vector.cuh"

namespace ncclep::native {

constexpr int kPiece = 2048;                         // bytes
constexpr int kVectorsPerLane = kPiece / (32 * 16);  // of a piece

// A row to make.  Rows are added into a part, and complete parts into the total.
struct Sum {
  const char* row;          // lane i: the i-th row to add
  int num_rows;             // 0: the result is zero
  std::uint32_t part_ends;  // bit i: the i-th row is the last of its part
  char* out;
};

struct Stage {
  char* out;  // where the piece goes, when it is complete
  int bytes;
  std::uint32_t marks;
};

enum Mark : std::uint32_t { kAdds = 1, kEndsPart = 2, kEndsPiece = 4, kEndsRow = 8 };

template <int kStages, int kOutStages>
struct Ring {
  static constexpr int kBytes = (kStages + kOutStages) * kPiece;

  char* pieces;         // [kStages + kOutStages][kPiece] of shared memory
  std::uint64_t* full;  // [kStages]
  Stage* stages;        // [kStages]
};

// Runs until `next` has no more.  All lanes of the warp call it.
//
//   next(Sum*) -> bool   the warp's next row, or false; all lanes call it together
//   sent(bool)           lane 0: a piece has been handed to the copy engine, the last of its row?
template <typename T, int kStages, int kOutStages, typename Next, typename Sent>
__device__ void add_up(const Ring<kStages, kOutStages>& ring, int row_bytes, Next&& next,
                       Sent&& sent) {
  constexpr int kWidth = Vector<T>::kWidth;
  const int lane = threadIdx.x % 32;
  char* out_pieces = ring.pieces + kStages * kPiece;
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) init_barrier(ring.full + stage);
    fence_barriers();
  }
  __syncwarp();

  Sum sum{};
  bool has_sum = next(&sum);
  int row = 0, offset = 0, load_stage = 0, num_loaded = 0;
  // Fills the next stage, if there is anything left to load.
  const auto load = [&] {
    if (!has_sum) return;
    const char* from = reinterpret_cast<const char*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(sum.row), row));
    const int bytes = min(kPiece, row_bytes - offset);
    const bool ends_piece = row + 1 >= sum.num_rows, ends_row = offset + bytes == row_bytes;
    if (lane == 0) {
      std::uint32_t marks = (sum.num_rows > 0 ? kAdds : 0) | (ends_piece ? kEndsPiece : 0) |
                            (ends_piece && ends_row ? kEndsRow : 0);
      if (sum.part_ends >> row & 1) marks |= kEndsPart;
      ring.stages[load_stage] = {sum.out + offset, bytes, marks};
      if (sum.num_rows > 0) {
        start_load(ring.pieces + load_stage * kPiece, from + offset, bytes, ring.full + load_stage);
      } else {
        arrive(ring.full + load_stage);
      }
    }
    ++num_loaded;
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
    ++row;
    if (!ends_piece) return;
    row = 0;
    offset += bytes;
    if (!ends_row) return;
    offset = 0;
    has_sum = next(&sum);
  };

  for (int i = 0; i < kStages; ++i) load();
  __syncwarp();
  float part[kVectorsPerLane][kWidth], total[kVectorsPerLane][kWidth];
#pragma unroll
  for (int v = 0; v < kVectorsPerLane; ++v) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) part[v][i] = total[v][i] = 0;
  }
  int stage = 0, parity = 0, out_stage = 0;
  for (int turn = 0; turn < num_loaded; ++turn) {
    wait_for_load(ring.full + stage, parity);
    const Stage piece = ring.stages[stage];
    const int vectors = piece.bytes / 16;
    if (piece.marks & kAdds) {
      const auto* from = reinterpret_cast<const uint4*>(ring.pieces + stage * kPiece);
#pragma unroll
      for (int v = 0; v < kVectorsPerLane; ++v) {
        if (lane + v * 32 < vectors) Vector<T>::add(part[v], from[lane + v * 32]);
      }
    }
    __syncwarp();
    load();  // into the stage that was just read
    __syncwarp();
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (piece.marks & kEndsPart) {
#pragma unroll
      for (int v = 0; v < kVectorsPerLane; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          total[v][i] += part[v][i];
          part[v][i] = 0;
        }
      }
    }
    if (!(piece.marks & kEndsPiece)) continue;
    if (lane == 0) wait_for_reads_of_stores<kOutStages - 1>();
    __syncwarp();
    auto* out = reinterpret_cast<uint4*>(out_pieces + out_stage * kPiece);
#pragma unroll
    for (int v = 0; v < kVectorsPerLane; ++v) {
      if (lane + v * 32 < vectors) out[lane + v * 32] = Vector<T>::round(total[v]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[v][i] = 0;
    }
    fence_shared_for_bulk_copies();
    __syncwarp();
    if (lane == 0) {
      start_store(piece.out, out, piece.bytes);
      commit_stores();
      sent((piece.marks & kEndsRow) != 0);
    }
    out_stage = out_stage + 1 == kOutStages ? 0 : out_stage + 1;
  }
  if (lane == 0) wait_for_stores();
  __syncwarp();
}

}  // namespace ncclep::native
