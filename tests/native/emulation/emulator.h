// Runs kernels on a CPU, to see whether ranks, CTAs and warps wait for each other as they should.
//
// Every thread of every CTA of every rank is a fiber, and so is every rank's host.  One of them
// runs at a time, up to a point where others could come in between: a load or store that other
// ranks see, an atomic, a barrier.  Which one goes on is drawn at random, and for a while some are
// held back. Asynchronous copies happen at a random moment between their start and the wait for
// them.
//
// What it does not show is the order in which a GPU's memory accesses become visible.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace emu {

constexpr int kWarpSize = 32;

struct Fiber;

// A number from 0 to `bound` - 1.
unsigned draw(unsigned bound);
void seed(unsigned number);
inline int between(int least, int most) { return least + static_cast<int>(draw(most - least + 1)); }
template <typename T>
T one_of(std::initializer_list<T> values) {
  return values.begin()[draw(values.size())];
}

// Ends the process with a text that says where.
[[noreturn]] void fail(const std::string& text);
#define EMU_REQUIRE(condition)                                                          \
  do {                                                                                  \
    if (!(condition)) emu::fail(std::string(__func__) + " does not hold: " #condition); \
  } while (false)

// --- what runs -----------------------------------------------------------------------------------

// Lets `size` fibers through when all have come.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  // Whether all of them voted so.
  bool wait(bool vote = true);

 private:
  int size_, arrived_ = 0;
  bool all_ = true, result_ = true;
  std::vector<Fiber*> waiting_;
};

struct Warp {
  Barrier barrier{kWarpSize};
  long values[kWarpSize];
};

struct Cta {
  int rank, index, grid;
  std::vector<char> dynamic;                       // shared memory, aligned by `dynamic_shared`
  std::map<int, std::unique_ptr<char[]>> statics;  // by declaration
  Barrier barrier;
  std::vector<Warp> warps;
};

// A copy between memories that is under way.
struct Copy {
  char* to;
  const char* from;
  int bytes;
  std::vector<char> read = {};
  bool is_read = false, is_written = false;

  void do_read();
  void do_write();
};
using Copies = std::vector<Copy>;

struct Fiber {
  // Of a device's thread; a host has no CTA.
  std::shared_ptr<Cta> cta;
  int rank = 0, thread = 0;
  // Groups of copies, the oldest first, and the one that is not committed.
  std::deque<Copies> stores, loads;
  Copies open_stores, open_loads;

  std::function<void()> body;
  std::unique_ptr<char[]> stack;
  jmp_buf where;
  bool is_started = false;
};

// The fiber that runs.
Fiber& self();
inline Warp& warp() { return self().cta->warps[self().thread / kWarpSize]; }
inline int lane() { return self().thread % kWarpSize; }

// Lets another fiber run; this one stays runnable.
void yield();
// Lets another one run, or lets a copy under way get further, now and then.
void maybe_yield();
// Something happened that others may be waiting for: there is no deadlock yet.
void note_progress();

// Starts a kernel on `rank`, whose last one must be over.
void launch(int rank, int ctas, int threads, std::size_t shared_bytes,
            std::function<void()> kernel);
// The same as CUDA has it; a stream is the number of a rank.
template <typename... Parameters>
void start(void (*kernel)(Parameters...), int ctas, int threads, std::size_t shared_bytes,
           std::uintptr_t stream, Parameters... parameters) {
  launch(static_cast<int>(stream), ctas, threads, shared_bytes, [=] { kernel(parameters...); });
}
// Waits, on a rank's host, until its kernel is over.
void synchronize(int rank);
// Runs a host on each rank, and what they launch, to the end.
void run(int num_ranks, const std::function<void(int rank)>& host);

// --- what kernels use ----------------------------------------------------------------------------

char* dynamic_shared();
char* static_shared(int declaration, std::size_t bytes);

// The `__shared__` variable of this CTA that has this declaration.
template <typename T>
T& shared(int declaration) {
  return *reinterpret_cast<T*>(static_shared(declaration, sizeof(T)));
}

// What lane `from` of the warp gives; its own value where there is no such lane.
long shuffle(long value, int from);
unsigned ballot(bool vote);

// Copies into shared memory that complete a phase of `full`.
void start_load(void* shared, const void* global, int bytes, std::uint64_t* full);
void wait_for_load(std::uint64_t* full, int parity);

// Groups of `copies` but the last `pending` of them.
void finish(std::deque<Copies>& copies, int pending);

}  // namespace emu
