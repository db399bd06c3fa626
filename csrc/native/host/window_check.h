// How ranks verify that they reach each other's windows.
//
// With NCCL 2.28 a rank computes the addresses of its peers' windows from a struct that no header
// documents (nccl/window_of_2_28.cpp); and access to a peer's memory may fail where NCCL made a
// window. So whenever windows are made, the device first writes and reads words across all ranks:
// wrong addresses cause an error, never wrong results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "native/host/agreement.h"
#include "nccl/window.h"

namespace ncclep::native {

// A window as one rank addresses it.
struct WindowView {
  const char* name;
  char* own;                 // this rank's memory
  std::size_t num_bytes;     // of each rank's
  std::vector<char*> peers;  // every rank's memory, by rank
  int first_rank = 0;        // of this domain; ranks count from it here
};

// Has every rank write words at both ends of its own windows, verify the others' words in their
// windows, write words there, and verify the others' words in its own.  Collective; throws on all
// ranks with the first wrong word of each.
// `generation` is a different number each time windows are made, so that words of earlier windows
// are not mistaken for these.
void check_windows(const Agreement& agreement, const std::vector<WindowView>& windows, int rank,
                   std::uint64_t generation, const std::string& remedy);

// Opens the windows of `owner`, a Group or a LowLatency, checks and clears them.  Collective.
template <typename Owner>
void open_checked(Owner& owner, Communicator& communicator, const Agreement& agreement,
                  const std::vector<const char*>& names) {
  const Nccl& nccl = communicator.nccl();
  const std::string remedy =
      join_text("use the engine nccl_ep or reference, and report this with NCCL ",
                nccl.version_text(), ", ", nccl.path());
  const std::uint64_t generation = communicator.next_generation();
  agreement.on_all_ranks("opening its windows", [&] { owner.open(); }, remedy);
  std::vector<WindowView> views;
  const int first_rank = communicator.rank_in_domain(0);
  for (const auto& window : owner.windows()) {
    views.push_back({names.at(views.size()), window->address(), window->num_bytes(),
                     window->peers(), first_rank});
  }
  check_windows(agreement, views, communicator.rank() - first_rank, generation, remedy);
  agreement.on_all_ranks("clearing its windows", [&] { owner.clear(); }, remedy);
}

}  // namespace ncclep::native
