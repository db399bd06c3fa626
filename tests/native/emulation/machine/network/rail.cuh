// csrc/network/rail.cuh on the emulator.
#pragma once

#include "common/order.cuh"
#include "network.h"

namespace ncclep::network {

struct Rail {
  emu::Network* network;
  int rank, first_window = 0;
};

inline int queue_of(const Rail&, int domain) { return domain; }
inline std::uint64_t places_of(const Rail&, std::size_t, bool) { return 1; }
inline std::uint64_t places_taken(const Rail& rail, int domain) {
  return rail.network->places_taken(rail.rank, domain);
}
inline std::uint64_t room_up_to(const Rail& rail, int domain, std::uint64_t end) {
  return rail.network->room_up_to(rail.rank, domain, end);
}

constexpr int kNoSignal = -1;
inline void put(const Rail& rail, int window, int domain, std::size_t to, std::size_t from,
                std::size_t num_bytes, int signal) {
  fence_system();
  rail.network->put(rail.rank, rail.first_window + window, domain, to, from, num_bytes, signal);
}
inline std::uint64_t read_signal(const Rail& rail, int signal) {
  const std::uint64_t* word = rail.network->look_at(rail.rank, signal);
  return load_acquire(word);
}

}  // namespace ncclep::network
