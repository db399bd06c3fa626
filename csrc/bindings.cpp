// The extension megatron_ncclep._C: what Python sees of the native code, and nothing else.
//
// Calls that may wait for other ranks release the interpreter's lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bench/copy_rows.h"
#include "common/cuda.h"
#include "common/tensor_caster.h"
#include "host/exchange.h"
#include "native/call.h"
#include "native/check_windows.h"
#include "native/group.h"
#include "native/low_latency_host.h"
#include "native/split.h"
#include "nccl/nccl.h"
#include "nccl/window.h"
#include "nccl_ep/nccl_ep.h"
#include "routes/routes_and_weights.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

using ncclep::Communicator;
using ncclep::HostExchange;
using ncclep::Nccl;
using ncclep::Tensor;
using ncclep::Window;
using Unlocked = py::call_guard<py::gil_scoped_release>;

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

std::vector<std::uintptr_t> numbers(const std::vector<char*>& addresses) {
  std::vector<std::uintptr_t> result;
  for (const char* address : addresses) result.push_back(number(address));
  return result;
}

// Seconds: more than any deadline.
constexpr double kForever = 1e9;

// What the device is to read or write: there, and at a multiple of `alignment` bytes.
void require_address(std::uintptr_t address, std::uintptr_t alignment) {
  ncclep::require(address != 0 && address % alignment == 0, "address ", address,
                  ": must be a multiple of ", alignment, " and not 0");
}

char* pointer(std::uintptr_t number) { return reinterpret_cast<char*>(number); }

py::dict build_info() {
  py::dict info;
  info["cuda"] = NCCLEP_CUDA_VERSION;
  info["architectures"] = py::str(NCCLEP_ARCHITECTURES).attr("split")(" ");
  return info;
}

// Lets Ctrl-C end a long wait; called without the interpreter's lock.
void raise_signals() {
  py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void bind_host(py::module_& module) {
  py::class_<HostExchange, std::shared_ptr<HostExchange>>(module, "HostExchange")
      .def(py::init<int, const std::string&, int, int>(), "file"_a, "token"_a, "num_ranks"_a,
           "rank"_a)
      .def(
          "exchange",
          [](HostExchange& exchange, const py::bytes& mine, const std::string& what,
             double timeout_s) {
            ncclep::require(timeout_s >= 0 && timeout_s <= kForever, "a deadline of ", timeout_s,
                            " s: it must be a number of seconds, at most ", kForever);
            const std::string_view message = mine;
            py::bytes all(nullptr, exchange.num_ranks() * message.size());
            char* to = PyBytes_AS_STRING(all.ptr());  // nobody else has these bytes yet
            {
              py::gil_scoped_release unlocked;
              exchange.exchange(message.data(), message.size(), to, what, timeout_s, raise_signals);
            }
            return all;
          },
          "mine"_a, "what"_a, "timeout_s"_a)
      .def("enter", &HostExchange::enter, "call"_a, "goes_on"_a, "since"_a)
      .def("refuse", &HostExchange::refuse, "reason"_a)
      .def("refusal", &HostExchange::refusal, "rank"_a, "since"_a)
      .def("gone_on", &HostExchange::gone_on)
      .def("lost", &HostExchange::lost, Unlocked())
      .def("close", &HostExchange::close, Unlocked());
}

void bind_nccl(py::module_& module) {
  py::class_<Nccl, std::shared_ptr<Nccl>>(module, "Nccl")
      .def(py::init<const std::string&>(), "path"_a)
      .def_property_readonly("path", &Nccl::path)
      .def_property_readonly("version", &Nccl::version)
      .def("unique_id", [](const Nccl& nccl) {
        const ncclep::NcclUniqueId id = nccl.unique_id();
        return py::bytes(id.bytes, sizeof(id.bytes));
      });
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(py::init([](std::shared_ptr<Nccl> nccl, const std::string& unique_id, int num_ranks,
                       int rank) {
             ncclep::NcclUniqueId id;
             ncclep::require(unique_id.size() == sizeof(id.bytes), "a unique id has ",
                             sizeof(id.bytes), " bytes, not ", unique_id.size());
             std::memcpy(id.bytes, unique_id.data(), sizeof(id.bytes));
             py::gil_scoped_release unlocked;
             return std::make_shared<Communicator>(std::move(nccl), id, num_ranks, rank);
           }),
           "nccl"_a.none(false), "unique_id"_a, "num_ranks"_a, "rank"_a)
      .def_property_readonly("num_ranks", &Communicator::num_ranks)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("lsa_size", &Communicator::lsa_size)
      .def("close", &Communicator::close, Unlocked())
      .def("abort", &Communicator::abort, Unlocked());
  py::class_<Window, std::shared_ptr<Window>>(module, "Window")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::size_t num_bytes) {
             auto window = std::make_shared<Window>(std::move(communicator), num_bytes);
             window->open();
             return window;
           }),
           "communicator"_a.none(false), "num_bytes"_a, Unlocked())
      .def_property_readonly("num_bytes", &Window::num_bytes)
      .def_property_readonly("address",
                             [](const Window& window) { return number(window.address()); })
      .def_property_readonly("peers", [](const Window& window) { return numbers(window.peers()); })
      .def("close", &Window::close, Unlocked());
  // Of the start of the struct that NCCL keeps for a window: no window, and no GPU, is needed.
  module.def(
      "window_peers",
      [](const py::bytes& head, int rank, int num_ranks) {
        const std::string_view bytes = head;
        return numbers(ncclep::peers_in(bytes.data(), bytes.size(), rank, num_ranks));
      },
      "head"_a, "rank"_a, "num_ranks"_a);
}

void bind_nccl_ep(py::module_& module) {
  using ncclep::nccl_ep::Group;
  using ncclep::nccl_ep::GroupOptions;
  using ncclep::nccl_ep::Handle;
  using ncclep::nccl_ep::Library;
  py::class_<Library, std::shared_ptr<Library>>(module, "NcclEp")
      .def(py::init<const std::string&>(), "path"_a)
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version", &Library::version);
  py::class_<Group, std::shared_ptr<Group>>(module, "NcclEpGroup")
      .def(py::init([](std::shared_ptr<Library> library, std::shared_ptr<Communicator> communicator,
                       unsigned num_experts, unsigned max_tokens, unsigned max_recv_rows,
                       unsigned row_bytes, unsigned top_k, unsigned num_sms, double timeout_s) {
             const GroupOptions options{num_experts, max_tokens, max_recv_rows, row_bytes,
                                        top_k,       num_sms,    timeout_s};
             py::gil_scoped_release unlocked;
             return std::make_shared<Group>(std::move(library), std::move(communicator), options);
           }),
           "library"_a.none(false), "communicator"_a.none(false), py::kw_only(), "num_experts"_a,
           "max_tokens"_a, "max_recv_rows"_a, "row_bytes"_a, "top_k"_a, "num_sms"_a, "timeout_s"_a)
      .def("handle_bytes", &Group::handle_bytes, "alignment"_a, "top_k"_a)
      .def("close", &Group::close, Unlocked());
  py::class_<Handle, std::shared_ptr<Handle>>(module, "NcclEpHandle")
      .def(py::init<std::shared_ptr<Group>, std::size_t, int, const Tensor&>(),
           "group"_a.none(false), "alignment"_a, "top_k"_a, "memory"_a, py::keep_alive<1, 5>())
      .def("update", &Handle::update, "topk_idx"_a, "expert_counts"_a, "num_rows"_a, "stream"_a,
           Unlocked())
      .def("dispatch", &Handle::dispatch, "x"_a, "w"_a, "rows"_a, "row_w"_a, "stream"_a, Unlocked())
      .def("combine", &Handle::combine, "y"_a, "w"_a, "out"_a, "home_w"_a, "stream"_a, Unlocked())
      .def("close", &Handle::close);
}

// What checks the windows of either: words of any rank's memory.
template <typename Class>
void bind_words(Class& windows) {
  windows.def_static(
      "load_words",
      [](const std::vector<std::uintptr_t>& addresses) {
        for (std::uintptr_t address : addresses) require_address(address, 8);
        return ncclep::native::load_words(addresses);
      },
      "addresses"_a, Unlocked());
  windows.def_static(
      "store_words",
      [](const std::vector<std::uintptr_t>& addresses, const std::vector<std::uint64_t>& words) {
        for (std::uintptr_t address : addresses) require_address(address, 8);
        ncclep::native::store_words(addresses, words);
      },
      "addresses"_a, "words"_a, Unlocked());
}

void bind_native(py::module_& module) {
  using ncclep::native::Failure;
  using ncclep::native::Group;
  using ncclep::native::Phase;
  using ncclep::native::Plan;
  using ncclep::native::PlanSizes;
  py::class_<PlanSizes>(module, "NativePlanSizes")
      .def_readonly("num_rows", &PlanSizes::num_rows)
      .def_readonly("num_pairs", &PlanSizes::num_pairs)
      .def_readonly("num_picks", &PlanSizes::num_picks)
      .def_readonly("bad_ranks", &PlanSizes::bad_ranks);
  py::class_<Failure>(module, "NativeFailure")
      .def_property_readonly(
          "reason", [](const Failure& failure) { return static_cast<int>(failure.reason); })
      .def_property_readonly("phase",
                             [](const Failure& failure) { return static_cast<int>(failure.phase); })
      .def_readonly("peer", &Failure::peer)
      .def_readonly("epoch", &Failure::epoch)
      .def_readonly("deadline_s", &Failure::deadline_s)
      .def_readonly("own_call", &Failure::own_call)
      .def_readonly("peer_call", &Failure::peer_call);
  py::class_<Plan>(module, "NativePlan")
      .def(py::init(
               [](const Tensor& counts, const Tensor& home, int num_chunks, int top_k,
                  std::uint64_t number) { return Plan{counts, home, num_chunks, top_k, number}; }),
           "counts"_a, "home"_a, "num_chunks"_a, "top_k"_a, "number"_a);
  py::class_<Group, std::shared_ptr<Group>> group_class(module, "NativeGroup");
  bind_words(group_class);
  group_class
      .def(py::init<std::shared_ptr<Communicator>, int, double>(), "communicator"_a.none(false),
           "num_experts"_a, "timeout_s"_a)
      .def("fits", &Group::fits, "max_tokens"_a, "top_k"_a, "row_bytes"_a)
      .def("allocate", &Group::allocate, "max_tokens"_a, "top_k"_a, "row_bytes"_a, Unlocked())
      .def("open", &Group::open, Unlocked())
      .def("clear", &Group::clear, Unlocked())
      .def("drop", &Group::drop, Unlocked())
      .def("close", &Group::close, Unlocked())
      .def_property_readonly("windows", &Group::windows)
      .def_property_readonly("generation", &Group::generation)
      .def_property_readonly("was_captured", &Group::was_captured)
      .def_property("timeout_s", &Group::timeout, &Group::set_timeout)
      .def_property_readonly("num_bytes", &Group::num_bytes)
      .def_property_readonly("max_tokens", &Group::max_tokens)
      .def_property_readonly("max_top_k", &Group::max_top_k)
      .def_property_readonly("row_bytes", &Group::row_bytes)
      .def("routes_size", &Group::routes_size, "max_pairs"_a, "max_picks"_a, "num_chunks"_a)
      .def("plan", &Group::plan, "plan"_a, "topk_idx"_a, "alignment"_a, "max_recv_rows"_a, "kept"_a,
           "lacked"_a, "max_pairs"_a, "max_picks"_a, "routes"_a, "num_sms"_a, "stream"_a)
      .def("plan_receive", &Group::plan_receive, "plan"_a, "max_pairs"_a, "max_picks"_a, "routes"_a,
           "num_sms"_a, "stream"_a)
      .def(
          "wait_for_sizes",
          [](const Group& group, Plan& plan, std::uint32_t ticket, const Tensor& rows_of_expert,
             std::uintptr_t stream) {
            return group.wait_for_sizes(plan, ticket, rows_of_expert, stream, raise_signals);
          },
          "plan"_a, "ticket"_a, "rows_of_expert"_a, "stream"_a, Unlocked())
      .def(
          "wait_until_idle", [](const Group& group) { group.wait_until_idle(raise_signals); },
          Unlocked())
      .def("bad_ranks", &Group::bad_ranks, "forget"_a)
      .def("dispatch", &Group::dispatch, "plan"_a, "x"_a, "w"_a, "rows"_a, "row_w"_a, "num_sms"_a,
           "stream"_a)
      .def("sums_size", &Group::sums_size, "plan"_a, "num_sms"_a, "row_bytes"_a)
      .def("combine", &Group::combine, "plan"_a, "y"_a, "w"_a, "sums"_a, "out"_a, "home_w"_a,
           "num_sms"_a, "stream"_a)
      .def(
          "refuse",
          [](Group& group, std::uint32_t phase, std::uintptr_t stream) {
            ncclep::require(
                0 < phase && phase <= static_cast<std::uint32_t>(Phase::kLowLatencyCombine),
                "phase ", phase, ": must be one of Phase");
            group.refuse(static_cast<Phase>(phase), stream);
          },
          "phase"_a, "stream"_a)
      .def("failure", &Group::failure)
      .def_property_readonly("bad_low_latency", &Group::bad_low_latency);
  module.def("call_values", &ncclep::native::values_of, "call"_a);
  module.def(
      "split_dispatch",
      [](int num_ctas) {
        const auto split = ncclep::native::split_dispatch(num_ctas);
        return std::tuple(split.staging, split.pulling);
      },
      "num_ctas"_a);
  module.def("num_phases_of", &ncclep::native::num_phases_of, "most_tokens"_a, "row_bytes"_a);
  module.def(
      "split_combine",
      [](int num_ctas, int num_ranks, int top_k, int row_bytes) {
        const auto split = ncclep::native::split_combine(num_ctas, num_ranks, top_k, row_bytes);
        return std::tuple(split.adding, split.sending, split.summing);
      },
      "num_ctas"_a, "num_ranks"_a, "top_k"_a, "row_bytes"_a);
  module.def("native_min_sms", &ncclep::native::min_ctas, "num_ranks"_a);
  module.def("native_limits", [] {
    py::dict limits;
    limits["max_ranks"] = ncclep::native::kMaxRanks;
    limits["max_experts"] = ncclep::native::kMaxExperts;
    limits["max_tokens"] = ncclep::native::kMaxTokens;
    limits["max_top_k"] = ncclep::native::kMaxTopK;
    limits["chunk"] = ncclep::native::kChunk;
    limits["low_latency_tokens"] = ncclep::native::kLowLatencyTokens;
    return limits;
  });
}

void bind_low_latency(py::module_& module) {
  using ncclep::native::Group;
  using ncclep::native::LowLatency;
  using ncclep::native::LowLatencySizes;
  py::class_<LowLatency, std::shared_ptr<LowLatency>> low_latency_class(module, "NativeLowLatency");
  bind_words(low_latency_class);
  low_latency_class
      .def(py::init([](std::shared_ptr<Group> group, int max_tokens, int hidden, int top_k,
                       const std::string& payload, const std::string& dtype, int num_scales,
                       int generation) {
             const LowLatencySizes sizes{
                 max_tokens, hidden, top_k, ncclep::dtype_of(payload), ncclep::dtype_of(dtype),
                 num_scales};
             py::gil_scoped_release unlocked;
             return std::make_shared<LowLatency>(std::move(group), sizes, generation);
           }),
           "group"_a.none(false), py::kw_only(), "max_tokens"_a, "hidden"_a, "top_k"_a, "payload"_a,
           "dtype"_a, "num_scales"_a, "generation"_a)
      .def("open", &LowLatency::open, Unlocked())
      .def("clear", &LowLatency::clear, Unlocked())
      .def("drop", &LowLatency::drop, Unlocked())
      .def("close", &LowLatency::close, Unlocked())
      .def_property_readonly("windows", &LowLatency::windows)
      .def_property_readonly("generation", &LowLatency::generation)
      .def_property_readonly("num_bytes", &LowLatency::num_bytes)
      .def_property_readonly("rows", &LowLatency::rows)
      .def_property_readonly("scales", &LowLatency::scales)
      .def_property_readonly("experts", &LowLatency::experts)
      .def_property_readonly("weights", &LowLatency::weights)
      .def("dispatch", &LowLatency::dispatch, "x"_a, "scales"_a, "topk_idx"_a, "weights"_a,
           "counts"_a, "completes"_a, "num_ctas"_a, "stream"_a)
      .def("complete_dispatch", &LowLatency::complete_dispatch, "counts"_a, "stream"_a)
      .def("combine", &LowLatency::combine, "y"_a, "rows_of"_a, "out"_a, "sends"_a, "completes"_a,
           "num_ctas"_a, "stream"_a);
}

// Checks int64 indices [T, K], numbers [T, K] for them, and numbers [T, E] of the same dtype.
void require_picks(const char* call, const Tensor& topk_idx, const Tensor& of_picks,
                   const Tensor& of_experts) {
  ncclep::require(topk_idx.dtype == ncclep::DType::kInt64 && topk_idx.shape.size() == 2 &&
                      of_picks.shape == topk_idx.shape,
                  call, " needs int64 [T, K], and numbers [T, K] for it");
  ncclep::require(of_experts.shape.size() == 2 && of_experts.shape[0] == topk_idx.shape[0] &&
                      of_experts.dtype == of_picks.dtype &&
                      ncclep::itemsize_of(of_experts.dtype) > 1,
                  call, " needs numbers [T, E] and [T, K] of one dtype of 2, 4 or 8 bytes");
  // One warp for each token, and experts and picks in int.
  for (const std::int64_t size : {topk_idx.shape[0], topk_idx.shape[1], of_experts.shape[1]}) {
    ncclep::require(size <= INT32_MAX, call, ": ", size, " tokens, experts or picks are too many");
  }
}

// Checks that the experts [T, E] can be divided into blocks of so many.
void require_block(const char* call, const Tensor& of_experts, int block) {
  ncclep::require(block > 0 && of_experts.shape[1] % block == 0, call, ": blocks of ", block,
                  " experts must be equal parts of all");
}

void bind_routes(py::module_& module) {
  module.def(
      "routes_and_weights",
      [](const Tensor& routing_map, const Tensor& probs, std::int64_t not_routed,
         std::int64_t too_many_experts, const Tensor& topk_idx, const Tensor& weights, int block,
         std::uintptr_t stream) {
        ncclep::require(routing_map.dtype == ncclep::DType::kUint8 && routing_map.shape.size() == 2,
                        "routes_and_weights needs a bool map [T, E]");
        require_picks("routes_and_weights", topk_idx, weights, probs);
        ncclep::require(not_routed < 0 && too_many_experts < 0,
                        "routes_and_weights needs negative numbers for what is no expert");
        ncclep::require(probs.shape == routing_map.shape,
                        "routes_and_weights needs probabilities of the map's shape");
        require_block("routes_and_weights", probs, block);
        ncclep::routes::RoutesAndWeights job;
        job.routing_map = static_cast<const std::uint8_t*>(routing_map.data);
        job.probs = probs.data;
        job.num_tokens = probs.shape[0];
        job.num_experts = static_cast<int>(probs.shape[1]);
        job.top_k = static_cast<int>(topk_idx.shape[1]);
        job.block = block;
        job.itemsize = ncclep::itemsize_of(probs.dtype);
        job.not_routed = not_routed;
        job.too_many_experts = too_many_experts;
        job.topk_idx = static_cast<std::int64_t*>(topk_idx.data);
        job.weights = weights.data;
        ncclep::routes::routes_and_weights(job, stream);
      },
      "routing_map"_a, "probs"_a, "not_routed"_a, "too_many_experts"_a, "topk_idx"_a, "weights"_a,
      "block"_a, "stream"_a);
  module.def(
      "probs_gradient",
      [](const Tensor& topk_idx, const Tensor& grad_weights, const Tensor& grad_probs, int block,
         std::uintptr_t stream) {
        require_picks("probs_gradient", topk_idx, grad_weights, grad_probs);
        require_block("probs_gradient", grad_probs, block);
        ncclep::routes::ProbsGradient job;
        job.topk_idx = static_cast<const std::int64_t*>(topk_idx.data);
        job.grad_weights = grad_weights.data;
        job.num_tokens = grad_probs.shape[0];
        job.num_experts = static_cast<int>(grad_probs.shape[1]);
        job.top_k = static_cast<int>(topk_idx.shape[1]);
        job.block = block;
        job.itemsize = ncclep::itemsize_of(grad_probs.dtype);
        job.grad_probs = grad_probs.data;
        ncclep::routes::probs_gradient(job, stream);
      },
      "topk_idx"_a, "grad_weights"_a, "grad_probs"_a, "block"_a, "stream"_a);
}

void bind_bench(py::module_& module) {
  module.def(
      "copy_rows",
      [](const std::string& direction, std::uintptr_t local,
         const std::vector<std::uintptr_t>& peers, const Tensor& peer_of_row,
         const Tensor& peer_row, int num_rows, int row_bytes, int num_sms, std::uintptr_t stream) {
        ncclep::require(direction == "push" || direction == "pull", "direction '", direction,
                        "': must be push or pull");
        for (const Tensor* rows : {&peer_of_row, &peer_row}) {
          ncclep::require(num_rows >= 0 && rows->dtype == ncclep::DType::kInt32 &&
                              rows->num_elements() >= num_rows,
                          "copy_rows needs int32 [num_rows] for each row's place");
        }
        ncclep::require(!peers.empty(), "copy_rows needs the addresses of peers");
        require_address(local, 16);
        for (std::uintptr_t peer : peers) require_address(peer, 16);
        ncclep::bench::CopyRows job;
        job.push = direction == "push";
        job.local = pointer(local);
        for (std::uintptr_t peer : peers) job.peers.push_back(pointer(peer));
        job.peer_of_row = static_cast<const int*>(peer_of_row.data);
        job.peer_row = static_cast<const int*>(peer_row.data);
        job.num_rows = num_rows;
        job.row_bytes = row_bytes;
        ncclep::bench::copy_rows(job, num_sms, stream);
      },
      "direction"_a, "local"_a, "peers"_a, "peer_of_row"_a, "peer_row"_a, "num_rows"_a,
      "row_bytes"_a, "num_sms"_a, "stream"_a);
  module.def(
      "copy_memory",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t num_bytes) {
        require_address(to, 1);
        require_address(from, 1);
        ncclep::cuda_check(cudaMemcpy(pointer(to), pointer(from), num_bytes, cudaMemcpyDefault),
                           "cudaMemcpy");
      },
      "to"_a, "from_"_a, "num_bytes"_a);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  // The names that the package's errors have; pybind11 keeps a reference for the process.
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const ncclep::PeerError& error) {
      py::object type = py::module_::import("megatron_ncclep.errors").attr("PeerError");
      PyErr_SetString(type.ptr(), error.what());
    } catch (const ncclep::Error& error) {
      py::object type = py::module_::import("megatron_ncclep.errors").attr("LibraryError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
  module.def("build_info", &build_info);
  bind_host(module);
  bind_nccl(module);
  bind_nccl_ep(module);
  bind_native(module);
  bind_low_latency(module);
  bind_routes(module);
  bind_bench(module);
}
