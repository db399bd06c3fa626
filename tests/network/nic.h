// The network card of a process: a thread that moves NCCL's messages, over the link of link.h,
// while there are any.
//
// NCCL's buffers on GPUs are mapped by their senders, which copy messages to their place as puts
// are (group.h).  That needs NCCL_CUMEM_ENABLE, which is on by default, NCCL_NET_GDR_LEVEL=SYS and
// NCCL_NET_GDR_READ=1; other messages pass boxes in memory of the host, which is slow.  NCCL cuts
// messages between two ranks into pieces of NCCL_P2P_NET_CHUNKSIZE, 128 KB by default, and has a
// few of them under way for each channel: larger ones leave copies and polling more time.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "connection.h"
#include "gpu.h"
#include "link.h"

// Of this process: messages sent, their bytes, and messages whose bytes went from GPU to GPU.
enum { kSends, kSentBytes, kDirectSends, kNumNetCounters };
extern "C" [[gnu::visibility("default")]] std::atomic<std::uint64_t>
    net_loop_counters[kNumNetCounters];

namespace rma {

// The thread sleeps after so long without a message: to wake it takes longer than a short message.
constexpr u64 kAwakeNs = 20'000'000;

class Nic {
 public:
  Nic() : thread_([this] { run(); }) {}
  Nic(const Nic&) = delete;
  ~Nic() {
    is_ending_ = true;
    begin_work();
    thread_.join();
    if (!gpu_) return;
    gpu_->wait(gpu_->in_stream);
    gpu_->wait(gpu_->out_stream);
    in_batches_.close(gpu_->driver);
    out_batches_.close(gpu_->driver);
    gpu_->leave();
  }

  // The thread waits while another holds this.
  class Hold {
   public:
    explicit Hold(Nic& nic) : nic_(nic) {
      ++nic_.num_holding_;
      nic_.mutex_.lock();
    }
    ~Hold() {
      nic_.mutex_.unlock();
      --nic_.num_holding_;
    }
    Hold(const Hold&) = delete;

   private:
    Nic& nic_;
  };

  void add(Sender& sender) {
    const Hold hold(*this);
    senders_.push_back(&sender);
    sender.has_failed = has_failed_;
  }
  void add(Receiver& receiver) {
    const Hold hold(*this);
    receivers_.push_back(&receiver);
    receiver.has_failed = has_failed_;
  }
  void remove(Sender& sender) {
    const Hold hold(*this);
    std::erase(senders_, &sender);
    settle(sender);
    sender.peers.clear();  // while the driver is here
  }
  void remove(Receiver& receiver) {
    const Hold hold(*this);
    std::erase(receivers_, &receiver);
    settle(receiver);
  }

  // After a message was submitted.
  void begin_work() {
    ++num_works_;
    num_works_.notify_one();
  }

  // A file of memory on a GPU, or none; the GPU's context is current.
  File share(void* data, std::size_t size, Letter& letter) {
    const Hold hold(*this);
    if (!use_gpu() || !gpu_->driver.copy_all || link_.is_staged) return File();
    return export_memory(gpu_->driver, data, size, letter);
  }
  // False: there is none.
  bool has_gpu() {
    const Hold hold(*this);
    return use_gpu();
  }
  // Maps what the receiver has sent; a GPU's context is current.  Returns how much is known.
  std::size_t take_letters(Sender& sender) {
    const Hold hold(*this);
    use_gpu();
    map_letters(sender);
    return sender.peers.size();
  }

 private:
  struct End {
    Connection* connection;
    u64 slots, works;  // of the ring, and of messages, that have been done
  };
  using Ends = std::vector<End>;

  void run() {
    for (u64 moved_ns = now_ns(); !is_ending_ && !has_failed_;) {
      if (num_works_ == 0 && now_ns() - moved_ns > kAwakeNs) num_works_.wait(0);
      while (num_holding_ > 0) sched_yield();
      bool has_moved = false;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        const Leaving leaving{gpu_.get()};
        if (!progress(has_moved)) fail();
      }
      if (has_moved) {
        moved_ns = now_ns();
      } else {
        sched_yield();
      }
    }
  }
  void fail() {
    has_failed_ = true;
    for (Sender* sender : senders_) sender->has_failed = true;
    for (Receiver* receiver : receivers_) receiver->has_failed = true;
  }

  bool use_gpu() {
    if (gpu_) return true;
    auto gpu = Gpu::open();
    const Leaving leaving{gpu.get()};
    if (!gpu || !gpu->enter()) return false;
    if (!in_batches_.open(gpu->driver) || !out_batches_.open(gpu->driver)) return false;
    gpu_ = std::move(gpu);
    return true;
  }
  void map_letters(Sender& sender) {
    while (const auto mail = sender.post.receive()) {
      const Letter& letter = mail->letter;
      sender.peers[letter.region] = gpu_ ? PeerMemory(gpu_->driver, gpu_->device, *mail)
                                         : PeerMemory(nullptr, letter.region_bytes);
    }
  }
  // Nothing of a connection is under way any more.
  void settle(Connection& connection) {
    if (gpu_) {
      gpu_->wait(gpu_->in_stream);
      gpu_->wait(gpu_->out_stream);
    }
    finish(true);
    if (gpu_) gpu_->leave();
    num_works_ -= connection.num_submitted - connection.num_done;
  }

  // Publishes what is complete.
  bool finish(bool asks) {
    const auto tell = [&](const Ends& ends) {
      for (const End& end : ends) {
        end.connection->pipe->ring.tail.store(end.slots, std::memory_order_release);
        set_done(*end.connection, end.works);
      }
    };
    return in_batches_.finish(gpu_.get(), asks, tell) &&
           out_batches_.finish(gpu_.get(), asks, [](const Ends& ends) {
             for (const End& end : ends) {
               end.connection->pipe->ring.head.store(end.slots, std::memory_order_release);
             }
           });
  }
  void set_done(Connection& connection, u64 num_works) {
    for (u64& done = connection.num_done; done < num_works; ++done, --num_works_) {
      connection.works[done % kMaxWorks].is_done.store(true, std::memory_order_release);
    }
  }

  bool progress(bool& has_moved) {
    if (!finish(true) || !receive_all(has_moved) || !send_all(has_moved)) return false;
    for (Sender* sender : senders_) {
      if (!sender->is_busy()) continue;
      const u64 tail = sender->pipe->ring.tail.load(std::memory_order_acquire);
      u64 done = sender->num_done;
      while (done < sender->num_moved && sender->works[done % kMaxWorks].end <= tail) ++done;
      set_done(*sender, done);
    }
    return finish(false);
  }

  // --- sending ---

  enum Sent { kNothing, kPiece, kFailed };

  Sent send_piece(Sender& sender, u64 now, bool& has_copies) {
    Ring& ring = sender.pipe->ring;
    const u64 number = sender.num_moved;
    if (number == sender.num_submitted.load(std::memory_order_acquire)) return kNothing;
    if (number == sender.pipe->num_offers.load(std::memory_order_acquire)) return kNothing;
    const u64 tail = ring.tail.load(std::memory_order_acquire);
    if (sender.sent == tail + kSlots || !is_link_free(now)) return kNothing;
    Work& work = sender.works[number % kMaxWorks];
    const Offer& offer = sender.pipe->offers[number % kMaxWorks];
    if (work.size > offer.size) return kFailed;
    char* place = nullptr;
    if (offer.memory >= 0 && work.size > 0) {
      if (!sender.peers.contains(offer.memory)) map_letters(sender);
      const auto peer = sender.peers.find(offer.memory);
      if (peer == sender.peers.end()) return kNothing;
      const bool is_reached =
          work.type == kCuda && peer->second.data() && peer->second.holds(offer.offset, work.size);
      place = is_reached ? peer->second.data() + offer.offset : nullptr;
    }
    if (place ? copies_.count == CopyList::kMost : !sender.boxes.is_free(tail)) return kNothing;
    Slot& slot = ring.slots[sender.sent % kSlots];
    slot.message.size = work.size;
    slot.box = place ? -1 : sender.boxes.next();
    slot.first = work.sent;
    slot.num_bytes = std::min(place ? kDirectBytes : kBoxBytes, work.size - work.sent);
    const char* const at = work.data + work.sent;
    if (place) {
      copies_.add(place + work.sent, at, slot.num_bytes);
      has_copies = true;
    } else if (slot.num_bytes > 0) {
      if (!fill(ring.boxes[slot.box], at, slot.num_bytes, work.type, gpu_.get())) return kFailed;
      has_copies = has_copies || work.type == kCuda;
    }
    slot.arrives_ns = leave(now, slot.num_bytes);
    ++sender.sent;
    if (!place && slot.num_bytes > 0) sender.boxes.use(sender.sent);
    work.sent += slot.num_bytes;
    if (work.sent == work.size) {
      work.end = sender.sent;
      ++sender.num_moved;
      net_loop_counters[kSends] += 1;
      net_loop_counters[kSentBytes] += work.size;
      net_loop_counters[kDirectSends] += place != nullptr;
    }
    return kPiece;
  }

  // A piece of each in turn, until none can be sent.
  bool send_all(bool& has_moved) {
    if (out_batches_.is_full() || senders_.empty()) return true;
    const u64 now = now_ns();
    Ends& ends = ends_;
    ends.clear();
    bool has_copies = false;
    for (bool has_more = true; has_more;) {
      has_more = false;
      for (std::size_t i = 0; i < senders_.size(); ++i) {
        Sender& sender = *senders_[(first_ + i) % senders_.size()];
        const Sent sent = send_piece(sender, now, has_copies);
        if (sent == kFailed) return false;
        if (sent == kPiece) ends.push_back({&sender, sender.sent, 0});
        has_more = has_more || sent == kPiece;
      }
    }
    if (ends.empty()) return true;
    has_moved = true;
    first_ = (first_ + 1) % senders_.size();
    if (copies_.count > 0 && !copies_.begin(*gpu_)) return false;
    return out_batches_.add(gpu_.get(), has_copies ? gpu_->out_stream : nullptr, ends);
  }

  // --- receiving ---

  bool receive_all(bool& has_moved) {
    if (in_batches_.is_full()) return true;
    Ends& ends = ends_;
    ends.clear();
    bool has_copies = false;
    for (Receiver* receiver : receivers_) {
      const u64 before = receiver->taken;
      if (receiver->is_busy() && !receive(*receiver, has_copies)) return false;
      if (receiver->taken > before) {
        ends.push_back({receiver, receiver->taken, receiver->num_moved});
      }
    }
    if (ends.empty()) return true;
    has_moved = true;
    return in_batches_.add(gpu_.get(), has_copies ? gpu_->in_stream : nullptr, ends);
  }

  // Takes what has arrived out of a ring.
  bool receive(Receiver& receiver, bool& has_copies) {
    Ring& ring = receiver.pipe->ring;
    const u64 head = ring.head.load(std::memory_order_acquire);
    for (u64& arrival = receiver.arrival_ns; receiver.taken < head; ++receiver.taken, arrival = 0) {
      const Slot& slot = ring.slots[receiver.taken % kSlots];
      if (arrival == 0) arrival = arrive(slot.arrives_ns, slot.num_bytes);
      if (now_ns() < arrival) break;
      Work& work = receiver.works[receiver.num_moved % kMaxWorks];
      if (slot.box >= 0 && slot.num_bytes > 0) {
        const char* const box = ring.boxes[slot.box];
        if (!empty(box, work.data + slot.first, slot.num_bytes, work.type, gpu_.get())) {
          return false;
        }
        has_copies = has_copies || work.type == kCuda;
      }
      if (slot.first + slot.num_bytes < slot.message.size) continue;
      work.size = slot.message.size;
      ++receiver.num_moved;
    }
    return true;
  }

  std::mutex mutex_;
  std::atomic<int> num_holding_ = 0;
  std::atomic<u64> num_works_ = 0;  // submitted and not done
  std::atomic<bool> is_ending_ = false;
  bool has_failed_ = false;
  std::vector<Sender*> senders_;
  std::vector<Receiver*> receivers_;
  std::unique_ptr<Gpu> gpu_;
  std::size_t first_ = 0;  // of the senders, next time
  CopyList copies_;
  Ends ends_;
  Batches<Ends> in_batches_, out_batches_;
  std::thread thread_;  // the last: it uses all others
};

}  // namespace rma
