// Version 14 of NCCL's interface for RMA plugins (NCCL 2.30.7), in declarations of our own: what a
// library under NCCL_RMA_PLUGIN offers so that kernels' puts reach other hosts through a CPU
// thread.
#pragma once

#include "plugin.h"

namespace rma {

enum SignalOp { kIncrement = 1, kAdd = 2 };
// Flag of memory for signals that nobody but the plugin writes.
constexpr u64 kNeverReset = 2;
constexpr int kProxyDevice = 2;

struct Properties {
  char *name, *pci_path;
  u64 guid;
  int memory_types, registration_is_global, flushes, speed_mbps, port;
  float latency;
  int max_groups, max_receives, device_type, device_version, num_virtual, virtual_devices[8];
  std::size_t max_p2p_bytes, max_collective_bytes;
  int max_multi_request;
  std::int16_t rail, plane;
};

struct Plugin {
  const char* name;
  Result (*init)(void** instance, u64 communicator, void* log);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(void* instance, int device, void* handle, void** listener);
  Result (*connect)(void* instance, void* handles[], int num_ranks, int rank, void* listener,
                    void** group);
  Result (*create_context)(void* group, void* options, void** context);
  // In the same order on all ranks of a group.
  Result (*add_region)(void* group, void* data, std::size_t, int type, u64 flags, void** region);
  Result (*add_dmabuf)(void* group, void* data, std::size_t, int type, u64 offset, int file,
                       u64 flags, void** region);
  Result (*remove_region)(void* group, void* region);
  Result (*destroy_context)(void* context);
  Result (*close_group)(void* group);
  Result (*close_listener)(void* listener);
  Result (*put)(void* context, int index, u64 from_offset, void* from, std::size_t, u64 to_offset,
                void* to, u32 rank, void** request);
  Result (*put_signal)(void* context, int index, u64 from_offset, void* from, std::size_t,
                       u64 to_offset, void* to, u32 rank, u64 signal_offset, void* signals,
                       u64 value, u32 op, bool is_strong, void** request);
  Result (*get)(void* context, int index, u64 remote_offset, void* remote, std::size_t,
                u64 local_offset, void* local, u32 rank, void** request);
  Result (*flush)(void* context, int index, void* region, u32 rank, void** request);
  Result (*test)(void* group, void* request, int* is_done);
  Result (*progress)(void* context);
  Result (*last_error)(void* context, bool* has_error);
  Result (*finalize)(void* instance);
};

}  // namespace rma
