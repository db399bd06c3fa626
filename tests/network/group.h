// The ranks of a group, and how messages go from one to another.
//
// From memory of a GPU to memory of a GPU, the source's progress copies the bytes to their place,
// and the ring in memory of the target only says so.  All others it copies into the ring, 256 KB at
// a time, and the target's progress copies them to their place.  There the message arrives when
// links let it, after its source's copy, and then the target adds the signal.  Messages of one pair
// arrive in order.  link.h says how links are slowed down and broken.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu.h"
#include "link.h"
#include "peer_memory.h"
#include "post.h"
#include "ring.h"

// What this process has put (messages, bytes, and those bytes that went from GPU to GPU), the bytes
// that have come, and the messages that were refused here because they would have left registered
// memory.
enum { kPuts, kBytes, kDirect, kBytesIn, kRefused, kNumCounters };
extern "C" [[gnu::visibility("default")]] std::atomic<std::uint64_t>
    rma_loop_counters[kNumCounters];

namespace rma {

// Sent to one target at once over the ring: the target gets none of them earlier.
constexpr int kBoxesAtOnce = 2;
// In which all ranks of a group add a region.
constexpr u64 kRegionNs = 20'000'000'000;
// Far longer than what a benchmark leaves between two messages.
constexpr u64 kBusyNs = 5'000'000;

struct Handle {
  int process, file;
  Address post;
};
static_assert(sizeof(Handle) <= kHandleBytes);

using Ends = std::array<u64, kMaxRanks>;  // of what each pair's ring holds, by rank

// What a rank has registered.
struct Region {
  int id, type;
  char* data;
  std::size_t size;
  bool is_never_reset;
  std::vector<u64> signals;       // of a GPU's memory that is never reset: the values
  std::vector<PeerMemory> peers;  // all ranks' regions of this number

  bool holds(u64 offset, u64 num_bytes) const {
    return num_bytes <= size && offset <= size - num_bytes;
  }
};

// What it has been asked to put.
struct Request {
  Message message;
  u64 number;  // of this process's puts, from 1
  int target, from;
  u64 from_offset, sent, end;  // end: in the ring; 0: not all is sent
  bool is_lost;
};

// The functions for puts are called by one thread, those for regions by any.
struct Group {
  const int rank, num_ranks;
  Ring* in = nullptr;      // by source
  std::vector<Ring*> out;  // by target
  Post post;
  std::vector<Address> posts;  // by rank
  std::vector<std::unique_ptr<Region>> regions;
  bool is_refused = false, has_failed = false;
  std::mutex mutex;  // of what follows, and of regions

  Group(int rank, int num_ranks, Post post)
      : rank(rank), num_ranks(num_ranks), post(std::move(post)), waiting_(num_ranks) {}
  Group(const Group&) = delete;
  ~Group() {
    if (gpu_) {
      gpu_->wait(gpu_->in_stream);
      gpu_->wait(gpu_->out_stream);
    }
    regions.clear();
    for (Ring* ring : out) unmap(ring, 1);
    if (in) unmap(in, num_ranks);
    if (gpu_) {
      in_batches_.close(gpu_->driver);
      out_batches_.close(gpu_->driver);
      gpu_->leave();
    }
  }

  // Null: that failed.  Collective, and in the same order on all ranks.
  Region* add_region(void* data, std::size_t size, int type, bool is_never_reset) {
    Region* region;
    {
      const Lock lock(mutex);
      if (type == kCuda && !use_gpu()) return nullptr;
      const int id = static_cast<int>(regions.size());
      regions.emplace_back(
          new Region{id, type, static_cast<char*>(data), size, is_never_reset, {}, {}});
      region = regions.back().get();
    }
    // Not under the lock: others may come only when what is on its way has arrived.
    Letter letter = {rank, region->id, size, 0, 0};
    File file;
    if (type == kCuda && goes_directly(*region)) {
      file = export_memory(gpu_->driver, data, size, letter);
    }
    const auto mail = post.exchange(posts, letter, file, kRegionNs);
    std::vector<PeerMemory> peers(num_ranks);
    for (int r = 0; r < num_ranks; ++r) {
      if (mail[r] && type == kCuda) {
        peers[r] = PeerMemory(gpu_->driver, gpu_->device, *mail[r]);
      } else if (mail[r]) {
        peers[r] = PeerMemory(nullptr, mail[r]->letter.region_bytes);
      }
    }
    peers[rank] = PeerMemory(file ? data : nullptr, size);
    const Lock lock(mutex);
    region->peers = std::move(peers);
    return region;
  }

  void remove_region(Region& region) {
    const Lock lock(mutex);
    region.size = 0;  // its place in the order stays
    if (region.id < kMaxRegions) {
      for (int source = 0; source < num_ranks; ++source) in[source].is_removed[region.id] = true;
    }
    if (gpu_ && !out_batches_.is_empty()) gpu_->wait(gpu_->out_stream);
    if (gpu_) gpu_->leave();
    region.peers.clear();
  }

  // Null unless memory is registered there.
  Region* find(int id, u64 offset, u64 size) const {
    Region* region = 0 <= id && id < static_cast<int>(regions.size()) ? regions[id].get() : nullptr;
    return region && region->holds(offset, size) ? region : nullptr;
  }

  Request* add_request() {
    if (free_.empty()) {
      requests_.push_back(std::make_unique<Request>());
      free_.push_back(requests_.back().get());
    }
    Request* request = free_.back();
    free_.pop_back();
    *request = {};
    return request;
  }
  void end_request(Request* request) { free_.push_back(request); }
  void send_later(Request* request) { waiting_[request->target].push_back(request); }

  // Nothing arrives here or leaves.
  bool is_silent() {
    const bool now = link_.has_begun(kSilent, rma_loop_counters[kPuts]);
    for (int r = 0; now != was_silent_ && r < num_ranks; ++r) in[r].is_silent = now;
    return was_silent_ = now;
  }

  // Receives and sends what can be.
  bool progress() {
    const Leaving leaving{gpu_.get()};
    return finish(true) && receive() && send() && finish(false);
  }

  // Nothing has come or gone for so long that the next message is in no hurry.
  bool is_resting() const { return now_ns() - moved_ns_ > kBusyNs; }

 private:
  // Before the first memory of a GPU.
  bool use_gpu() {
    if (gpu_) return true;
    auto gpu = Gpu::open();
    if (!gpu) return false;
    const Leaving leaving{gpu.get()};
    bool is_ready = gpu->enter() && in_batches_.open(gpu->driver) &&
                    out_batches_.open(gpu->driver) &&
                    Driver::ok(gpu->driver.pin(in, num_ranks * sizeof(Ring), 1), "pinning");
    for (Ring* ring : out) {
      is_ready = is_ready && Driver::ok(gpu->driver.pin(ring, sizeof(Ring), 1), "pinning");
    }
    if (is_ready) gpu_ = std::move(gpu);
    return is_ready;
  }
  void unmap(Ring* rings, int count) {
    if (gpu_) gpu_->driver.unpin(rings);
    munmap(rings, count * sizeof(Ring));
  }
  bool goes_directly(const Region& region) const {
    return region.id < kMaxRegions && gpu_->driver.copy_all && !link_.is_staged;
  }

  // --- sending ---

  // A peer's region that has these bytes; null: there is none.
  const PeerMemory* find_peer(int target, int id, u64 offset, u64 size) const {
    if (id < 0 || id >= static_cast<int>(regions.size()) || id >= kMaxRegions) return nullptr;
    if (regions[id]->peers.empty() || out[target]->is_removed[id]) return nullptr;
    const PeerMemory& peer = regions[id]->peers[target];
    return peer.holds(offset, size) ? &peer : nullptr;
  }

  // Where the peer's memory is reached here; null: bytes go over the ring.  There go messages that
  // the target refuses, and late ones, whose bytes are late, too.
  char* place_of(const Request& request) const {
    const Message& message = request.message;
    const int target = request.target;
    const Region* from = find(request.from, request.from_offset, message.size);
    if (message.size == 0 || !from || from->type != kCuda) return nullptr;
    if (link_.is(kDelay, request.number) || out[target]->is_silent) return nullptr;
    const bool is_right =
        message.signals < 0 || (message.signal_offset % 8 == 0 &&
                                find_peer(target, message.signals, message.signal_offset, 8));
    const PeerMemory* to = find_peer(target, message.to, message.to_offset, message.size);
    return is_right && to && to->data() ? to->data() + message.to_offset : nullptr;
  }

  enum Sent { kNothing, kPiece, kFailed };

  // Begins to send the next piece of what waits for `target`.
  Sent send_piece(int target, int round, u64 now, bool& has_copies) {
    Ring& ring = *out[target];
    if (waiting_[target].empty()) return kNothing;
    const u64 tail = ring.tail.load(std::memory_order_acquire);
    if (sent_[target] == tail + kSlots) return kNothing;
    Request& request = *waiting_[target].front();
    if (link_.has_begun(kStop, request.number) || !is_link_free(now)) return kNothing;
    char* const place = place_of(request);
    if (place ? copies_.count == CopyList::kMost : round >= kBoxesAtOnce) return kNothing;
    Boxes& boxes = boxes_[target];
    if (!place && !boxes.is_free(tail)) return kNothing;
    Slot& slot = ring.slots[sent_[target] % kSlots];
    slot.message = request.message;
    slot.box = place ? -1 : boxes.next();
    slot.first = request.sent;
    slot.num_bytes = std::min(place ? kDirectBytes : kBoxBytes, request.message.size - slot.first);
    if (slot.num_bytes > 0) {
      const u64 offset = request.from_offset + slot.first;
      const Region* from = find(request.from, offset, slot.num_bytes);
      if (!from) return kFailed;
      const char* const at = from->data + offset;
      has_copies = has_copies || from->type == kCuda;
      if (place) {
        copies_.add(place + slot.first, at, slot.num_bytes);
        rma_loop_counters[kDirect] += slot.num_bytes;
      } else if (!fill(ring.boxes[slot.box], at, slot.num_bytes, from->type, gpu_.get())) {
        return kFailed;
      }
    }
    slot.arrives_ns = leave(now, slot.num_bytes);
    if (link_.is(kDelay, request.number)) slot.arrives_ns += link_.delay_ms * 1'000'000;
    ++sent_[target];
    if (!place && slot.num_bytes > 0) boxes.use(sent_[target]);
    request.sent += slot.num_bytes;
    if (request.sent == request.message.size) {
      request.end = sent_[target];
      waiting_[target].pop_front();
    }
    return kPiece;
  }

  // A piece to each target in turn, until none can be sent.
  bool send() {
    if (out_batches_.is_full()) return true;
    const u64 now = now_ns();
    bool has_any = false, has_copies = false, has_more = true;
    for (int round = 0; has_more; ++round) {
      has_more = false;
      for (int i = 0; i < num_ranks; ++i) {
        const int target = (first_target_ + i) % num_ranks;
        const Sent sent = send_piece(target, round, now, has_copies);
        if (sent == kFailed) return false;
        has_more = has_more || sent == kPiece;
      }
      has_any = has_any || has_more;
    }
    if (!has_any) return true;
    moved_ns_ = now;
    first_target_ = (first_target_ + 1) % num_ranks;
    if (copies_.count > 0 && !copies_.begin(*gpu_)) return false;
    return out_batches_.add(gpu_.get(), has_copies ? gpu_->out_stream : nullptr, sent_);
  }

  // --- receiving ---

  bool add_signal(Ring& ring, Region& signals, u64 offset, u64 value, bool has_copies) {
    if (signals.type == kHost) {
      if (has_copies && !gpu_->wait(gpu_->in_stream)) return false;
      __atomic_fetch_add(reinterpret_cast<u64*>(signals.data + offset), value, __ATOMIC_RELEASE);
      return true;
    }
    const auto at = reinterpret_cast<u64>(signals.data + offset);
    const Driver& driver = gpu_->driver;
    void* const stream = gpu_->in_stream;  // behind what has come before
    if (!gpu_->enter()) return false;
    if (signals.is_never_reset) {
      signals.signals.resize(signals.size / 8);
      value = signals.signals[offset / 8] += value;
      if (gpu_->writes_values) {
        return Driver::ok(driver.write_value(stream, at, value, 0), "cuStreamWriteValue64");
      }
      ring.word = value;
    } else {
      const bool is_read = driver.to_host(&ring.word, at, 8, stream) == 0 && gpu_->wait(stream);
      if (!Driver::ok(!is_read, "reading a signal")) return false;
      ring.word += value;
    }
    const bool is_written = driver.to_device(at, &ring.word, 8, stream) == 0;
    return Driver::ok(!is_written, "writing a signal") && gpu_->wait(stream);
  }

  bool deliver(Ring& ring, const Slot& slot, bool& has_copies) {
    const Message& message = slot.message;
    Region* to = find(message.to, message.to_offset, message.size);
    Region* signals = find(message.signals, message.signal_offset, 8);
    const bool is_right = signals && message.signal_offset % 8 == 0;
    const bool is_last = slot.first + slot.num_bytes == message.size;
    if ((message.size > 0 && !to) || (message.signals >= 0 && !is_right)) {
      rma_loop_counters[kRefused] += is_last;
      ring.is_refused = is_refused = true;
      return true;
    }
    rma_loop_counters[kBytesIn] += slot.num_bytes;
    if (slot.num_bytes > 0 && slot.box >= 0) {
      char* const at = to->data + message.to_offset + slot.first;
      if (!empty(ring.boxes[slot.box], at, slot.num_bytes, to->type, gpu_.get())) return false;
      has_copies = has_copies || to->type == kCuda;
    }
    if (!signals || !is_last) return true;
    return add_signal(ring, *signals, message.signal_offset, message.value,
                      has_copies || !in_batches_.is_empty());
  }

  // Takes what has arrived out of the rings.
  bool receive() {
    if (in_batches_.is_full()) return true;
    bool has_any = false, has_copies = false;
    for (int source = 0; source < num_ranks; ++source) {
      Ring& ring = in[source];
      u64& taken = taken_[source];
      const u64 head = ring.head.load(std::memory_order_acquire);
      for (u64& arrival = arrival_ns_[source]; taken < head; ++taken, arrival = 0) {
        const Slot& slot = ring.slots[taken % kSlots];
        if (arrival == 0) arrival = arrive(slot.arrives_ns, slot.num_bytes);
        if (now_ns() < arrival) break;
        if (!deliver(ring, slot, has_copies)) return false;
        has_any = true;
      }
    }
    if (!has_any) return true;
    moved_ns_ = now_ns();
    return in_batches_.add(gpu_.get(), has_copies ? gpu_->in_stream : nullptr, taken_);
  }

  // Lets peers know of what has been done.
  bool finish(bool asks) {
    return out_batches_.finish(gpu_.get(), asks, [&](const Ends& ends) {
      for (int r = 0; r < num_ranks; ++r) out[r]->head.store(ends[r], std::memory_order_release);
    }) && in_batches_.finish(gpu_.get(), asks, [&](const Ends& ends) {
      for (int r = 0; r < num_ranks; ++r) in[r].tail.store(ends[r], std::memory_order_release);
    });
  }

  std::unique_ptr<Gpu> gpu_;
  std::vector<std::deque<Request*>> waiting_;  // by target
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<Request*> free_;
  int first_target_ = 0;
  u64 moved_ns_ = 0;
  bool was_silent_ = false;
  CopyList copies_;
  Batches<Ends> out_batches_, in_batches_;
  Ends sent_{}, taken_{}, arrival_ns_{};  // by rank; arrival: of the next slot; 0: unknown
  std::array<Boxes, kMaxRanks> boxes_;    // by target
};

}  // namespace rma
