// The kernels of FP8 experts on a GPU: results beside their definition, and times.
//
// Not part of `make gpu`, whose tests/gpu/test_gpu_fp8_experts.py calls them from Python.
//
//     nvcc -std=c++17 -O3 -I csrc -gencode arch=compute_90a,code=sm_90a tests/gpu/fp8_experts.cu
//
// An argument chooses shapes by how their names begin.  For each shape a line with the largest
// error of each step (at most 1 is right), then a line for each step with its median time.  Values
// are drawn; of results, samples are checked.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "experts/fp8_experts.h"
#include "experts/launch.cuh"

using namespace ncclep;
using namespace ncclep::experts;
using bf16 = __nv_bfloat16;

namespace {

constexpr int kSamples = 20000;

struct Shape {
  const char* name;
  std::vector<int> counts;  // rows of each expert
  int hidden, ffn;
};

template <typename T>
T* alloc(std::int64_t size) {
  void* memory;
  cuda_check(cudaMalloc(&memory, std::max<std::int64_t>(size, 1) * sizeof(T)), "cudaMalloc");
  cuda_check(cudaMemset(memory, 0, std::max<std::int64_t>(size, 1) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

__device__ unsigned int hash(unsigned int x) {
  x ^= x >> 16;
  x *= 2246822519u;
  x ^= x >> 13;
  x *= 3266489917u;
  return x ^ x >> 16;
}
__device__ float value_of(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float value = exponent == 0 ? ldexpf(mantissa, -9) : ldexpf(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -value : value;
}
__device__ int blocks_of(int num_rows) { return (num_rows + kBlock - 1) / kBlock; }
__device__ void note(float* worst, float error) {
  atomicMax(reinterpret_cast<int*>(worst), __float_as_int(error >= 0 ? error : 1e9f));
}

__global__ void fill(bf16* values, std::int64_t size, float scale, unsigned int seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < size; i += step) {
    unsigned int bits = hash(static_cast<unsigned int>(i) * 2654435761u ^ seed);
    float sum = 0;
    for (int k = 0; k < 4; ++k, bits >>= 8) sum += (bits & 255) / 255.f - .5f;
    values[i] = __float2bfloat16(sum * scale * 1.7f);
  }
}

__global__ void check_rows(Fp8Rows a, const std::uint8_t* b, const float* scales_b,
                           const std::int32_t* offsets, int num_experts, int columns,
                           const bf16* out, float* worst) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, num_rows = offsets[num_experts];
  if (i >= kSamples) return;
  const std::int64_t depth = a.columns;
  const int column = hash(i + 1) % columns;
  const std::int64_t row = i < 64 ? max(num_rows - 1 - i, 0) : hash(i) % num_rows;
  int expert = 0;
  while (offsets[expert + 1] <= row) ++expert;
  const std::int64_t weight = std::int64_t{expert} * columns + column;
  double sum = 0, magnitude = 0;
  for (std::int64_t k = 0; k < depth; ++k) {
    const double each = static_cast<double>(value_of(a.rows[row * depth + k])) *
                        a.scales[k / kBlock * a.scales_pitch + row] *
                        value_of(b[weight * depth + k]) *
                        scales_b[weight / kBlock * (depth / kBlock) + k / kBlock];
    sum += each;
    magnitude += fabs(each);
  }
  // bf16, and sums in less than fp32: the tensor cores keep 13 bits below the largest term.
  const double off = fabs(__bfloat162float(out[row * columns + column]) - sum);
  note(worst, off / (fabs(sum) / 256 + magnitude * 1e-4 + 1e-30));
}

__global__ void check_weights(Fp8Rows a, Fp8Rows b, const std::int32_t* offsets, int num_experts,
                              const float* out, float* worst) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= kSamples) return;
  const int expert = hash(i) % num_experts;
  const std::int64_t row = hash(i + 1) % a.columns, column = hash(i + 2) % b.columns;
  int block = 0;
  for (int e = 0; e < expert; ++e) block += blocks_of(offsets[e + 1] - offsets[e]);
  const int end = block + blocks_of(offsets[expert + 1] - offsets[expert]);
  double sum = 0, magnitude = 0;
  for (; block < end; ++block) {
    const double scale = static_cast<double>(a.scales_transposed[block * a.columns + row]) *
                         b.scales_transposed[block * b.columns + column];
    const std::uint8_t* of_a = a.transposed + (std::int64_t{block} * a.columns + row) * kBlock;
    const std::uint8_t* of_b = b.transposed + (std::int64_t{block} * b.columns + column) * kBlock;
    for (int k = 0; k < kBlock; ++k) {
      const double each = scale * value_of(of_a[k]) * value_of(of_b[k]);
      sum += each;
      magnitude += fabs(each);
    }
  }
  const double off = fabs(out[(expert * std::int64_t{a.columns} + row) * b.columns + column] - sum);
  // With few terms one of them may be most of the sum; then what is lost below it shows.
  note(worst, off / (magnitude * 1e-3 + 1e-30));
}

__global__ void check_quantized(const bf16* x, Fp8Rows to, const std::int32_t* offsets,
                                int num_experts, float* worst) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= kSamples) return;
  const std::int64_t columns = to.columns, column = hash(i + 1) % columns;
  const int row = hash(i) % offsets[num_experts];
  int expert = 0, block = 0;
  for (; offsets[expert + 1] <= row; ++expert) {
    block += blocks_of(offsets[expert + 1] - offsets[expert]);
  }
  const int inside = row - offsets[expert], first = offsets[expert] + inside / kBlock * kBlock;
  block += inside / kBlock;
  const auto value = [&](int r, int c) { return __bfloat162float(x[r * columns + c]); };
  float in_row = 0, in_column = 0;
  for (int k = 0; k < kBlock; ++k) {
    in_row = fmaxf(in_row, fabsf(value(row, column / kBlock * kBlock + k)));
    if (first + k < offsets[expert + 1])
      in_column = fmaxf(in_column, fabsf(value(first + k, column)));
  }
  const std::int64_t at = (block * columns + column) * kBlock + inside % kBlock;
  const float want = value(row, column);
  const float by_row = value_of(to.rows[row * columns + column]) *
                       to.scales[column / kBlock * to.scales_pitch + row];
  const float by_column =
      value_of(to.transposed[at]) * to.scales_transposed[block * columns + column];
  // Half a unit in the last place, also of subnormal numbers.
  note(worst, fabsf(by_row - want) / (fabsf(want) / 16 + in_row / kLargest / 512));
  note(worst, fabsf(by_column - want) / (fabsf(want) / 16 + in_column / kLargest / 512));
}

float median_us(const std::function<void()>& queue) {
  constexpr int kTimes = 7;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  queue();
  std::vector<float> times;
  for (int i = 0; i < kTimes; ++i) {
    cudaEventRecord(begin);
    queue();
    cudaEventRecord(end);
    cuda_check(cudaEventSynchronize(end), "a step");
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    times.push_back(ms * 1000);
  }
  std::sort(times.begin(), times.end());
  return times[kTimes / 2];
}

struct Matrix {  // of weights, [num_experts * rows, columns]
  Matrix(int num_experts, int num_rows, int num_columns, unsigned int seed)
      : experts(num_experts), rows(num_rows), columns(num_columns) {
    const std::int64_t size = std::int64_t{experts} * rows * columns;
    const std::int64_t blocks = size / kBlock / kBlock;
    job = {alloc<bf16>(size),
           alloc<std::uint8_t>(size),
           alloc<std::uint8_t>(size),
           alloc<float>(blocks),
           alloc<float>(blocks),
           rows,
           columns,
           true};
    grads = alloc<float>(size);
    fill<<<1024, 256>>>(const_cast<bf16*>(job.values), size, 1 / std::sqrt(columns), seed);
  }
  void quantize() const { quantize_weights(job, experts, nullptr); }
  int experts, rows, columns;
  Weights job;
  float* grads;
};

void run(const Shape& shape, int num_sms) {
  const int num_experts = static_cast<int>(shape.counts.size());
  const int hidden = shape.hidden, ffn = shape.ffn;
  std::vector<std::int32_t> ends{0};
  int blocks = 0;
  for (const int count : shape.counts) {
    ends.push_back(ends.back() + count);
    blocks += (count + kBlock - 1) / kBlock;
  }
  const std::int64_t num_rows = ends.back();
  const int pitch = static_cast<int>((num_rows + 3) / 4 * 4);
  auto* offsets = alloc<std::int32_t>(num_experts + 1);
  cudaMemcpy(offsets, ends.data(), ends.size() * 4, cudaMemcpyHostToDevice);
  std::vector<float> values(num_rows);
  for (std::int64_t i = 0; i < num_rows; ++i) values[i] = (i % 100 + 1) / 100.f;
  auto* probs = alloc<float>(num_rows);
  cudaMemcpy(probs, values.data(), num_rows * 4, cudaMemcpyHostToDevice);

  bf16 *x = alloc<bf16>(num_rows * hidden), *y = alloc<bf16>(num_rows * hidden);
  bf16 *inputs = alloc<bf16>(num_rows * 2 * ffn), *grads = alloc<bf16>(num_rows * ffn);
  fill<<<1024, 256>>>(x, num_rows * hidden, 1, 1);
  const Matrix fc1(num_experts, 2 * ffn, hidden, 2), fc2(num_experts, hidden, ffn, 3);
  const auto target = [&](int columns) {
    return Fp8Rows{alloc<std::uint8_t>(num_rows * columns),
                   alloc<float>(std::int64_t{columns} / kBlock * pitch),
                   alloc<std::uint8_t>(std::int64_t{columns} * blocks * kBlock),
                   alloc<float>(std::int64_t{blocks} * columns),
                   columns,
                   columns,
                   pitch,
                   blocks,
                   true};
  };
  const Fp8Rows x8 = target(hidden), y8 = target(hidden), activated = target(ffn);
  const Fp8Rows of_inputs = target(2 * ffn);
  const Swiglu swiglu{inputs,  probs,       grads, alloc<float>(std::int64_t{ffn} / kBlock * pitch),
                      offsets, num_experts, ffn,   pitch};
  const auto multiply = [&](const Fp8Rows& a, const std::uint8_t* b, const float* scales,
                            int columns, bf16* out) {
    multiply_rows(a, num_rows, b, scales, offsets, num_experts, columns, out, num_sms, nullptr);
  };
  float* worst = alloc<float>(1);
  const dim3 grid((kSamples + 127) / 128);
  const auto rows_checked = [&](const Fp8Rows& a, const std::uint8_t* b, const float* scales,
                                int columns, const bf16* out) {
    check_rows<<<grid, 128>>>(a, b, scales, offsets, num_experts, columns, out, worst);
  };
  const auto weights_checked = [&](const Fp8Rows& a, const Fp8Rows& b, const float* out) {
    check_weights<<<grid, 128>>>(a, b, offsets, num_experts, out, worst);
  };
  struct Step {
    const char* name;
    std::function<void()> queue, check;
    double products;  // of columns of the two matrices
  };
  const double size = static_cast<double>(hidden) * ffn;
  const std::vector<Step> steps{
      {"quantise rows", [&] { quantize_rows({x, offsets, num_experts}, x8, nullptr); },
       [&] { check_quantized<<<grid, 128>>>(x, x8, offsets, num_experts, worst); }, 0},
      {"fc1", [&] { multiply(x8, fc1.job.fp8, fc1.job.scales, 2 * ffn, inputs); },
       [&] { rows_checked(x8, fc1.job.fp8, fc1.job.scales, 2 * ffn, inputs); }, 2 * size},
      {"SwiGLU", [&] { quantize_swiglu(swiglu, activated, nullptr); }, [] {}, 0},
      {"fc2", [&] { multiply(activated, fc2.job.fp8, fc2.job.scales, hidden, y); },
       [&] { rows_checked(activated, fc2.job.fp8, fc2.job.scales, hidden, y); }, size},
      {"quantise gradients",  // of the rows' values
       [&] { quantize_rows({x, offsets, num_experts}, y8, nullptr); },
       [&] { check_quantized<<<grid, 128>>>(x, y8, offsets, num_experts, worst); }, 0},
      {"fc2's input",
       [&] { multiply(y8, fc2.job.transposed, fc2.job.scales_transposed, ffn, grads); },
       [&] { rows_checked(y8, fc2.job.transposed, fc2.job.scales_transposed, ffn, grads); }, size},
      {"SwiGLU's gradients", [&] { quantize_swiglu_grads(swiglu, of_inputs, nullptr); }, [] {}, 0},
      {"fc1's input",
       [&] { multiply(of_inputs, fc1.job.transposed, fc1.job.scales_transposed, hidden, y); },
       [&] { rows_checked(of_inputs, fc1.job.transposed, fc1.job.scales_transposed, hidden, y); },
       2 * size},
      {"fc2's weights",
       [&] {
         multiply_for_weights(y8, activated, offsets, num_experts, fc2.grads, true, num_sms,
                              nullptr);
       },
       [&] { weights_checked(y8, activated, fc2.grads); }, size},
      {"fc1's weights",
       [&] {
         multiply_for_weights(of_inputs, x8, offsets, num_experts, fc1.grads, true, num_sms,
                              nullptr);
       },
       [&] { weights_checked(of_inputs, x8, fc1.grads); }, 2 * size},
  };
  fc1.quantize();
  fc2.quantize();
  std::printf("%s:", shape.name);
  for (const Step& step : steps) {
    float error;
    step.queue();
    step.check();
    cuda_check(cudaDeviceSynchronize(), step.name);
    cudaMemcpy(&error, worst, 4, cudaMemcpyDeviceToHost);
    cudaMemset(worst, 0, 4);
    std::printf(" %s %.3g;", step.name, error);
  }
  std::printf("\n");
  std::fflush(stdout);
  if (num_rows < 8192) return;
  for (const Step& step : steps) {
    const float us = median_us(step.queue);
    std::printf("  %-20s %8.0f us", step.name, us);
    if (step.products > 0) std::printf(" %6.0f TFLOP/s", 2e-6 * num_rows * step.products / us);
    std::printf("\n");
  }
  const float all = median_us([&] {
    for (const Step& step : steps) step.queue();
  });
  const float weights = median_us([&] { fc1.quantize(), fc2.quantize(); });
  std::printf("  together %.0f us; weights, once a step, %.0f us\n", all, weights);
  // In place of quantising rows, where they cross in FP8: fewer are packed, each token once.
  const int packed_pitch = static_cast<int>(fp8::packed_bytes(hidden));
  const PackedRows packed{alloc<std::uint8_t>(num_rows * packed_pitch), hidden, packed_pitch};
  Fp8Rows unpacked = x8;
  unpacked.rows = nullptr;
  const float packing = median_us([&] { pack_rows(x, num_rows, packed, true, nullptr); });
  const float unpacking =
      median_us([&] { unpack_rows(packed, offsets, num_experts, unpacked, nullptr); });
  std::printf("  all rows packed %.0f us, unpacked %.0f us\n", packing, unpacking);
  std::fflush(stdout);
  cudaDeviceReset();
}

}  // namespace

int main(int argc, char** argv) {
  const auto even = [](int experts, int rows) { return std::vector<int>(experts, rows); };
  int num_sms;
  cuda_check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0), "the GPU");
  for (const Shape& shape : {
           Shape{"odd", {129, 0, 1, 300, 128, 1000}, 512, 256},
           Shape{"qwen3-30b, 1 of 8", even(16, 4096), 2048, 768},
           Shape{"gpt-oss, 3072 wide", even(16, 1024), 3072, 3072},
           Shape{"qwen3-235b, 1 of 8", even(16, 2048), 4096, 1536},
           Shape{"deepseek-v3, 1 of 8, 4096 tokens", even(32, 1024), 7168, 2048},
           Shape{"deepseek-v3, 1 of 8, 16384 tokens", even(32, 4096), 7168, 2048},
           Shape{"mixtral-8x7b", even(8, 2048), 4096, 14336},
       }) {
    if (argc < 2 || std::string(shape.name).find(argv[1]) == 0) run(shape, num_sms);
  }
}
