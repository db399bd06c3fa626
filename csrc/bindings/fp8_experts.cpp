// The FP8 products and quantisation of experts, in an extension that has code for Hopper.
#include "experts/fp8_experts.h"

#include <algorithm>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"

namespace py = pybind11;
using namespace py::literals;

namespace ncclep::bindings {

#ifdef NCCLEP_FP8_EXPERTS

namespace {

using Maybe = std::optional<Tensor>;

constexpr std::int64_t kMost = INT32_MAX;  // kernels count rows, columns and tiles in int

// The tensor's memory, where kernels load 16 bytes at once.
template <typename T>
T* memory_of(const Tensor& tensor, const char* name) {
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0, name,
          " does not start at a multiple of 16 bytes");
  return static_cast<T*>(tensor.data);
}

void require_multiple(std::int64_t size, int of, const char* name) {
  require(size > 0 && size <= kMost && size % of == 0, name, " is ", size,
          ": must be a multiple of ", of);
}

void require_matrix(const Tensor& tensor, DType dtype, const char* name) {
  require(tensor.dtype == dtype && tensor.ndim == 2, name, " must be ", name_of(dtype),
          " with two dimensions");
}

fp8::Experts experts_of(const Tensor& offsets) {
  require(offsets.dtype == ncclepInt32 && offsets.ndim == 1 && offsets.shape[0] > 1 &&
              offsets.shape[0] <= kMost,
          "offsets must be int32 [num_experts + 1]");
  return {static_cast<const std::int32_t*>(offsets.data), static_cast<int>(offsets.shape[0] - 1)};
}

// Where rows in FP8 are, or go, and what they must fit.  `pitch`: bytes of each row, with its
// scales if it is packed.
fp8::Matrix matrix_of(std::int64_t num_rows, std::int64_t columns, const fp8::Experts& experts,
                      const Maybe& rows, const Maybe& scales, const Maybe& transposed,
                      const Maybe& scales_transposed, std::int64_t pitch) {
  require(rows.has_value() == scales.has_value() &&
              transposed.has_value() == scales_transposed.has_value(),
          "FP8 needs its scales, and scales need theirs");
  require(rows || transposed, "FP8 rows need a place, by rows or transposed");
  require_multiple(columns, fp8::kBlock, "the number of columns in FP8");
  const std::int64_t blocks = fp8::most_blocks(num_rows, experts.num_experts);
  fp8::Matrix matrix{};
  matrix.num_rows = num_rows;
  matrix.columns = static_cast<int>(columns);
  matrix.pitch = static_cast<int>(pitch);
  std::int64_t num_blocks = blocks;
  if (rows) {
    require(rows->is(ncclepUint8, {num_rows, pitch}), "rows must be uint8 [", num_rows, ", ",
            columns, "], or packed with their scales");
    require(scales->dtype == ncclepFloat32 && scales->ndim == 2 &&
                scales->shape[0] == columns / fp8::kBlock && scales->shape[1] >= num_rows &&
                scales->shape[1] % fp8::kScalesPitch == 0 && scales->shape[1] <= kMost,
            "scales must be float32 [", columns / fp8::kBlock, ", ", num_rows,
            " or more, a multiple of ", fp8::kScalesPitch, "]");
    matrix.rows = memory_of<std::uint8_t>(*rows, "rows");
    matrix.scales = memory_of<float>(*scales, "scales");
    matrix.scales_pitch = static_cast<int>(scales->shape[1]);
  }
  if (transposed) {
    require_matrix(*scales_transposed, ncclepFloat32, "scales_transposed");
    num_blocks = scales_transposed->shape[0];
    // The host does not know the experts' numbers of rows, so there is room for the most blocks.
    require(num_blocks >= blocks && scales_transposed->shape[1] == columns,
            "scales_transposed must be float32 [", blocks, " or more, ", columns, "]");
    require(transposed->is(ncclepUint8, {num_blocks, columns, fp8::kBlock}),
            "transposed must be uint8 [", num_blocks, ", ", columns, ", ", fp8::kBlock, "]");
    matrix.transposed = memory_of<std::uint8_t>(*transposed, "transposed");
    matrix.scales_transposed = memory_of<float>(*scales_transposed, "scales_transposed");
  }
  require(num_rows <= kMost && num_blocks <= kMost / fp8::kBlock && num_blocks <= kMost / columns,
          num_rows, " rows of ", columns, " columns are too many");
  matrix.num_blocks = static_cast<int>(num_blocks);
  return matrix;
}

fp8::Matrix matrix_of(std::int64_t num_rows, std::int64_t columns, const fp8::Experts& experts,
                      const Maybe& rows, const Maybe& scales, const Maybe& transposed,
                      const Maybe& scales_transposed) {
  return matrix_of(num_rows, columns, experts, rows, scales, transposed, scales_transposed,
                   columns);
}

// How many values the rows of `packed` have.
std::int64_t columns_of_packed(const Tensor& packed) {
  require_matrix(packed, ncclepUint8, "packed");
  const std::int64_t bytes = packed.shape[1];
  require(bytes <= kMost && packed.shape[0] <= kMost, "packed is too large");
  // Each block has four more bytes, and what fills the row up is less than a block.
  const std::int64_t columns = bytes / (fp8::kBlock + 4) * fp8::kBlock;
  require(columns > 0 && fp8::packed_bytes(columns) == bytes, "rows of packed are ", bytes,
          " bytes: they must be those of a multiple of ", fp8::kBlock, " values and their scales");
  return columns;
}

fp8::Scales scales_of(bool powers_of_two) {
  return powers_of_two ? fp8::Scales::kPowersOfTwo : fp8::Scales::kAny;
}

fp8::Swiglu swiglu_of(const Tensor& gate_up, const Tensor& probs) {
  require_matrix(gate_up, ncclepBfloat16, "gate_up");
  require_multiple(gate_up.shape[1], 2 * fp8::kBlock, "the number of gate_up's columns");
  require(probs.is(ncclepFloat32, {gate_up.shape[0]}), "probs must be float32 [num_rows]");
  fp8::Swiglu swiglu{};
  swiglu.inputs = memory_of<void>(gate_up, "gate_up");
  swiglu.probs = static_cast<const float*>(probs.data);
  swiglu.columns = static_cast<int>(gate_up.shape[1] / 2);
  return swiglu;
}

void bind_quantisation(py::module_& module) {
  module.def(
      "fp8_quantize_rows",
      [](const Tensor& values, const Tensor& offsets, const Maybe& rows, const Maybe& scales,
         const Maybe& transposed, const Maybe& scales_transposed, bool powers_of_two,
         std::uintptr_t stream) {
        require_matrix(values, ncclepBfloat16, "values");
        const fp8::Experts experts = experts_of(offsets);
        const fp8::Matrix to = matrix_of(values.shape[0], values.shape[1], experts, rows, scales,
                                         transposed, scales_transposed);
        fp8::quantize_rows(memory_of<void>(values, "values"), experts, to, scales_of(powers_of_two),
                           stream);
      },
      "values"_a, "offsets"_a, "rows"_a, "scales"_a, "transposed"_a, "scales_transposed"_a,
      "powers_of_two"_a, "stream"_a);
  module.def(
      "fp8_pack_rows",
      [](const Tensor& values, const Tensor& packed, bool powers_of_two, std::uintptr_t stream) {
        const std::int64_t columns = columns_of_packed(packed), num_rows = packed.shape[0];
        require(values.is(ncclepBfloat16, {num_rows, columns}), "values must be bfloat16 [",
                num_rows, ", ", columns, "]");
        require(num_rows / fp8::kBlock < kMost / columns, num_rows, " rows are too many");
        fp8::pack_rows(memory_of<void>(values, "values"), num_rows, static_cast<int>(columns),
                       memory_of<std::uint8_t>(packed, "packed"), scales_of(powers_of_two), stream);
      },
      "values"_a, "packed"_a, "powers_of_two"_a, "stream"_a);
  module.def(
      "fp8_unpack_rows",
      [](const Tensor& packed, const Tensor& offsets, const Maybe& scales, const Maybe& transposed,
         const Maybe& scales_transposed, bool powers_of_two, std::uintptr_t stream) {
        const std::int64_t columns = columns_of_packed(packed), num_rows = packed.shape[0];
        const fp8::Experts experts = experts_of(offsets);
        const Maybe rows = scales ? Maybe(packed) : std::nullopt;
        fp8::Matrix to = matrix_of(num_rows, columns, experts, rows, scales, transposed,
                                   scales_transposed, packed.shape[1]);
        to.rows = nullptr;
        fp8::unpack_rows(memory_of<std::uint8_t>(packed, "packed"), experts, to,
                         scales_of(powers_of_two), stream);
      },
      "packed"_a, "offsets"_a, "scales"_a, "transposed"_a, "scales_transposed"_a, "powers_of_two"_a,
      "stream"_a);
  module.def(
      "fp8_swiglu",
      [](const Tensor& gate_up, const Tensor& probs, const Tensor& offsets, const Maybe& rows,
         const Maybe& scales, const Maybe& transposed, const Maybe& scales_transposed,
         bool powers_of_two, std::uintptr_t stream) {
        const fp8::Swiglu from = swiglu_of(gate_up, probs);
        const fp8::Experts experts = experts_of(offsets);
        const fp8::Matrix to = matrix_of(gate_up.shape[0], from.columns, experts, rows, scales,
                                         transposed, scales_transposed);
        fp8::quantize_swiglu(from, experts, to, scales_of(powers_of_two), stream);
      },
      "gate_up"_a, "probs"_a, "offsets"_a, "rows"_a, "scales"_a, "transposed"_a,
      "scales_transposed"_a, "powers_of_two"_a, "stream"_a);
  module.def(
      "fp8_swiglu_gradients",
      [](const Tensor& gate_up, const Tensor& probs, const Tensor& grads, const Tensor& offsets,
         const Tensor& prob_grads, const Maybe& rows, const Maybe& scales, const Maybe& transposed,
         const Maybe& scales_transposed, bool powers_of_two, std::uintptr_t stream) {
        fp8::Swiglu from = swiglu_of(gate_up, probs);
        require(grads.is(ncclepBfloat16, {gate_up.shape[0], from.columns}),
                "grads must be bfloat16 [", gate_up.shape[0], ", ", from.columns, "]");
        require_matrix(prob_grads, ncclepFloat32, "prob_grads");
        require(prob_grads.shape[0] == from.columns / fp8::kBlock &&
                    prob_grads.shape[1] >= gate_up.shape[0] && prob_grads.shape[1] <= kMost,
                "prob_grads must be float32 [", from.columns / fp8::kBlock, ", num_rows or more]");
        from.grads = memory_of<void>(grads, "grads");
        from.prob_grads = static_cast<float*>(prob_grads.data);
        from.probs_pitch = static_cast<int>(prob_grads.shape[1]);
        const fp8::Experts experts = experts_of(offsets);
        const fp8::Matrix to = matrix_of(gate_up.shape[0], gate_up.shape[1], experts, rows, scales,
                                         transposed, scales_transposed);
        fp8::quantize_swiglu_gradients(from, experts, to, scales_of(powers_of_two), stream);
      },
      "gate_up"_a, "probs"_a, "grads"_a, "offsets"_a, "prob_grads"_a, "rows"_a, "scales"_a,
      "transposed"_a, "scales_transposed"_a, "powers_of_two"_a, "stream"_a);
  module.def(
      "fp8_quantize_weights",
      [](const Tensor& values, const Tensor& weights, const Tensor& scales,
         const Tensor& transposed, const Tensor& scales_transposed, bool powers_of_two,
         std::uintptr_t stream) {
        require(values.dtype == ncclepBfloat16 && values.ndim == 3,
                "values must be bfloat16 [num_experts, rows, columns]");
        const std::int64_t experts = values.shape[0], rows = values.shape[1];
        const std::int64_t columns = values.shape[2];
        require_multiple(experts, 1, "the number of experts");
        require_multiple(rows, fp8::kBlock, "the number of a weight's rows");
        require_multiple(columns, fp8::kBlock, "the number of a weight's columns");
        const std::int64_t down = rows / fp8::kBlock, across = columns / fp8::kBlock;
        require(experts <= kMost / std::max(rows, columns) && experts * down <= kMost / across,
                experts, " weights of ", rows, " x ", columns, " are too many");
        require(weights.is(ncclepUint8, {experts, rows, columns}) &&
                    scales.is(ncclepFloat32, {experts, down, across}),
                "weights must be uint8 of the shape of values, scales float32 for each ",
                fp8::kBlock, " x ", fp8::kBlock, " of them");
        require(transposed.is(ncclepUint8, {experts, columns, rows}) &&
                    scales_transposed.is(ncclepFloat32, {experts, across, down}),
                "transposed and scales_transposed must be like weights and scales, transposed");
        fp8::Weights job{};
        job.values = memory_of<void>(values, "values");
        job.fp8 = memory_of<std::uint8_t>(weights, "weights");
        job.transposed = memory_of<std::uint8_t>(transposed, "transposed");
        job.scales = static_cast<float*>(scales.data);
        job.scales_transposed = static_cast<float*>(scales_transposed.data);
        job.num_experts = static_cast<int>(experts);
        job.rows = static_cast<int>(rows);
        job.columns = static_cast<int>(columns);
        fp8::quantize_weights(job, scales_of(powers_of_two), stream);
      },
      "values"_a, "weights"_a, "scales"_a, "transposed"_a, "scales_transposed"_a, "powers_of_two"_a,
      "stream"_a);
}

void bind_products(py::module_& module) {
  module.def(
      "fp8_multiply_rows",
      [](const Tensor& rows, const Tensor& scales, const Tensor& weights,
         const Tensor& weight_scales, const Tensor& offsets, const Tensor& out,
         std::uintptr_t stream) {
        require_matrix(rows, ncclepUint8, "rows");
        const fp8::Experts experts = experts_of(offsets);
        require(weights.dtype == ncclepUint8 && weights.ndim == 3 &&
                    weights.shape[0] == experts.num_experts,
                "weights must be uint8 [", experts.num_experts, ", columns, columns of rows]");
        const std::int64_t num_rows = rows.shape[0], depth = weights.shape[2];
        const bool is_packed = rows.shape[1] != depth;
        const fp8::Matrix a = matrix_of(num_rows, depth, experts, rows, scales, std::nullopt,
                                        std::nullopt, is_packed ? fp8::packed_bytes(depth) : depth);
        const std::int64_t columns = weights.shape[1];
        require_multiple(columns, fp8::kResultColumns, "the number of the result's columns");
        require(experts.num_experts <= kMost / columns, "the weights are too many");
        require(weight_scales.is(ncclepFloat32,
                                 {experts.num_experts, columns / fp8::kBlock, depth / fp8::kBlock}),
                "weight_scales must be float32 for each ", fp8::kBlock, " x ", fp8::kBlock,
                " of the weights");
        require(out.is(ncclepBfloat16, {num_rows, columns}), "out must be bfloat16 [", num_rows,
                ", ", columns, "]");
        fp8::multiply_rows(a, memory_of<std::uint8_t>(weights, "weights"),
                           static_cast<const float*>(weight_scales.data), experts,
                           static_cast<int>(columns), memory_of<void>(out, "out"), stream);
      },
      "rows"_a, "scales"_a, "weights"_a, "weight_scales"_a, "offsets"_a, "out"_a, "stream"_a);
  module.def(
      "fp8_multiply_for_weights",
      [](const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
         const Tensor& offsets, const Tensor& out, bool adds, std::uintptr_t stream) {
        const fp8::Experts experts = experts_of(offsets);
        require(out.dtype == ncclepFloat32 && out.ndim == 3 && out.shape[0] == experts.num_experts,
                "out must be float32 [", experts.num_experts, ", columns of a, columns of b]");
        // As many rows as fit into both: offsets that say more are the caller's mistake.
        require_matrix(a_scales, ncclepFloat32, "a_scales");
        const std::int64_t blocks = a_scales.shape[0];
        require(blocks >= experts.num_experts, "a_scales must be float32 [", experts.num_experts,
                " or more, columns]");
        const std::int64_t num_rows = (blocks - experts.num_experts) * fp8::kBlock;
        const auto side = [&](const Tensor& transposed, const Tensor& scales,
                              std::int64_t columns) {
          require_multiple(columns, fp8::kResultColumns, "a side of the result");
          const fp8::Matrix matrix =
              matrix_of(num_rows, columns, experts, std::nullopt, std::nullopt, transposed, scales);
          require(matrix.num_blocks == blocks, "a and b must have room for the same rows");
          return matrix;
        };
        fp8::multiply_for_weights(side(a, a_scales, out.shape[1]), side(b, b_scales, out.shape[2]),
                                  experts, memory_of<float>(out, "out"), adds, stream);
      },
      "a"_a, "a_scales"_a, "b"_a, "b_scales"_a, "offsets"_a, "out"_a, "adds"_a, "stream"_a);
}

}  // namespace

void bind_fp8_experts(py::module_& module) {
  bind_quantisation(module);
  bind_products(module);
}

#else

void bind_fp8_experts(py::module_&) {}  // it was built for other GPUs

#endif

}  // namespace ncclep::bindings
