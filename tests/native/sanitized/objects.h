// One object of each kind in the C interface, and tensors for their calls.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "include/ncclep.h"
#include "standin.h"

extern "C" void fake_fail_after(int num_calls, int result);

// So many ranks that some CTAs of a combine only send, from scratch.
constexpr int kRanks = 8, kExperts = 16, kLocal = kExperts / kRanks;
constexpr int kTokens = 5, kTopK = 2, kHidden = 8, kRows = 2;
constexpr int kPairs = 3, kAssignments = 6;  // that a plan has room for
constexpr std::uintptr_t kStream = 0x100, kOther = 0x200;

inline const char* nccl_path;
inline bool is_rank_late = false, is_interrupted = false;

inline void* pointer(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

struct Refused {
  std::string text;  // with the result in front, as a number
};

inline void must(ncclepResult_t result) {
  if (result == ncclepSuccess) return;
  throw Refused{std::to_string(result) + " " + ncclepGetLastError()};
}

template <typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Refused& refused) {
    return refused.text;
  }
  return "no error";
}

// Requires that a call ends with an error that contains `text`.
template <typename Call>
void must_fail(const std::string& text, Call&& call) {
  const std::string found = error_of(call);
  standin::require(found.find(text) != std::string::npos, "'" + text + "' is not in: " + found);
}

// Requires that a call ends with ncclepInvalidArgument.
template <typename Call>
void must_refuse(Call&& call) {
  const std::string found = error_of(call);
  standin::require(found.rfind("1 ", 0) == 0, "not refused: " + found);
}

// Lets one call of NCCL or of CUDA fail, after so many more; -1: none.
inline void fail_after(bool is_nccl, int num_calls) {
  if (!is_nccl) return standin::fail_after(num_calls);
  fake_fail_after(std::max(num_calls, 0), num_calls < 0 ? 0 : 3);
}

inline ncclepResult_t all_gather(void*, const void* mine, std::size_t num_bytes, void* all,
                                 const char*, double) {
  if (is_rank_late) return ncclepRemoteError;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::memcpy(static_cast<char*>(all) + rank * num_bytes, mine, num_bytes);
  }
  return ncclepSuccess;
}

inline int poll(void*) { return is_interrupted; }

// A tensor, and memory of its very size.
class Numbers {
 public:
  Numbers(ncclepDataType_t dtype, const std::vector<std::int64_t>& shape, int shift = 0) {
    std::size_t num_bytes = ncclep::itemsize_of(static_cast<ncclep::DType>(dtype));
    for (const std::int64_t size : shape) num_bytes *= size;
    memory_.reset(new char[num_bytes + shift]());
    tensor_.data = memory_.get() + shift;
    tensor_.dtype = dtype;
    tensor_.ndim = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor_.shape);
  }
  operator const ncclepTensor_t*() const { return &tensor_; }
  template <typename T>
  const T* data() const {
    return static_cast<const T*>(tensor_.data);
  }

 private:
  std::unique_ptr<char[]> memory_;
  ncclepTensor_t tensor_ = NCCLEP_TENSOR_INIT;
};

// Cases of other files: windows of several NVLink domains or that are given back, and programs with
// an older header.
void domains();
void phases();
void versions();

// One of each object, and tensors for their calls.
class Objects {
 public:
  void make() {
    ncclepCommConfig_t of_comm{sizeof(of_comm), {},      kRanks, 1, 0, 60.0,
                               nccl_path,       nullptr, nullptr};
    must(ncclepGetUniqueId(&of_comm.unique_id, nccl_path));
    must(ncclepCommCreate(&comm, &of_comm));
    group = new_group(all_gather);
    routes = new_routes(kPairs, kAssignments);
    const ncclepLowLatencyConfig_t few{sizeof(few),    kTokens,        kHidden, kTopK,
                                       ncclepBfloat16, ncclepBfloat16, 0};
    must(ncclepLowLatencyCreate(&low_latency, group, &few));
  }

  ncclepGroup_t new_group(ncclepAllGather_t gather = nullptr) {
    const ncclepGroupConfig_t config{sizeof(config), kExperts, 1.0, gather, poll, nullptr};
    must(ncclepGroupCreate(&groups.emplace_back(), comm, &config));
    const ncclepGroup_t made = groups.back();
    reserve(kTokens, 64, made);
    return made;
  }

  void reserve(int num_tokens, std::size_t row_bytes = 64, ncclepGroup_t of = nullptr) {
    const ncclepShape_t shape{sizeof(shape), num_tokens, kTopK, row_bytes};
    must(ncclepGroupReserve(of ? of : group, &shape, pointer(kStream)));
  }

  // With room for so much, of a batch of so many tokens.
  Numbers new_routes(int pairs, int assignments, int most_tokens = 128) {
    std::int64_t size = 0;
    must(ncclepRoutesSize(group, pairs, assignments, most_tokens, &size));
    return Numbers(ncclepInt32, {size});
  }

  // Destroys what there is.
  void close() {
    for (; !plans.empty(); plans.pop_back()) must(ncclepPlanDestroy(plans.back()));
    if (low_latency) must(ncclepLowLatencyDestroy(low_latency));
    low_latency = nullptr;
    for (; !groups.empty(); groups.pop_back()) {
      if (groups.back()) must(ncclepGroupDestroy(groups.back()));
    }
    if (comm) must(ncclepCommDestroy(comm));
    comm = nullptr;
  }
  ~Objects() {
    fail_after(true, -1);
    fail_after(false, -1);
    standin::capture(0);
    close();
  }

  // --- steps ---

  // In exact mode, or in static mode with `max_recv_rows`; with room for all that arrives.
  ncclepPlanConfig_t plan_config(std::int64_t max_recv_rows, std::uintptr_t stream = kStream) {
    return {.size = sizeof(ncclepPlanConfig_t),
            .topk_idx = topk,
            .most_tokens = 128,
            .number = 1,
            .alignment = 1,
            .max_recv_rows = max_recv_rows,
            .counts = counts,
            .token_routes = token_routes,
            .routes = routes,
            .max_pairs = kPairs,
            .max_assignments = kAssignments,
            .num_sms = 8,
            .stream = pointer(stream),
            .leaves_unused = 0};
  }
  void make_plan(const ncclepPlanConfig_t& config, ncclepGroup_t of = nullptr) {
    ncclepPlan_t made = nullptr;
    must(ncclepPlanCreate(&made, of ? of : group, &config));
    plans.push_back(plan = made);
  }
  void make_plan(std::int64_t max_recv_rows = 0) { make_plan(plan_config(max_recv_rows)); }

  ncclepPlanSizes_t wait_for_sizes() {
    ncclepPlanSizes_t sizes = NCCLEP_PLAN_SIZES_INIT;
    must(ncclepPlanWait(plan, group, rows_of_expert, pointer(kStream), &sizes));
    return sizes;
  }

  ncclepRows_t rows_of(std::uintptr_t stream = kStream) {
    return {sizeof(ncclepRows_t), x, w, rows, row_w, sums, 8, pointer(stream)};
  }
  void dispatch(std::uintptr_t stream = kStream, ncclepGroup_t of = nullptr) {
    const ncclepRows_t given = rows_of(stream);
    must(ncclepDispatch(of ? of : group, plan, &given));
  }

  ncclepLowLatencyDispatch_t few_of(std::uintptr_t stream = kStream) {
    return {.size = sizeof(ncclepLowLatencyDispatch_t),
            .x = x,
            .topk_idx = topk,
            .weights = w,
            .counts = rank_counts,
            .completes = 1,
            .num_ctas = 8,
            .stream = pointer(stream)};
  }
  void dispatch_few(std::uintptr_t stream = kStream) {
    const ncclepLowLatencyDispatch_t given = few_of(stream);
    must(ncclepLowLatencyDispatch(low_latency, &given));
  }
  ncclepLowLatencyCombine_t returned() {
    return {sizeof(ncclepLowLatencyCombine_t), y, y_rows_of, x, true, true, 8, pointer(kStream)};
  }

  ncclepGroupInfo_t info(ncclepGroup_t of = nullptr) {
    ncclepGroupInfo_t info = NCCLEP_GROUP_INFO_INIT;
    must(ncclepGroupGetInfo(of ? of : group, &info));
    return info;
  }

  ncclepComm_t comm = nullptr;
  std::vector<ncclepGroup_t> groups;
  ncclepGroup_t group = nullptr;
  ncclepLowLatency_t low_latency = nullptr;
  std::vector<ncclepPlan_t> plans;
  ncclepPlan_t plan = nullptr;  // the last one
  Numbers topk{ncclepInt64, {kTokens, kTopK}}, kept{ncclepInt32, {kTokens, kTopK}};
  Numbers counts{ncclepInt64, {2 * kLocal + 1}}, token_routes{ncclepInt32, {4, kTokens}};
  Numbers routes{ncclepInt32, {0}}, lacked{ncclepInt64, {kRanks}};
  Numbers rows_of_expert{ncclepInt64, {kLocal}}, rank_counts{ncclepInt32, {kRanks}};
  Numbers x{ncclepBfloat16, {kTokens, kHidden}}, rows{ncclepBfloat16, {kRows, kHidden}};
  Numbers w{ncclepFloat32, {kTokens, kTopK}}, row_w{ncclepFloat32, {kRows}};
  Numbers sums{ncclepBfloat16, {3, kHidden}}, y{ncclepBfloat16, {3, kHidden}};
  Numbers y_rows_of{ncclepInt32, {kRanks, kTokens, kTopK}};
};
