// One warp makes rows out of sums of rows: asynchronous copies into a ring of stages in shared
// memory, fp32 sums in registers, and stores.  Everything is in this GPU's memory.
//
// Rows travel in pieces of kPiece bytes, a stage each, so that a sum stays in registers whatever
// the row's length.  Example: a row of two pieces that is the sum of rows a and b takes four
// stages:
//
//     a0, b0 -> store, a1, b1 -> store
//
// A lane copies, adds and stores the same 16-byte vectors of a piece throughout, so lanes need not
// wait for each other's data.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/async_copy.cuh"
#include "native/vector.cuh"

namespace ncclep::native {

constexpr int kVectors = 4;  // of a piece, that a lane holds
constexpr int kLanes = 32;
constexpr int kPiece = kVectors * kLanes * sizeof(uint4);

// A row to make: the sum of parts, and a part the sum of rows.
struct Sum {
  const char* row;  // lane i: the i-th row to add
  int num_rows;     // 0: the result is zero
  // The rows that form a part together; every other row is a part of its own.
  int part_begin, part_end;
  char* out;
};

// What lies in a stage.
struct Stage {
  char* out;  // where the piece goes, when it is complete
  int bytes;  // of the piece
  std::uint32_t marks;
};

enum Mark : std::uint32_t {
  kAdds = 1,      // there is a row; otherwise the result is zero
  kInPart = 2,    // to the part, otherwise to the total
  kEndsPart = 4,  // and the part to the total
  kEndsPiece = 8,
  kEndsRow = 16,
};

template <int kStages>
struct alignas(16) PieceRing {
  char pieces[kStages][kPiece];
  Stage stages[kStages];
};

// Runs until `next` has no more.  All lanes of the warp call it.
//
//   kHasParts      false: no sum has a part of several rows
//   next(Sum*)     -> bool: the warp's next row, or false; all lanes call it together
//   done()         all lanes: the stores of the next row, in the order of `next`, are issued
template <typename T, bool kHasParts, int kStages, typename Next, typename Done>
__device__ void add_up(PieceRing<kStages>& ring, int row_bytes, Next&& next, Done&& done) {
  constexpr int kWidth = Vector<T>::kWidth;
  const int lane = threadIdx.x % kLanes;

  Sum sum{};
  bool has_sum = next(&sum);
  int row = 0, offset = 0, load_stage = 0, num_loaded = 0;
  // Starts to fill the next stage, if there is anything left.
  const auto load = [&] {
    if (has_sum) {
      const char* from = reinterpret_cast<const char*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(sum.row), row));
      const int bytes = min(kPiece, row_bytes - offset);
      const bool adds = sum.num_rows > 0;
      const bool ends_piece = row + 1 >= sum.num_rows, ends_row = offset + bytes == row_bytes;
      if (lane == 0) {
        std::uint32_t marks = (adds ? kAdds : 0) | (ends_piece ? kEndsPiece : 0) |
                              (ends_piece && ends_row ? kEndsRow : 0);
        if (row >= sum.part_begin && row < sum.part_end) marks |= kInPart;
        if (row == sum.part_end - 1 && row >= sum.part_begin) marks |= kEndsPart;
        ring.stages[load_stage] = {sum.out + offset, bytes, marks};
      }
      if (adds) {
        char* to = ring.pieces[load_stage];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int at = (lane + v * kLanes) * static_cast<int>(sizeof(uint4));
          if (at < bytes) copy_async(to + at, from + offset + at);
        }
      }
      ++num_loaded;
      load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
      ++row;
      if (ends_piece) {
        row = 0;
        offset += bytes;
        if (ends_row) {
          offset = 0;
          has_sum = next(&sum);
        }
      }
    }
    commit_copies();
  };

  float part[kVectors][kWidth], total[kVectors][kWidth];
  const auto clear = [](float (&numbers)[kVectors][kWidth]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) numbers[v][i] = 0;
    }
  };
  clear(part);
  clear(total);
  for (int i = 0; i < kStages - 1; ++i) load();
  int stage = 0;
  for (int turn = 0; turn < num_loaded; ++turn) {
    wait_for_copies<kStages - 2>();
    __syncwarp();  // for `stages`
    const Stage piece = ring.stages[stage];
    const char* rows = ring.pieces[stage];
    stage = stage + 1 == kStages ? 0 : stage + 1;
    load();  // into the stage that was read in the turn before
    const auto add = [&](float (&numbers)[kVectors][kWidth]) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        // Beyond a short piece's end lie old numbers, whose sums are not stored.
        Vector<T>::add(numbers[v], reinterpret_cast<const uint4*>(rows)[lane + v * kLanes]);
      }
    };
    if (piece.marks & kAdds) {
      if (kHasParts && piece.marks & kInPart) {
        add(part);
      } else {
        add(total);
      }
    }
    if (kHasParts && piece.marks & kEndsPart) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) total[v][i] += part[v][i];
      }
      clear(part);
    }
    if (!(piece.marks & kEndsPiece)) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = (lane + v * kLanes) * static_cast<int>(sizeof(uint4));
      if (at < piece.bytes) *reinterpret_cast<uint4*>(piece.out + at) = Vector<T>::round(total[v]);
    }
    clear(total);
    if (piece.marks & kEndsRow) done();
  }
}

}  // namespace ncclep::native
