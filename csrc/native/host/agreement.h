// Steps that each rank takes alone, and whose failure must reach all ranks: if a rank just threw,
// the others would wait for it in the next collective call, and never learn why it is missing.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace ncclep::native {

// Gathers `num_bytes` bytes of every rank into `all`, by rank, on the hosts.  Collective; `what`
// names the step in errors.  Throws when a rank does not come.
using AllGather =
    std::function<void(const void* mine, std::size_t num_bytes, void* all, const char* what)>;

class Agreement {
 public:
  // `cause`: why the steps are taken, for errors.
  Agreement(AllGather all_gather, int num_ranks, std::string cause)
      : all_gather_(std::move(all_gather)), num_ranks_(num_ranks), cause_(std::move(cause)) {}

  // The ranks' problems in one text, the same on every rank; empty when no rank has one.  A problem
  // that all ranks have appears once.  Collective.
  std::string gather_problems(const std::string& problem, const char* what) const;

  // Takes a step, which may throw; throws on all ranks unless it succeeded on all of them.
  // Collective.
  void on_all_ranks(const char* what, const std::function<void()>& step,
                    const std::string& remedy) const;

 private:
  AllGather all_gather_;
  int num_ranks_;
  std::string cause_;
};

}  // namespace ncclep::native
