// Version 11 of NCCL's interface for network plugins (NCCL 2.28 and newer), in declarations of our
// own: what a library under NCCL_NET_PLUGIN offers so that NCCL's sends and receives reach other
// hosts.
#pragma once

#include <cstdint>

#include "plugin.h"

namespace rma {

struct NetProperties {
  char *name, *pci_path;
  u64 guid;
  int memory_types, registration_is_global, flushes, speed_mbps, port;
  float latency;
  int max_connections, max_receives, device_type, device_version, num_virtual, virtual_devices[4];
  std::size_t max_p2p_bytes, max_collective_bytes;
  int max_multi_request;
};

// A connection goes one way.  Where a function makes one or a request, null: not yet, ask again.
struct NetPlugin {
  const char* name;
  Result (*init)(void** instance, u64 communicator, void* options, void* log, void* profile);
  Result (*devices)(int* count);
  Result (*properties)(int device, NetProperties*);
  Result (*listen)(void* instance, int device, void* handle, void** listener);
  Result (*connect)(void* instance, int device, void* handle, void** sender, void** device_handle);
  Result (*accept)(void* listener, void** receiver, void** device_handle);
  Result (*add_memory)(void* connection, void* data, std::size_t, int type, void** memory);
  Result (*add_dmabuf)(void* connection, void* data, std::size_t, int type, u64 offset, int file,
                       void** memory);
  Result (*remove_memory)(void* connection, void* memory);
  Result (*send)(void* sender, void* data, std::size_t, int tag, void* memory, void* profile,
                 void** request);
  Result (*receive)(void* receiver, int count, void** data, std::size_t* sizes, int* tags,
                    void** memory, void** profile, void** request);
  Result (*flush)(void* receiver, int count, void** data, int* sizes, void** memory,
                  void** request);
  Result (*test)(void* request, int* is_done, int* sizes);
  Result (*close_sender)(void* sender);
  Result (*close_receiver)(void* receiver);
  Result (*close_listener)(void* listener);
  Result (*device_memory)(void* connection, void* memory, void** on_device);
  Result (*received_on_device)(void* receiver, int count, void* request);
  Result (*make_device)(int* device, void* properties);
  Result (*finalize)(void* instance);
  Result (*set_attributes)(void* instance, void* attributes);
};

}  // namespace rma
