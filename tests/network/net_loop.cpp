// The test network for NCCL's own messages, beside rma_loop.cpp for puts and over the same link: a
// network plugin, so that engines whose all-to-alls hosts launch can be timed over it.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "net_plugin.h"
#include "nic.h"

std::atomic<std::uint64_t> net_loop_counters[kNumNetCounters];

using namespace rma;

extern "C" Result rma_loop_read_environment();

namespace {

// A sender is given so long, once it is accepted, until the receiver has registered its memory:
// better it is mapped now than when a kernel waits for it.
constexpr u64 kGraceNs = 50'000'000;

std::weak_ptr<Nic> shared_nic;  // of this process
std::mutex nic_mutex;

using Instance = std::shared_ptr<Nic>;

template <class Kind>
struct Owned : Kind {
  Instance nic;

  explicit Owned(Instance nic) : nic(std::move(nic)) {}
  ~Owned() override { nic->remove(*this); }
};

// How NCCL hands a receiver's address to its sender, which keeps the sender there meanwhile.
struct Handle {
  Address listener;
  Owned<Sender>* connecting;
};
static_assert(sizeof(Handle) <= kHandleBytes);

struct Listener {
  Instance nic;
  Post post;
};

Result init(void** instance, u64, void*, void*, void*) {
  if (const Result result = rma_loop_read_environment(); result != kSuccess) return result;
  const Lock lock(nic_mutex);
  Instance nic = shared_nic.lock();
  if (!nic) shared_nic = nic = std::make_shared<Nic>();
  *instance = new Instance(std::move(nic));
  return kSuccess;
}
Result finalize(void* instance) {
  delete static_cast<Instance*>(instance);
  return kSuccess;
}

Result devices(int* count) {
  *count = 1;
  return kSuccess;
}

Result properties(int device, NetProperties* of) {
  static char name[] = "loop";
  *of = {};
  of->name = name;
  of->guid = 1;
  of->memory_types = kHost | kCuda;
  of->speed_mbps = link_.gbps > 0 ? static_cast<int>(8000 * link_.gbps) : 400'000;
  of->max_connections = 65536;
  of->max_receives = 1;
  of->num_virtual = 1;
  of->virtual_devices[0] = device;
  of->max_p2p_bytes = of->max_collective_bytes = std::size_t{1} << 40;
  of->max_multi_request = 1;
  return kSuccess;
}

Result listen(void* instance, int, void* handle, void** made) {
  auto listener = std::make_unique<Listener>(Listener{*static_cast<Instance*>(instance), {}});
  if (!listener->post) return kSystemError;
  *static_cast<Handle*>(handle) = {listener->post.address(), nullptr};
  *made = listener.release();
  return kSuccess;
}

// The sender makes the pipe, and sends its file to the listener.
Result connect(void* instance, int, void* handle, void** made, void**) {
  auto& at = *static_cast<Handle*>(handle);
  *made = nullptr;
  if (at.connecting == nullptr) {
    at.connecting = new Owned<Sender>(*static_cast<Instance*>(instance));
  }
  Owned<Sender>& sender = *at.connecting;
  if (!sender.is_greeted) {
    const File file(memfd_create("net-loop", MFD_CLOEXEC));
    if (file && ftruncate(file.number(), sizeof(Pipe)) == 0) sender.pipe = map_pipe(file);
    if (!sender.pipe || !sender.post) return kSystemError;
    sender.pipe->sender = sender.post.address();
    sender.is_greeted = sender.post.send(at.listener, {}, file);
    if (sender.is_greeted) return kSuccess;
    if (errno != EAGAIN && errno != ENOBUFS) return kSystemError;
    munmap(std::exchange(sender.pipe, nullptr), sizeof(Pipe));
    return kSuccess;
  }
  if (!sender.pipe->is_accepted) return kSuccess;
  if (sender.accepted_ns == 0) sender.accepted_ns = now_ns();
  const bool has_memory = sender.nic->take_letters(sender) > 0;
  if (!has_memory && now_ns() - sender.accepted_ns < kGraceNs) return kSuccess;
  sender.nic->add(sender);
  *made = static_cast<Connection*>(std::exchange(at.connecting, nullptr));
  return kSuccess;
}

Result accept(void* listener, void** made, void**) {
  auto& at = *static_cast<Listener*>(listener);
  *made = nullptr;
  const auto mail = at.post.receive();
  if (!mail) return kSuccess;
  auto receiver = std::make_unique<Owned<Receiver>>(at.nic);
  receiver->pipe = map_pipe(mail->file);
  if (!receiver->pipe || !receiver->post) return kSystemError;
  receiver->pipe->is_accepted = true;
  receiver->nic->add(*receiver);
  *made = static_cast<Connection*>(receiver.release());
  return kSuccess;
}

Result close_listener(void* listener) {
  delete static_cast<Listener*>(listener);
  return kSuccess;
}
Result close_sender(void* sender) {
  delete static_cast<Connection*>(sender);
  return kSuccess;
}
Result close_receiver(void* receiver) { return close_sender(receiver); }

Result add_memory(void* to, void* data, std::size_t size, int type, void** made) {
  auto& connection = *static_cast<Connection*>(to);
  auto memory = std::make_unique<Memory>(Memory{-1, type, static_cast<char*>(data)});
  if (auto* sender = dynamic_cast<Owned<Sender>*>(&connection)) {
    if (type == kCuda && !sender->nic->has_gpu()) return kCudaError;
    sender->nic->take_letters(*sender);
  } else {
    auto& receiver = dynamic_cast<Owned<Receiver>&>(connection);
    if (type == kCuda && !receiver.nic->has_gpu()) return kCudaError;
    Letter letter = {0, receiver.num_memories, size, 0, 0};
    const File file = type == kCuda ? receiver.nic->share(data, size, letter) : File();
    if (receiver.post.send(receiver.pipe->sender, letter, file)) memory->id = letter.region;
    ++receiver.num_memories;
  }
  *made = memory.release();
  return kSuccess;
}
Result add_dmabuf(void*, void*, std::size_t, int, u64, int, void**) { return kInvalidUsage; }
// Its sender keeps it mapped until it is closed: NCCL's buffers live as long as that.
Result remove_memory(void*, void* memory) {
  delete static_cast<Memory*>(memory);
  return kSuccess;
}

Result send(void* sender, void* data, std::size_t size, int, void* memory, void*, void** request) {
  auto& connection = *static_cast<Owned<Sender>*>(static_cast<Connection*>(sender));
  *request = connection.submit(data, size, static_cast<Memory*>(memory)->type);
  if (*request) connection.nic->begin_work();
  return kSuccess;
}

Result receive(void* receiver, int count, void** data, std::size_t* sizes, int*, void** memories,
               void**, void** request) {
  if (count != 1) return kInvalidUsage;
  auto& connection = *static_cast<Owned<Receiver>*>(static_cast<Connection*>(receiver));
  const Memory& memory = *static_cast<Memory*>(memories[0]);
  const u64 number = connection.num_submitted;
  *request = connection.submit(data[0], sizes[0], memory.type);
  if (*request == nullptr) return kSuccess;
  const auto offset = static_cast<u64>(static_cast<char*>(data[0]) - memory.data);
  connection.pipe->offers[number % kMaxWorks] = {memory.id, offset, sizes[0]};
  connection.pipe->num_offers.store(number + 1, std::memory_order_release);
  connection.nic->begin_work();
  return kSuccess;
}

Result flush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;  // what has been received is in its place
  return kSuccess;
}

Result test(void* request, int* is_done, int* sizes) {
  Work& work = *static_cast<Work*>(request);
  if (work.connection->has_failed) return kSystemError;
  *is_done = work.is_done.load(std::memory_order_acquire);
  if (!*is_done) return kSuccess;
  if (sizes) *sizes = static_cast<int>(work.size);
  work.is_used = false;
  return kSuccess;
}

}  // namespace

extern "C" {

[[gnu::visibility("default")]] NetPlugin ncclNetPlugin_v11 = {
    "loop",  init,       devices,      properties,     listen,         connect,
    accept,  add_memory, add_dmabuf,   remove_memory,  send,           receive,
    flush,   test,       close_sender, close_receiver, close_listener, nullptr,
    nullptr, nullptr,    finalize,     nullptr,
};

}  // extern "C"
