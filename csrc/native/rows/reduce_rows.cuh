// Each warp computes rows as sums of other rows: asynchronous copies into a ring of stages in
// shared memory, fp32 sums in registers, and stores.  All inputs are in this GPU's memory.
//
// Rows travel in pieces of kPiece bytes, a stage each, so that a sum stays in registers whatever
// the row's length.  Example: a row of two pieces that is the sum of rows a and b takes four
// stages:
//
//     a0, b0 -> store, a1, b1 -> store
//
// A lane copies, adds and stores the same 16-byte vectors of a piece throughout, so lanes need not
// wait for each other's data.  A warp does little work per vector, so all overhead must be smaller
// still: instructions are the bound, not memory (docs/performance.md).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/async_copy.cuh"
#include "native/device/vector.cuh"

namespace ncclep::native {

constexpr int kVectors = 4;  // of a piece, per lane
constexpr int kLanes = 32;
constexpr int kStride = kLanes * sizeof(uint4);  // from a lane's vector to its next one
constexpr int kPiece = kVectors * kStride;

// A row to compute: the sum of parts, each of which is a sum of rows.
struct Sum {
  const char* row;  // lane i: the i-th row to add
  int num_rows;     // 0: the result is zero
  // The rows that form a part together; every other row is a separate part.
  int part_begin, part_end;
  char* out;
};

// The fields of a Sum that are needed once its rows have arrived.
struct alignas(16) Note {
  char* out;
  int num_rows;  // kNoMore: there is no further sum
  std::int16_t part_begin, part_end;
};
constexpr int kNoMore = -1;

// Copies run some stages ahead, which is as many sums when each has a single stage.
constexpr int kNotes = 8;

template <int kStages>
struct alignas(16) PieceRing {
  static_assert(kStages < kNotes);
  char pieces[kStages][kPiece];
  Note notes[kNotes];
};

// Loads a warp's rows, stage by stage.
template <int kStages, typename Next>
class Loader {
 public:
  __device__ Loader(PieceRing<kStages>& ring, int row_bytes, Next& next)
      : ring_(ring), next_(next), row_bytes_(row_bytes) {
    begin();
  }

  // Starts filling the next stage, if anything is left.
  __device__ void load() {
    if (has_sum_) {
      if (sum_.num_rows > 0) copy();
      stage_ = stage_ + kPiece == kStages * kPiece ? 0 : stage_ + kPiece;
      if (++row_ >= sum_.num_rows) {
        row_ = 0;
        offset_ += kPiece;
        if (offset_ >= row_bytes_) begin();
      }
    }
    commit_copies();
  }

 private:
  __device__ void begin() {
    offset_ = 0;
    has_sum_ = next_(&sum_);
    if (threadIdx.x % kLanes == 0) {
      ring_.notes[note_] = {sum_.out, has_sum_ ? sum_.num_rows : kNoMore,
                            static_cast<std::int16_t>(sum_.part_begin),
                            static_cast<std::int16_t>(sum_.part_end)};
    }
    note_ = (note_ + 1) % kNotes;
  }

  __device__ void copy() {
    const int lane_offset = threadIdx.x % kLanes * static_cast<int>(sizeof(uint4));
    const char* row = reinterpret_cast<const char*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(sum_.row), row_));
    const char* from = row + (offset_ + lane_offset);
    char* to = ring_.pieces[0] + (stage_ + lane_offset);
    const int left = row_bytes_ - offset_;
    if (left >= kPiece) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) copy_async(to + v * kStride, from + v * kStride);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (lane_offset + v * kStride < left) copy_async(to + v * kStride, from + v * kStride);
      }
    }
  }

  PieceRing<kStages>& ring_;
  Next& next_;
  int row_bytes_;
  Sum sum_{};
  bool has_sum_ = false;
  int row_ = 0, offset_ = 0, stage_ = 0;  // the last two in bytes
  unsigned int note_ = 0;
};

template <typename T>
using Numbers = float[kVectors][Vector<T>::kWidth];

template <typename T>
__device__ void clear(Numbers<T>& numbers) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < Vector<T>::kWidth; ++i) numbers[v][i] = 0;
  }
}

// Runs until `next` has no more.  All lanes of the warp call it.
//
//   kHasParts      false: no sum has a part of several rows
//   next(Sum*)     -> bool: the warp's next row, or false; all lanes call it together
//   done()         all lanes: the stores of the next row, in the order of `next`, are issued
template <typename T, bool kHasParts, int kStages, typename Next, typename Done>
__device__ void reduce_rows(PieceRing<kStages>& ring, int row_bytes, Next&& next, Done&& done) {
  const int lane_offset = threadIdx.x % kLanes * static_cast<int>(sizeof(uint4));
  Loader<kStages, std::remove_reference_t<Next>> loader(ring, row_bytes, next);
  for (int i = 0; i < kStages - 1; ++i) loader.load();
  Numbers<T> part, total;
  clear<T>(part);
  clear<T>(total);
  int stage = 0;
  for (unsigned int turn = 0;; turn = (turn + 1) % kNotes) {
    __syncwarp();  // for `notes`
    const Note sum = ring.notes[turn];
    if (sum.num_rows == kNoMore) return;
    for (int offset = 0; offset < row_bytes; offset += kPiece) {
      int row = 0;
      do {
        wait_for_copies<kStages - 2>();
        loader.load();  // into the stage that was read in the previous turn
        const char* piece = ring.pieces[0] + (stage + lane_offset);
        stage = stage + kPiece == kStages * kPiece ? 0 : stage + kPiece;
        // Beyond the end of a short piece is stale data, whose sums are not stored.
        const auto add = [&](Numbers<T>& numbers) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            Vector<T>::add(numbers[v], *reinterpret_cast<const uint4*>(piece + v * kStride));
          }
        };
        if (kHasParts && row >= sum.part_begin && row < sum.part_end) {
          add(part);
          if (row == sum.part_end - 1) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
              for (int i = 0; i < Vector<T>::kWidth; ++i) total[v][i] += part[v][i];
            }
            clear<T>(part);
          }
        } else if (sum.num_rows > 0) {
          add(total);
        }
      } while (++row < sum.num_rows);
      char* out = sum.out + (offset + lane_offset);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (offset + lane_offset + v * kStride < row_bytes) {
          *reinterpret_cast<uint4*>(out + v * kStride) = Vector<T>::round(total[v]);
        }
      }
      clear<T>(total);
    }
    done();
  }
}

}  // namespace ncclep::native
