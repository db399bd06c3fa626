#include "network.h"

#include <algorithm>
#include <utility>

namespace emu {

constexpr int kSmsOfRank = 8;  // CTAs before that of the network (visibility.cpp)

Network::Network(int num_ranks, int local_ranks, int num_signals)
    : num_ranks_(num_ranks),
      local_ranks_(local_ranks),
      windows_(num_ranks),
      signals_(num_ranks, std::vector<std::uint64_t>(num_signals, 0)),
      puts_(num_ranks * num_ranks),
      num_put_(num_ranks * num_ranks, 0) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    Fiber& fiber = fibers_.emplace_back();
    fiber.cta.reset(new Cta{rank, kSmsOfRank, kSmsOfRank + 1, {}, {}, Barrier(1), {}, {}});
    fiber.rank = rank;
    fiber.cta->fibers.push_back(&fiber);
  }
  network = this;
}

Network::~Network() { network = nullptr; }

void Network::add_window(int rank, char* memory, std::size_t num_bytes) {
  windows_[rank].push_back({memory, num_bytes});
}

void Network::put(int rank, int window, int domain, std::size_t to, std::size_t from,
                  std::size_t num_bytes, int signal) {
  const int target = peer_of(rank, domain);
  EMU_REQUIRE(0 <= domain && target < num_ranks_ && target != rank);
  const Window &source = windows_[rank].at(window), &there = windows_[target].at(window);
  EMU_REQUIRE(from + num_bytes <= source.num_bytes && to + num_bytes <= there.num_bytes);
  EMU_REQUIRE(signal < static_cast<int>(signals_[target].size()));
  std::deque<Put>& puts = between(rank, target);
  if (static_cast<int>(puts.size()) >= queue_places) {
    fail("a put waits without an end: the queue is full");
  }
  Put put{there.memory + to,
          std::vector<char>(num_bytes),
          source.memory + from,
          self().view.seen,
          signal,
          draw(8) == 0 ? draw(400) : 0};
  const int pair = rank * num_ranks_ + target;
  if (puts.empty()) busy_.insert(std::lower_bound(busy_.begin(), busy_.end(), pair), pair);
  puts.push_back(std::move(put));
  ++num_put_[pair];
  note_progress();
  maybe_yield();
}

std::uint64_t Network::places_taken(int rank, int domain) {
  return num_put_[rank * num_ranks_ + peer_of(rank, domain)];
}

std::uint64_t Network::room_up_to(int rank, int domain, std::uint64_t end) {
  const auto& puts = between(rank, peer_of(rank, domain));
  const std::uint64_t room = places_taken(rank, domain) - puts.size() + queue_places;
  if (room < end && draw(8) == 0) get_further();
  room < end ? yield() : maybe_yield();
  return room;
}

void Network::stop(int rank, int domain, std::function<bool()> is_over) {
  stopped_ = rank * num_ranks_ + peer_of(rank, domain);
  is_stop_over_ = std::move(is_over);
}

const std::uint64_t* Network::look_at(int rank, int signal) {
  if (!is_measuring && draw(8) == 0) get_further();
  return &signals_[rank][signal];
}

void Network::get_further() {
  if (stopped_ >= 0 && is_stop_over_()) stopped_ = -1;
  const auto stopped = std::find(busy_.begin(), busy_.end(), stopped_);
  const std::size_t number = busy_.size() - (stopped != busy_.end());
  if (number == 0) return;
  auto drawn = busy_.begin() + draw(number);
  drawn += drawn >= stopped;
  const int pair = *drawn, target = pair % num_ranks_;
  std::deque<Put>& puts = puts_[pair];
  note_progress();
  run_as(fibers_[target], [&] {
    if (puts.front().has_arrived) {
      const int signal = puts.front().signal;
      puts.pop_front();
      if (puts.empty()) busy_.erase(drawn);
      if (signal < 0) return;
      std::uint64_t& word = signals_[target][signal];
      fence_proxy();
      release(kSystem);
      note_write(&word, kSystem, true);
      ++word;
      return;
    }
    Put& put = puts[draw(puts.size())];
    if (put.delay > 0) {
      --put.delay;
      return;
    }
    if (!put.is_read) load(put.bytes.data(), put.from, put.bytes.size(), put.seen, true);
    put.is_read = true;
    if (put.has_arrived || draw(2) == 0) return;
    store_in_bulk(put.to, put.bytes);
    put.has_arrived = true;
    if (draw(2) == 0) give_some();
  });
}

bool Network::is_at_rest() const {
  return std::all_of(busy_.begin(), busy_.end(), [this](int pair) { return pair == stopped_; });
}

bool Network::has_bytes_on_the_way(int rank) const {
  const auto has_bytes = [](const Put& put) { return !put.bytes.empty(); };
  return std::any_of(busy_.begin(), busy_.end(), [&](int pair) {
    if (pair / num_ranks_ != rank && pair % num_ranks_ != rank) return false;
    return std::any_of(puts_[pair].begin(), puts_[pair].end(), has_bytes);
  });
}

}  // namespace emu
