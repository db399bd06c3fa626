// The host exchange, NCCL and libnccl_ep.
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "host/exchange.h"
#include "nccl/nccl.h"
#include "nccl/window.h"
#include "nccl/window_of_2_28.h"
#include "nccl_ep/low_latency.h"
#include "nccl_ep/nccl_ep.h"
#include "network/rails.h"

namespace py = pybind11;
using namespace py::literals;

namespace ncclep::bindings {
namespace {

// Seconds: more than any deadline.
constexpr double kForever = 1e9;

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

std::vector<std::uintptr_t> numbers(const std::vector<char*>& addresses) {
  std::vector<std::uintptr_t> result;
  for (const char* address : addresses) result.push_back(number(address));
  return result;
}

void bind_host(py::module_& module) {
  py::class_<HostExchange, std::shared_ptr<HostExchange>>(module, "HostExchange")
      .def(py::init<int, const std::string&, int, int>(), "file"_a, "token"_a, "num_ranks"_a,
           "rank"_a)
      .def(
          "exchange",
          [](HostExchange& exchange, const py::bytes& mine, const std::string& what,
             double timeout_s) {
            require(timeout_s >= 0 && timeout_s <= kForever, "a deadline of ", timeout_s,
                    " s: it must be a number of seconds, at most ", kForever);
            const std::string_view message = mine;
            py::bytes all(nullptr, exchange.num_ranks() * message.size());
            char* to = PyBytes_AS_STRING(all.ptr());  // nothing else refers to these bytes yet
            {
              py::gil_scoped_release unlocked;
              exchange.exchange(message.data(), message.size(), to, what, timeout_s, raise_signals);
            }
            return all;
          },
          "mine"_a, "what"_a, "timeout_s"_a)
      .def("enter", &HostExchange::enter, "call"_a, "skips_exchange"_a, "since"_a)
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
        const NcclUniqueId id = nccl.unique_id();
        return py::bytes(id.bytes, sizeof(id.bytes));
      });
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(py::init([](std::shared_ptr<Nccl> nccl, const std::string& unique_id, int num_ranks,
                       int rank, int device, double timeout_s) {
             NcclUniqueId id;
             require(unique_id.size() == sizeof(id.bytes), "a unique id has ", sizeof(id.bytes),
                     " bytes, not ", unique_id.size());
             std::memcpy(id.bytes, unique_id.data(), sizeof(id.bytes));
             py::gil_scoped_release unlocked;
             return Communicator::connect(std::move(nccl), id, num_ranks, rank, device, timeout_s,
                                          raise_signals);
           }),
           "nccl"_a.none(false), "unique_id"_a, "num_ranks"_a, "rank"_a, "device"_a, "timeout_s"_a)
      .def_property_readonly("num_ranks", &Communicator::num_ranks)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("lsa_size", &Communicator::lsa_size)
      .def_property_readonly("num_domains", &Communicator::num_domains)
      .def("network_problem",
           [](const Communicator& communicator) { return network::problem(communicator); })
      .def("close", &Communicator::close, Unlocked())
      .def("abort", &Communicator::abort, Unlocked());
  py::class_<Window, std::shared_ptr<Window>>(module, "Window")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::size_t num_bytes,
                       bool over_network) {
             const Reach reach = over_network ? Reach::kNetwork : Reach::kDomain;
             auto window = std::make_shared<Window>(std::move(communicator), num_bytes, reach);
             window->open();
             return window;
           }),
           "communicator"_a.none(false), "num_bytes"_a, "over_network"_a = false, Unlocked())
      .def_property_readonly("num_bytes", &Window::num_bytes)
      .def_property_readonly("address",
                             [](const Window& window) { return number(window.address()); })
      .def_property_readonly("peers", [](const Window& window) { return numbers(window.peers()); })
      .def("close", &Window::close, Unlocked());
  using network::Rails;
  py::class_<Rails, std::shared_ptr<Rails>>(module, "Rails")
      .def(py::init([](std::shared_ptr<Communicator> communicator, double timeout_s) {
             return std::make_shared<Rails>(std::move(communicator), timeout_s, raise_signals);
           }),
           "communicator"_a.none(false), "timeout_s"_a, Unlocked())
      .def_property_readonly("num_domains", &Rails::num_domains)
      .def_property_readonly("transport", &Rails::transport)
      .def(
          "probe",
          [](Rails& rails, const std::shared_ptr<Window>& window, double timeout_s) {
            rails.probe(*window, timeout_s);
          },
          "window"_a.none(false), "timeout_s"_a, Unlocked())
      .def("close", &Rails::close, Unlocked());
  // Parses the head of the struct that NCCL keeps for a window: needs neither a window nor a GPU.
  module.def(
      "window_peers",
      [](const py::bytes& head, int rank, int num_ranks) {
        const std::string_view bytes = head;
        return numbers(peers_in(bytes.data(), bytes.size(), rank, num_ranks));
      },
      "head"_a, "rank"_a, "num_ranks"_a);
}

void bind_nccl_ep(py::module_& module) {
  using nccl_ep::Group;
  using nccl_ep::GroupOptions;
  using nccl_ep::Handle;
  using nccl_ep::Library;
  using nccl_ep::LowLatencyHandle;
  py::class_<Library, std::shared_ptr<Library>>(module, "NcclEp")
      .def(py::init<const std::string&>(), "path"_a)
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version", &Library::version);
  py::class_<Group, std::shared_ptr<Group>>(module, "NcclEpGroup")
      .def(py::init([](std::shared_ptr<Library> library, std::shared_ptr<Communicator> communicator,
                       unsigned num_experts, unsigned max_tokens, unsigned max_recv_rows,
                       unsigned row_bytes, unsigned top_k, unsigned num_sms, double timeout_s,
                       bool low_latency) {
             const GroupOptions options{num_experts, max_tokens, max_recv_rows, row_bytes,
                                        top_k,       num_sms,    timeout_s,     low_latency};
             py::gil_scoped_release unlocked;
             return std::make_shared<Group>(std::move(library), std::move(communicator), options);
           }),
           "library"_a.none(false), "communicator"_a.none(false), py::kw_only(), "num_experts"_a,
           "max_tokens"_a, "max_recv_rows"_a, "row_bytes"_a, "top_k"_a, "num_sms"_a, "timeout_s"_a,
           "low_latency"_a = false)
      .def("handle_bytes", &Group::handle_bytes, "alignment"_a, "top_k"_a)
      .def("close", &Group::close, Unlocked());
  py::class_<Handle, std::shared_ptr<Handle>>(module, "NcclEpHandle")
      .def(py::init<std::shared_ptr<Group>, std::size_t, int, const Tensor&>(),
           "group"_a.none(false), "alignment"_a, "top_k"_a, "memory"_a, py::keep_alive<1, 5>())
      .def("update", &Handle::update, "topk_idx"_a, "expert_counts"_a, "num_rows"_a, "stream"_a,
           Unlocked())
      .def("dispatch", &Handle::dispatch, "x"_a, "w"_a, "rows"_a, "row_w"_a, "stream"_a, Unlocked())
      .def("combine", &Handle::combine, "y"_a, "w"_a, "out"_a, "topk_w"_a, "stream"_a, Unlocked())
      .def("close", &Handle::close);
  py::class_<LowLatencyHandle, std::shared_ptr<LowLatencyHandle>>(module, "NcclEpLowLatencyHandle")
      .def(py::init<std::shared_ptr<Group>, int>(), "group"_a.none(false), "top_k"_a, Unlocked())
      .def("dispatch", &LowLatencyHandle::dispatch, "x"_a, "topk_idx"_a, "w"_a, "rows"_a,
           "row_topk_idx"_a, "row_w"_a, "counts"_a, "stream"_a, Unlocked())
      .def("combine", &LowLatencyHandle::combine, "y"_a, "out"_a, "stream"_a, Unlocked())
      .def("close", &LowLatencyHandle::close);
}

}  // namespace

void bind_libraries(py::module_& module) {
  bind_host(module);
  bind_nccl(module);
  bind_nccl_ep(module);
}

}  // namespace ncclep::bindings
