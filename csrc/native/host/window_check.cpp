#include "native/host/window_check.h"

#include <cstdio>

#include "common/error.h"
#include "native/device/window_probe.h"

namespace ncclep::native {

namespace {

constexpr std::size_t kWordBytes = 8;

// The place of a word: in the writer's own window, for the reader to fetch, or in the reader's
// window, where the writer stored it.
enum class Side { kLeft, kBrought };

// A word that one rank writes for another, at one end of a window.
struct Probe {
  const char* window;
  const char* end;
  int peer;  // rank of the other one, or this one: kernels use their own address too
  std::uintptr_t address;
  std::uint64_t value;  // different for each writer, reader, place and generation
};

// Mixes a number into a hash (the finaliser of SplitMix64).
std::uint64_t mixed(std::uint64_t hash, std::uint64_t number) {
  hash += number + 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebu;
  return hash ^ hash >> 31;
}

// The words of one side that this rank writes or reads.
//
// Each end of a window has 2 R words: the window's own rank writes the first R, one for each
// reader; each writer r writes one of the last R.  The very last is the window's last 8 bytes.
std::vector<Probe> probes_of(const std::vector<WindowView>& windows, int rank,
                             std::uint64_t generation, Side side, bool writes) {
  const bool in_peers_window = (side == Side::kLeft) != writes;
  std::vector<Probe> probes;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const WindowView& window = windows[w];
    const std::size_t size = window.peers.size();
    for (const bool at_end : {false, true}) {
      const std::size_t start = at_end ? window.num_bytes - 2 * size * kWordBytes : 0;
      for (std::size_t peer = 0; peer < size; ++peer) {
        const std::size_t writer = writes ? rank : peer, reader = writes ? peer : rank;
        const std::size_t word = side == Side::kLeft ? reader : size + writer;
        const char* base = in_peers_window ? window.peers[peer] : window.own;
        std::uint64_t value = generation;
        for (const std::uint64_t number :
             {std::uint64_t{w}, std::uint64_t{at_end}, static_cast<std::uint64_t>(side),
              std::uint64_t{writer}, std::uint64_t{reader}}) {
          value = mixed(value, number);
        }
        probes.push_back(
            {window.name, at_end ? "end" : "start", window.first_rank + static_cast<int>(peer),
             reinterpret_cast<std::uintptr_t>(base) + start + word * kWordBytes, value});
      }
    }
  }
  return probes;
}

std::vector<std::uintptr_t> addresses_of(const std::vector<Probe>& probes) {
  std::vector<std::uintptr_t> addresses;
  for (const Probe& probe : probes) addresses.push_back(probe.address);
  return addresses;
}

void store(const std::vector<Probe>& probes) {
  std::vector<std::uint64_t> values;
  for (const Probe& probe : probes) values.push_back(probe.value);
  store_words(addresses_of(probes), values);
}

std::string hex(std::uint64_t number) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%016llx", static_cast<unsigned long long>(number));
  return text;
}

// Reads words; says what is wrong with the first unexpected one.
std::string difference(const std::vector<Probe>& probes, Side side) {
  const std::vector<std::uint64_t> found = load_words(addresses_of(probes));
  std::size_t first = probes.size(), num_wrong = 0;
  for (std::size_t i = probes.size(); i-- > 0;) {
    if (found[i] == probes[i].value) continue;
    first = i;
    ++num_wrong;
  }
  if (num_wrong == 0) return "";
  const Probe& probe = probes[first];
  const std::string where =
      side == Side::kLeft
          ? join_text("reads ", hex(found[first]), " from the ", probe.end, " of the ",
                      probe.window, " window of rank ", probe.peer)
          : join_text("finds ", hex(found[first]), " where rank ", probe.peer, " wrote to the ",
                      probe.end, " of its ", probe.window, " window");
  return join_text("it ", where, ", at ", hex(probe.address), ", and not ", hex(probe.value), " (",
                   num_wrong, " of ", probes.size(), " words are wrong)");
}

}  // namespace

void check_windows(const Agreement& agreement, const std::vector<WindowView>& windows, int rank,
                   std::uint64_t generation, const std::string& remedy) {
  const auto probes = [&](Side side, bool writes) {
    return probes_of(windows, rank, generation, side, writes);
  };
  const auto write_own = [&] { store(probes(Side::kLeft, true)); };
  const auto verify_peers_and_write = [&] {
    const std::string problem = difference(probes(Side::kLeft, false), Side::kLeft);
    store(probes(Side::kBrought, true));  // which the others verify even then
    ensure(problem.empty(), problem);
  };
  const auto verify_own = [&] {
    const std::string problem = difference(probes(Side::kBrought, false), Side::kBrought);
    ensure(problem.empty(), problem);
  };
  agreement.on_all_ranks("writing to its windows", write_own, remedy);
  agreement.on_all_ranks("checking its windows", verify_peers_and_write, remedy);
  agreement.on_all_ranks("checking its windows", verify_own, remedy);
}

}  // namespace ncclep::native
