// The lives of communicators, windows and groups: in any order, twice, and with every call of NCCL
// and of CUDA failing once.  What is left over at the end is a leak.
#include <cuda_runtime.h>
#include <sanitizer/lsan_interface.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cases.h"
#include "common/stream_order.h"
#include "fixtures.h"
#include "native.h"
#include "nccl/window.h"
#include "nccl_ep/low_latency.h"
#include "nccl_ep/nccl_ep.h"
#include "standin.h"

namespace {

using ncclep::Window;

constexpr int kEpTokens = 16;  // of an NCCL EP group

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

// --- what the stand-in must report ---------------------------------------------------------------

void without_order() {
  standin::note_kernel(kStream);
  standin::note_kernel(kOtherStream);
}

void across_captures() {
  ncclep::Event event;
  standin::capture({kStream});
  event.record(kStream);
  standin::capture({kOtherStream});
  event.hold_back(kOtherStream);
}

}  // namespace

int main(int count, char** words) {
  return run_case(count, words,
                  {{"windows", windows},
                   {"windows_refused", windows_refused},
                   {"any_bytes", any_bytes},
                   {"nccl_ep", nccl_ep},
                   {"native_group", native_group},
                   {"native_low_latency", native_low_latency},
                   {"closed_group", closed_group},
                   {"order", order},
                   {"calls", calls},
                   {"sizes", sizes},
                   {"growth", growth},
                   {"mistake_out_of_bounds", out_of_bounds},
                   {"mistake_undefined", undefined},
                   {"mistake_leak", leak},
                   {"mistake_without_order", without_order},
                   {"mistake_across_captures", across_captures}});
}
