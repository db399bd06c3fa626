// Our own declarations of the part of the C interface of NVIDIA's libnccl_ep 0.2 that is used here.
//
// Every struct starts with its size and a magic number; the library reads no further than the size.
// The sizes are those of its interface version 2.  Version 3 adds two fields to the end of
// GroupConfig, SMs of dispatch and of combine, and uses max_num_sms where they are absent.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/nccl.h"

namespace ncclep::nccl_ep {

constexpr unsigned kInterfaceVersion = 2;
constexpr unsigned kMagic = 0xC00FFFEEu;
constexpr unsigned kTensorMagic = 0xCAFECAFEu;

enum Algorithm : int { kLowLatency = 0, kHighThroughput = 1 };
enum Layout : int { kExpertMajor = 1, kRankMajor = 2 };
enum Overflow : int { kOverflowTrap = 1 };
enum Direction : int { kForward = 0, kBackward = 1 };

struct TensorArgument {
  unsigned size = sizeof(TensorArgument);
  unsigned magic = kTensorMagic;
  unsigned num_dimensions = 0;
  int datatype = 0;
  void* data = nullptr;
  NcclWindow window = nullptr;
  std::uint64_t window_offset = 0;
  std::size_t* sizes = nullptr;
};
static_assert(sizeof(TensorArgument) == 48);

struct GroupConfig {
  unsigned size = sizeof(GroupConfig);
  unsigned magic = kMagic;
  unsigned version = kInterfaceVersion;
  int algorithm = kHighThroughput;
  unsigned num_experts = 0;
  unsigned max_dispatch_tokens_per_rank = 0;
  unsigned max_recv_tokens_per_rank = 0;  // 0: outputs have the size that the routing needs
  unsigned max_token_bytes = 0;
  unsigned long rdma_buffer_size = 0;
  unsigned num_qp_per_rank = 0;
  unsigned num_channels = 0;
  unsigned max_num_sms = 0;
  void* allocate = nullptr;  // null: cudaMalloc
  void* free = nullptr;
  void* allocator_context = nullptr;
  unsigned enable_mask = 0;
  std::uint64_t timeout_ns = 0;
  int zero_copy = 0;
  int overflow_policy = kOverflowTrap;
  unsigned num_topk = 0;
  unsigned char padding[4] = {};
};
static_assert(sizeof(GroupConfig) == 112);
static_assert(offsetof(GroupConfig, timeout_ns) == 88);

struct HandleConfig {
  unsigned size = sizeof(HandleConfig);
  unsigned magic = kMagic;
  std::size_t alignment = 0;  // rows of an expert's block are padded to a multiple of it
};
static_assert(sizeof(HandleConfig) == 16);

struct LayoutInfo {
  unsigned size = sizeof(LayoutInfo);
  unsigned magic = kMagic;
  TensorArgument* expert_counters = nullptr;    // padded rows of each local expert
  TensorArgument* src_rank_counters = nullptr;  // low-latency mode: rows from each rank
  TensorArgument* expert_offsets = nullptr;
  TensorArgument* recv_total_counter = nullptr;  // their sum
  int recv_topk_idx_kind = 0;
  unsigned char padding[4] = {};
};
static_assert(sizeof(LayoutInfo) == 48);

struct DispatchInputs {
  unsigned size = sizeof(DispatchInputs);
  unsigned magic = kMagic;
  TensorArgument* tokens = nullptr;
  TensorArgument* topk_weights = nullptr;
  TensorArgument* scales = nullptr;
};
static_assert(sizeof(DispatchInputs) == 32);

struct DispatchOutputs {
  unsigned size = sizeof(DispatchOutputs);
  unsigned magic = kMagic;
  TensorArgument* tokens = nullptr;
  TensorArgument* topk_weights = nullptr;
  TensorArgument* scales = nullptr;
  TensorArgument* topk_idx = nullptr;
};
static_assert(sizeof(DispatchOutputs) == 40);

struct DispatchConfig {
  unsigned size = sizeof(DispatchConfig);
  unsigned magic = kMagic;
  unsigned send_only = 0;
  unsigned round_scales = 0;
  int direction = kForward;
  int quantization = 0;
};
static_assert(sizeof(DispatchConfig) == 24);

struct CombineInputs {
  unsigned size = sizeof(CombineInputs);
  unsigned magic = kMagic;
  TensorArgument* tokens = nullptr;
  TensorArgument* topk_weights = nullptr;
  TensorArgument* scales = nullptr;
};
static_assert(sizeof(CombineInputs) == 32);

struct CombineOutputs {
  unsigned size = sizeof(CombineOutputs);
  unsigned magic = kMagic;
  TensorArgument* tokens = nullptr;
  TensorArgument* topk_weights = nullptr;
};
static_assert(sizeof(CombineOutputs) == 24);

struct CombineConfig {
  unsigned size = sizeof(CombineConfig);
  unsigned magic = kMagic;
  unsigned send_only = 0;
  int direction = kForward;
  int quantization = 0;
};
static_assert(sizeof(CombineConfig) == 20);

}  // namespace ncclep::nccl_ep
