// Kernels and copies that need no group: routes, network messages, and measurements of the machine.
#include <optional>
#include <string>
#include <vector>

#include "bench/copy_rows.h"
#include "bench/stamp.h"
#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "common/cuda.h"
#include "hierarchical/message_packing.h"
#include "routing/routes_and_weights.h"

namespace py = pybind11;
using namespace py::literals;

namespace ncclep::bindings {
namespace {

// Checks an address that the device will read or write: not null, and a multiple of `alignment`
// bytes.
void require_address(std::uintptr_t address, std::uintptr_t alignment) {
  require(address != 0 && address % alignment == 0, "address ", address, ": must be a multiple of ",
          alignment, " and not 0");
}

char* pointer(std::uintptr_t number) { return reinterpret_cast<char*>(number); }

// Checks int64 expert indices [T, K], one number per assignment [T, K], and one per expert [T, E]
// of the same dtype.
void require_assignments(const char* call, const Tensor& topk_idx, const Tensor& of_assignments,
                         const Tensor& of_experts) {
  require(
      topk_idx.dtype == ncclepInt64 && topk_idx.ndim == 2 && of_assignments.has_shape_of(topk_idx),
      call, " needs int64 [T, K], and one number [T, K] for each assignment");
  require(of_experts.ndim == 2 && of_experts.shape[0] == topk_idx.shape[0] &&
              of_experts.dtype == of_assignments.dtype && itemsize_of(of_experts.dtype) > 1,
          call, " needs numbers [T, E] and [T, K] of one dtype of 2, 4 or 8 bytes");
  // There is one warp per token, and the kernels count experts and assignments in int.
  for (const std::int64_t size : {topk_idx.shape[0], topk_idx.shape[1], of_experts.shape[1]}) {
    require(size <= INT32_MAX, call, ": ", size, " tokens, experts or assignments are too many");
  }
}

// Checks that the experts of [T, E] divide evenly into blocks of `experts_per_block`.
void require_block(const char* call, const Tensor& of_experts, int experts_per_block) {
  require(experts_per_block > 0 && of_experts.shape[1] % experts_per_block == 0, call,
          ": blocks of ", experts_per_block, " experts must divide all experts evenly");
}

void bind_routes(py::module_& module) {
  module.def(
      "routes_and_weights",
      [](const Tensor& routing_map, const Tensor& probs, std::int64_t not_routed,
         std::int64_t too_many_experts, const Tensor& topk_idx, const Tensor& weights,
         int experts_per_block, std::uintptr_t stream) {
        require(routing_map.dtype == ncclepUint8 && routing_map.ndim == 2,
                "routes_and_weights needs a bool map [T, E]");
        require_assignments("routes_and_weights", topk_idx, weights, probs);
        require(not_routed < 0 && too_many_experts < 0,
                "routes_and_weights needs negative values for not_routed and too_many_experts");
        require(probs.has_shape_of(routing_map),
                "routes_and_weights needs probabilities of the map's shape");
        require_block("routes_and_weights", probs, experts_per_block);
        routes::RoutesAndWeights job;
        job.routing_map = static_cast<const std::uint8_t*>(routing_map.data);
        job.probs = probs.data;
        job.num_tokens = probs.shape[0];
        job.num_experts = static_cast<int>(probs.shape[1]);
        job.top_k = static_cast<int>(topk_idx.shape[1]);
        job.experts_per_block = experts_per_block;
        job.itemsize = itemsize_of(probs.dtype);
        job.not_routed = not_routed;
        job.too_many_experts = too_many_experts;
        job.topk_idx = static_cast<std::int64_t*>(topk_idx.data);
        job.weights = weights.data;
        routes::routes_and_weights(job, stream);
      },
      "routing_map"_a, "probs"_a, "not_routed"_a, "too_many_experts"_a, "topk_idx"_a, "weights"_a,
      "experts_per_block"_a, "stream"_a);
  module.def(
      "probs_gradient",
      [](const Tensor& topk_idx, const Tensor& grad_weights, const Tensor& grad_probs,
         int experts_per_block, std::uintptr_t stream) {
        require_assignments("probs_gradient", topk_idx, grad_weights, grad_probs);
        require_block("probs_gradient", grad_probs, experts_per_block);
        routes::ProbsGradient job;
        job.topk_idx = static_cast<const std::int64_t*>(topk_idx.data);
        job.grad_weights = grad_weights.data;
        job.num_tokens = grad_probs.shape[0];
        job.num_experts = static_cast<int>(grad_probs.shape[1]);
        job.top_k = static_cast<int>(topk_idx.shape[1]);
        job.experts_per_block = experts_per_block;
        job.itemsize = itemsize_of(grad_probs.dtype);
        job.grad_probs = grad_probs.data;
        routes::probs_gradient(job, stream);
      },
      "topk_idx"_a, "grad_weights"_a, "grad_probs"_a, "experts_per_block"_a, "stream"_a);
}

void bind_network_rows(py::module_& module) {
  module.attr("MESSAGE_VECTOR") = native::kMessageVector;
  using Weights = const std::optional<Tensor>&;
  module.def("pack_messages",
             py::overload_cast<const Tensor&, Weights, Weights, std::int64_t, int, int,
                               const Tensor&, std::uintptr_t>(&native::pack_messages),
             "rows"_a, "w"_a, "token"_a, "tokens_each"_a, "first"_a, "piece_bytes"_a, "messages"_a,
             "stream"_a);
  module.def("unpack_messages",
             py::overload_cast<const Tensor&, const Tensor&, const Tensor&, std::uintptr_t>(
                 &native::unpack_messages),
             "messages"_a, "rows"_a, "w"_a, "stream"_a);
  module.def("add_up_messages",
             py::overload_cast<const Tensor&, const Tensor&, const Tensor&, int, int, Weights,
                               Weights, std::uintptr_t>(&native::add_up_messages),
             "messages"_a, "message_index"_a, "out"_a, "first"_a, "piece_bytes"_a,
             "assignment_node"_a, "topk_w"_a, "stream"_a);
}

void bind_bench(py::module_& module) {
  module.def(
      "copy_rows",
      [](const std::string& direction, std::uintptr_t local,
         const std::vector<std::uintptr_t>& peers, const Tensor& peer_of_row,
         const Tensor& peer_row, int num_rows, int row_bytes, int num_sms, std::uintptr_t stream) {
        require(direction == "push" || direction == "pull", "direction '", direction,
                "': must be push or pull");
        for (const Tensor* rows : {&peer_of_row, &peer_row}) {
          require(num_rows >= 0 && rows->dtype == ncclepInt32 && rows->num_elements() >= num_rows,
                  "copy_rows needs int32 [num_rows] for each row's place");
        }
        require(!peers.empty(), "copy_rows needs the addresses of peers");
        require_address(local, 16);
        for (std::uintptr_t peer : peers) require_address(peer, 16);
        bench::CopyRows job;
        job.push = direction == "push";
        job.local = pointer(local);
        for (std::uintptr_t peer : peers) job.peers.push_back(pointer(peer));
        job.peer_of_row = static_cast<const int*>(peer_of_row.data);
        job.peer_row = static_cast<const int*>(peer_row.data);
        job.num_rows = num_rows;
        job.row_bytes = row_bytes;
        bench::copy_rows(job, num_sms, stream);
      },
      "direction"_a, "local"_a, "peers"_a, "peer_of_row"_a, "peer_row"_a, "num_rows"_a,
      "row_bytes"_a, "num_sms"_a, "stream"_a);
  module.def(
      "stamp",
      [](const Tensor& times, int index, std::uintptr_t stream) {
        require(times.dtype == ncclepInt64, "stamps are int64");
        require(0 <= index && index < times.num_elements(), "there is no stamp ", index);
        bench::stamp(static_cast<std::int64_t*>(times.data) + index, stream);
      },
      "times"_a, "index"_a, "stream"_a);
  module.def(
      "copy_memory",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t num_bytes) {
        require_address(to, 1);
        require_address(from, 1);
        cuda_check(cudaMemcpy(pointer(to), pointer(from), num_bytes, cudaMemcpyDefault),
                   "cudaMemcpy");
      },
      "to"_a, "from_"_a, "num_bytes"_a);
}

}  // namespace

void bind_kernels(py::module_& module) {
  bind_routes(module);
  bind_network_rows(module);
  bind_bench(module);
}

}  // namespace ncclep::bindings
