// The lives of communicators, windows and groups: in any order, twice, and with every call of NCCL
// and of CUDA failing once.  What is left over at the end is a leak.
#include <cuda_runtime.h>
#include <sanitizer/lsan_interface.h>

#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cases.h"
#include "common/shared_library.h"
#include "native/group.h"
#include "native/split.h"
#include "nccl/nccl.h"
#include "nccl/window.h"
#include "nccl_ep/low_latency.h"
#include "nccl_ep/nccl_ep.h"
#include "standin.h"

namespace {

using ncclep::Communicator;
using ncclep::DType;
using ncclep::Nccl;
using ncclep::Tensor;
using ncclep::Window;

// So many ranks that others than those that add send, from scratch.
constexpr int kRanks = 8, kExperts = 16, kTokens = 5, kTopK = 2, kHidden = 8;
constexpr int kEpTokens = 16;  // of an NCCL EP group
constexpr std::uintptr_t kStream = 0x100, kOtherStream = 0x200;
constexpr int kMostCalls = 500;  // of one life

// The stand-in for libnccl and libnccl_ep.
const char* library_path() { return std::getenv("NCCLEP_FAKE_LIBRARY"); }

struct Fake {
  Fake() : library(library_path()) {
    library.find("fake_fail_after", fail_after);
    library.find("fake_make_windows", make_windows);
  }
  ncclep::SharedLibrary library;
  void (*fail_after)(int, int);
  void (*make_windows)(int);
};

Fake& fake() {
  static Fake one;
  return one;
}

std::shared_ptr<Communicator> make_communicator(int num_ranks = kRanks, int rank = 1) {
  fake().make_windows(1);
  auto nccl = std::make_shared<Nccl>(library_path());
  return std::make_shared<Communicator>(nccl, nccl->unique_id(), num_ranks, rank);
}

// A tensor with memory of its very size.
struct Owned {
  Owned(DType dtype, std::vector<std::int64_t> shape) {
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    memory.reset(new char[tensor.num_elements() * itemsize_of(dtype)]());
    tensor.data = memory.get();
  }
  operator const Tensor&() const { return tensor; }
  Tensor tensor;
  std::unique_ptr<char[]> memory;
};

// Lives `life` again and again, with call number 0, 1, 2, ... of what `fail_after` counts failing,
// until it does not come to that call any more.
template <typename FailAfter, typename Life>
void with_every_call_failing(FailAfter&& fail_after, Life&& life) {
  for (int call = 0; call < kMostCalls; ++call) {
    fail_after(call);
    bool has_failed = false;
    try {
      life();
    } catch (const ncclep::Error&) {
      has_failed = true;
    }
    fail_after(-1);
    if (!has_failed) {
      REQUIRE(call > 3);
      return;
    }
  }
  REQUIRE(!"it never comes to an end");
}

void fail_nccl_after(int calls) { fake().fail_after(calls < 0 ? 0 : calls, calls < 0 ? 0 : 3); }

// --- NCCL ----------------------------------------------------------------------------------------

void live_with_window() {
  const auto communicator = make_communicator();
  Window window(communicator, 5000);
  try {
    window.open();
    REQUIRE(window.peers().at(1) == window.address());
    std::memset(window.address(), 1, window.num_bytes());
    REQUIRE(refuses([&] { window.open(); }, "opened or closed before"));
    window.close();
  } catch (...) {
    window.close();  // what was left is given back
    throw;
  }
  window.close();
  REQUIRE(refuses([&] { window.open(); }, "opened or closed before"));
  communicator->close();
  communicator->close();
  REQUIRE(refuses([&] { communicator->get(); }, "was closed"));
}

void windows() {
  live_with_window();
  with_every_call_failing(fail_nccl_after, live_with_window);
  with_every_call_failing(standin::fail_after, [] {
    live_with_window();
    for (int i = 0; i < 3; ++i) live_with_window();  // one of them has few calls of CUDA
  });
}

void windows_refused() {
  for (const auto& [num_ranks, rank] : {std::pair(0, 0), {-1, -2}, {4, 4}, {4, -1}}) {
    REQUIRE(refuses([&] { make_communicator(num_ranks, rank); }, "rank "));
  }
  const auto communicator = make_communicator();
  REQUIRE(refuses([&] { Window(communicator, 0); }, "a window of 0 bytes"));
  REQUIRE(refuses([&] { Window(communicator, SIZE_MAX); }, "a window of"));
  REQUIRE(refuses([&] { Window(communicator, SIZE_MAX / 4); }, "gave no memory"));
  Window(communicator, 1);  // neither opened nor closed
  {
    Window open(communicator, 1);
    __lsan_disable();
    open.open();  // what NCCL has of it is lost below: nobody can tell it any more
    __lsan_enable();
    communicator->close();
    REQUIRE(refuses([&] { open.close(); }, "communicator was closed"));
    open.close();
  }
  REQUIRE(refuses([&] { Window(communicator, 1).open(); }, "communicator was closed"));
  communicator->abort();
  make_communicator()->abort();
  fake().make_windows(0);
  auto nccl = std::make_shared<Nccl>(library_path());
  const auto pair = std::make_shared<Communicator>(nccl, nccl->unique_id(), 2, 0);
  REQUIRE(refuses([&] { Window(pair, 1).open(); }, "NCCL made no window"));
}

// Whatever bytes a window handle leads to: addresses, or an error.
void any_bytes() {
  std::mt19937_64 draw(1);
  int num_taken = 0;
  for (int turn = 0; turn < 100000; ++turn) {
    const std::size_t length = draw() % 8 == 0 ? draw() % 64 : 32;
    const std::unique_ptr<std::uint64_t[]> words(new std::uint64_t[8]);
    for (int i = 0; i < 8; ++i) words[i] = draw() >> draw() % 64;
    const int rank = static_cast<int>(draw() % 5) - 1, num_ranks = static_cast<int>(draw() % 6);
    if (draw() % 4 != 0) words[2] = static_cast<std::uint64_t>(rank) << 32 | (rank & 0xffffffffu);
    if (draw() % 2 != 0) words[1] &= ~15ull;
    const std::unique_ptr<char[]> head(new char[length]);
    std::memcpy(head.get(), words.get(), length);
    try {
      const auto peers = ncclep::peers_in(head.get(), length, rank, num_ranks);
      REQUIRE(static_cast<int>(peers.size()) == num_ranks && 0 <= rank && rank < num_ranks);
      for (int i = 1; i < num_ranks; ++i) REQUIRE(peers[i] > peers[i - 1]);
      ++num_taken;
    } catch (const ncclep::Error&) {
    }
  }
  REQUIRE(num_taken > 1000);
}

// --- NCCL EP -------------------------------------------------------------------------------------

ncclep::nccl_ep::GroupOptions ep_options(bool low_latency = false) {
  return {kExperts,        kEpTokens,  /*max_recv_rows*/ 0, /*row_bytes*/ 64, kTopK, /*num_sms*/ 0,
          /*timeout_s*/ 1, low_latency};
}

void live_with_nccl_ep() {
  const auto communicator = make_communicator();
  const auto library = std::make_shared<ncclep::nccl_ep::Library>(library_path());
  const auto group = std::make_shared<ncclep::nccl_ep::Group>(library, communicator, ep_options());
  const Owned memory(DType::kUint8, {static_cast<std::int64_t>(group->handle_bytes(16, kTopK))});
  ncclep::nccl_ep::Handle handle(group, 16, kTopK, memory), forgotten(group, 1, kTopK, memory);
  const Owned topk(DType::kInt64, {kTokens, kTopK}), counts(DType::kInt64, {kExperts / kRanks}),
      total(DType::kInt64, {1});
  handle.update(topk, counts, total, kStream);
  const Owned x(DType::kBFloat16, {kTokens, kHidden}), rows(DType::kBFloat16, {7, kHidden});
  const Owned w(DType::kFloat32, {kTokens, kTopK}), row_w(DType::kFloat32, {7});
  const Owned none(DType::kFloat32, {0, kHidden});
  handle.dispatch(x, w.tensor, rows, row_w.tensor, kStream);
  handle.dispatch(none, std::nullopt, none, std::nullopt, kStream);
  handle.combine(rows, row_w.tensor, x, w.tensor, kStream);
  REQUIRE(refuses([&] { handle.dispatch(x, w.tensor, rows, std::nullopt, kStream); }, "weights"));
  REQUIRE(refuses([&] { handle.dispatch(rows, w.tensor, x, row_w.tensor, kStream); }, "weights"));
  REQUIRE(refuses([&] { handle.dispatch(x, std::nullopt, none, std::nullopt, kStream); }, "rows"));
  REQUIRE(refuses([&] { handle.update(topk, total, counts, kStream); }, "counts"));
  handle.close();
  handle.close();
  REQUIRE(refuses([&] { handle.update(topk, counts, total, kStream); }, "handle was closed"));
  group->close();
  group->close();
  REQUIRE(refuses([&] { forgotten.update(topk, counts, total, kStream); }, "handle was closed"));
  REQUIRE(refuses([&] { ncclep::nccl_ep::Handle(group, 1, kTopK, memory); }, "group was closed"));
  communicator->close();
}

void live_with_nccl_ep_low_latency() {
  const auto communicator = make_communicator();
  const auto library = std::make_shared<ncclep::nccl_ep::Library>(library_path());
  const auto group =
      std::make_shared<ncclep::nccl_ep::Group>(library, communicator, ep_options(true));
  ncclep::nccl_ep::LowLatencyHandle handle(group, kTopK), forgotten(group, 1);
  const Owned x(DType::kBFloat16, {kTokens, kHidden}), topk(DType::kInt64, {kTokens, kTopK}),
      w(DType::kFloat32, {kTokens, kTopK}), rows(DType::kBFloat16, {kRanks, kEpTokens, kHidden}),
      experts(DType::kInt32, {kRanks, kEpTokens, kTopK}),
      row_w(DType::kFloat32, {kRanks, kEpTokens, kTopK}), counts(DType::kInt32, {kRanks});
  handle.dispatch(x, topk, w, rows, experts, row_w, counts, kStream);
  handle.combine(rows, x, kStream);
  REQUIRE(refuses([&] { handle.combine(x, x, kStream); }, "needs rows"));
  REQUIRE(refuses([&] { handle.combine(rows, rows, kStream); }, "needs 1 to"));
  const auto dispatch_to = [&](const Owned& to, const Owned& number) {
    handle.dispatch(x, topk, w, rows, to, row_w, number, kStream);
  };
  REQUIRE(refuses([&] { dispatch_to(topk, counts); }, "writes experts"));
  REQUIRE(refuses([&] { dispatch_to(experts, topk); }, "writes experts"));
  handle.close();
  handle.close();
  REQUIRE(refuses([&] { handle.combine(rows, x, kStream); }, "handle was closed"));
  group->close();
  REQUIRE(refuses([&] { forgotten.combine(rows, x, kStream); }, "handle was closed"));
  REQUIRE(refuses([&] { ncclep::nccl_ep::LowLatencyHandle(group, 1); }, "group was closed"));
  communicator->close();
}

void nccl_ep() {
  live_with_nccl_ep();
  live_with_nccl_ep_low_latency();
  with_every_call_failing(fail_nccl_after, live_with_nccl_ep);
  with_every_call_failing(fail_nccl_after, live_with_nccl_ep_low_latency);
}

// --- the native engine's group -------------------------------------------------------------------

std::shared_ptr<ncclep::native::Group> make_group(double timeout_s = 1) {
  return std::make_shared<ncclep::native::Group>(make_communicator(), kExperts, timeout_s);
}

// What a plan keeps, and what goes through it.
struct Batch {
  Owned counts{DType::kInt64, {2 * kExperts / kRanks + 1}},
      token_routes{DType::kInt32, {4, kTokens}};
  Owned topk{DType::kInt64, {kTokens, kTopK}}, kept{DType::kInt32, {kTokens, kTopK}};
  Owned x{DType::kFloat32, {kTokens, kHidden}}, rows{DType::kFloat32, {2, kHidden}};
  Owned x_bytes{DType::kUint8, {kTokens, 4 * kHidden}}, rows_bytes{DType::kUint8, {2, 4 * kHidden}};
  Owned w{DType::kFloat32, {kTokens, kTopK}}, row_w{DType::kFloat32, {2}};
  Owned rows_of_expert{DType::kInt64, {kExperts / kRanks}};
  std::vector<Owned> routes;
  ncclep::native::Plan plan{counts, token_routes, /*num_chunks*/ 1, kTopK, /*number*/ 1};

  Owned& make_routes(ncclep::native::Group& group, int max_pairs, int max_assignments) {
    const std::int64_t size = group.routes_size(max_pairs, max_assignments, 1);
    return routes.emplace_back(DType::kInt32, std::vector<std::int64_t>{size});
  }

  std::uint32_t make_plan(ncclep::native::Group& group, bool is_static, int max_pairs,
                          int max_assignments) {
    const auto if_static = is_static ? std::optional(kept.tensor) : std::nullopt;
    return group.plan(plan, topk, 1, is_static ? 2 : 0, if_static, {}, max_pairs, max_assignments,
                      make_routes(group, max_pairs, max_assignments), 8, kStream);
  }

  void receive(ncclep::native::Group& group, int max_pairs, int max_assignments) {
    group.plan_receive(plan, max_pairs, max_assignments,
                       make_routes(group, max_pairs, max_assignments), 8, kStream);
  }

  void move(ncclep::native::Group& group) {
    group.dispatch(plan, x, w.tensor, rows, row_w.tensor, 8, kStream);
    group.dispatch(plan, x, std::nullopt, rows, std::nullopt, 8, kOtherStream);
    group.dispatch(plan, x_bytes, w.tensor, rows_bytes, row_w.tensor, 8, kStream);
    const Owned sums(DType::kFloat32, {group.sums_size(plan, 8, kHidden * 4), kHidden});
    group.combine(plan, rows, row_w.tensor, sums, x, w.tensor, 8, kStream);
    const std::optional<Tensor> none_needed =
        sums.tensor.shape[0] > 0 ? std::optional<Tensor>(sums.tensor) : std::nullopt;
    group.combine(plan, rows, std::nullopt, none_needed, x, std::nullopt, 8, kOtherStream);
    const auto add_bytes = [&] {
      group.combine(plan, rows_bytes, std::nullopt, {}, x_bytes, std::nullopt, 8, kStream);
    };
    REQUIRE(refuses(add_bytes, "combine: rows must be bf16, fp16 or fp32"));
  }
};

void plan_exactly(ncclep::native::Group& group, Batch& batch) {
  const std::uint32_t ticket = batch.make_plan(group, false, 1, 1);
  REQUIRE(refuses([&] { batch.move(group); }, "not received"));  // nobody knows how much arrives
  const auto sizes = group.wait_for_sizes(batch.plan, ticket, batch.rows_of_expert, kStream, [] {});
  REQUIRE(sizes && sizes->num_rows == 2 && sizes->num_assignments == 2);
  REQUIRE(refuses([&] { batch.move(group); }, "room for 1 pairs and 1 assignments"));
  batch.receive(group, 1, 2);
}

void live_with_group() {
  const auto group = make_group();
  // A caller lets go of everything after an error: the windows, then the group.
  struct Closing {
    ncclep::native::Group& group;
    ~Closing() {
      standin::fail_after(-1);
      fail_nccl_after(-1);
      group.close();
      group.close();
    }
  } closing{*group};
  Batch batch, fixed;
  REQUIRE(refuses([&] { batch.move(*group); }, "windows"));
  for (int turn = 0; turn < 2; ++turn) {  // windows, and larger ones
    try {
      group->allocate(kTokens + 200 * turn, kTopK, 32);
      group->open();
      group->clear();
    } catch (...) {
      // Windows that are open stay so, on purpose: here they go, so that other leaks are seen.
      const auto left = group->windows();
      group->drop();
      standin::fail_after(-1);
      fail_nccl_after(-1);
      for (const auto& window : left) window->close();
      throw;
    }
    REQUIRE(group->fits(kTokens, kTopK, 32) && group->windows().size() == 2);
  }
  plan_exactly(*group, batch);
  batch.move(*group);
  fixed.make_plan(*group, true, 2, 2);
  fixed.move(*group);
  standin::capture(kOtherStream);
  fixed.move(*group);
  standin::capture(0);
  REQUIRE(group->was_captured() && !group->failure() && group->bad_ranks(true) == 0);
  group->refuse(ncclep::native::Phase::kCombine, kStream);
  group->wait_until_idle([] {});
  group->close();
}

void native_group() {
  live_with_group();
  with_every_call_failing(standin::fail_after, live_with_group);
  with_every_call_failing(fail_nccl_after, live_with_group);
  REQUIRE(standin::num_allocations() == 0);
}

void closed_group() {
  const auto group = make_group();
  Batch batch;
  group->allocate(kTokens, kTopK, 32);
  group->open();
  group->clear();
  plan_exactly(*group, batch);
  group->close();
  group->drop();
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { group->allocate(kTokens, kTopK, 32); }, [&] { group->clear(); },
           [&] { batch.move(*group); }, [&] { batch.make_plan(*group, false, 1, 2); },
           [&] { batch.make_plan(*group, true, 1, 2); },
           [&] { group->refuse(ncclep::native::Phase::kDispatch, kStream); },
           [&] { batch.receive(*group, 1, 2); },
           [&] { group->wait_for_sizes(batch.plan, 1, batch.rows_of_expert, kStream, [] {}); }}) {
    error_of(call);
  }
  group->open();  // nothing is there to open
  group->close();
  REQUIRE(group->windows().empty() && group->num_bytes() == 0 && !group->failure());
  REQUIRE(group->bad_ranks(true) == 0);
  group->wait_until_idle([] {});
  REQUIRE(standin::num_allocations() == 0);
}

void sizes() {
  const auto group = make_group(/*timeout_s*/ 5);
  group->allocate(kTokens, kTopK, 32);
  group->open();
  group->clear();
  Batch batch;
  const auto wait = [&](std::uint32_t ticket, const std::function<void()>& poll) {
    return group->wait_for_sizes(batch.plan, ticket, batch.rows_of_expert, kStream, poll);
  };
  const auto count = [&] { return batch.make_plan(*group, false, 1, 2); };
  standin::sizes.delay_ms = 20;  // a thread tells it while the host waits
  std::uint32_t ticket = count();
  REQUIRE(refuses([&] { wait(ticket + 1, [] {}); }, "not that of the last plan"));
  REQUIRE(refuses([&] { wait(0, [] {}); }, "not that of the last plan"));
  REQUIRE(wait(ticket, [] {})->num_rows == 2);
  // A routing that is refused: nobody may go on with the plan.
  standin::sizes.bad_ranks = 4;
  batch.plan = {batch.counts, batch.token_routes, 1, kTopK, 1};
  REQUIRE(wait(count(), [] {})->bad_ranks == 4);
  batch.receive(*group, 1, 2);
  REQUIRE(refuses([&] { batch.move(*group); }, "not received"));
  standin::sizes.bad_ranks = 0;
  // Ctrl-C.
  standin::sizes.delay_ms = 300;
  ticket = count();
  REQUIRE(refuses([&] { wait(ticket, [] { ncclep::fail("Ctrl-C"); }); }, "Ctrl-C"));
  cudaDeviceSynchronize();
  REQUIRE(wait(ticket, [] {}).has_value());  // it has come meanwhile
  standin::sizes.delay_ms = 20;
  standin::sizes.fails = true;
  REQUIRE(!wait(count(), [] {}) && group->failure()->peer == 1);
  standin::sizes.fails = false;
  group->close();
}

// --- what the sanitizers must report -------------------------------------------------------------

void out_of_bounds() {
  const Owned tensor(DType::kUint8, {5});
  standin::touch(tensor.tensor.data, 6);
}

void undefined() {
  volatile int most = INT32_MAX;
  most = most + 1;
}

void leak() {
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, 7) == cudaSuccess);
  standin::forget(memory);
}

}  // namespace

int main(int count, char** words) {
  return run_case(count, words,
                  {{"windows", windows},
                   {"windows_refused", windows_refused},
                   {"any_bytes", any_bytes},
                   {"nccl_ep", nccl_ep},
                   {"native_group", native_group},
                   {"closed_group", closed_group},
                   {"sizes", sizes},
                   {"mistake_out_of_bounds", out_of_bounds},
                   {"mistake_undefined", undefined},
                   {"mistake_leak", leak}});
}
