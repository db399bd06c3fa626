// Runs kernels on a CPU, to see whether ranks, CTAs and warps wait for each other as they should.
//
// Every thread of every CTA of every rank is a fiber, and so is every rank's host.  One of them
// runs at a time, up to a point where others could come in between: a load or store that other
// ranks see, an atomic, a barrier.  Which one goes on is drawn at random, and for a while some are
// held back. Asynchronous copies happen at a random moment between their start and the wait for
// them.  The clock stands still as long as anybody gets any further, and jumps when nobody does.
//
// In which order memory accesses become visible: visibility.h.
//
// Instead of drawing, it can also measure how long the paths of a kernel are: `measure`.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "visibility.h"

namespace emu {

constexpr int kWarpSize = 32;
constexpr std::size_t kStackBytes = 64 * 1024;  // of a fiber

struct Fiber;
using Registers = void* [5];  // where a fiber goes on: of __builtin_setjmp

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

// The change to the kernels that is in force (translate.py); -1: none.
inline int change_in_force = -1;
inline bool is_changed(int number) { return number == change_in_force; }

// Of a CTA of plan's kernels; and tokens of a chunk, at most as many as on a GPU.  A round has a
// number of chunks.
inline std::size_t kMaxHeldBytes = 8 * 1024;
inline int kChunk = 128;

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
  long time_ = 0;  // of the last one that has come
  std::vector<Fiber*> waiting_;
};

struct Warp {
  Barrier barrier{kWarpSize};
  int barriers = 0;             // since one of it let others run
  const Known* seen = nullptr;  // by those who have come to a barrier
  long values[2][kWarpSize];    // of `exchange`
};

struct Cta {
  int rank, index, grid;
  std::vector<char> dynamic;                 // shared memory, aligned by `dynamic_shared`
  std::map<int, std::vector<char>> statics;  // by declaration
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<Fiber*> fibers;     // those that run
  const Known* seen = nullptr;    // by those who have come to a barrier
  std::vector<char> stored_into;  // blocks of `dynamic`, since a fence of bulk copies' proxy
  bool is_stored_into = false;    // any of them
};

// A copy between memories that is under way.
struct Copy {
  char* to;
  const char* from;
  int bytes;
  const Known* seen = nullptr;  // by the thread, when it is a load
  bool is_store = false, is_bulk = false;
  std::vector<char> read = {};
  bool is_read = false, is_written = false;

  void do_read();
  void do_write();
};
using Copies = std::vector<Copy>;

struct Fiber {
  // What each switch between fibers needs comes first, in few lines of the cache.
  //
  // Of a device's thread; a host has no CTA.
  std::shared_ptr<Cta> cta;
  int rank = 0, thread = 0;
  std::uint64_t not_before = 0;  // on the clock
  Registers where;
  bool is_started = false;
  View view;

  // Groups of copies, the oldest first, and the one that is not committed.
  std::vector<Copies> stores, loads;
  Copies open_stores, open_loads;
  long time = 0, fences = 0;   // `measure`
  unsigned num_exchanges = 0;  // with its warp

  std::function<void()> body;
  std::unique_ptr<char[]> stack;
  bool is_on_stack(const char* address) const {
    return stack.get() <= address && address < stack.get() + kStackBytes;
  }
};

// The fiber that runs.
inline Fiber* running = nullptr;
inline Fiber& self() { return *running; }
inline bool is_in_kernel() { return running != nullptr && running->cta != nullptr; }
inline Warp& warp() { return self().cta->warps[self().thread / kWarpSize]; }
inline int lane() { return self().thread % kWarpSize; }

// Lets another fiber run; this one, which looks for something that others do, stays runnable.
void yield();
// Lets another one run, or lets a copy under way get further, now and then.
void maybe_yield();
// Something happened that others may be waiting for: the clock need not jump yet.
void note_progress();

// The clock, in nanoseconds, and how far it jumps.  Every other reading is a bit earlier.
std::uint64_t now();
constexpr std::uint64_t kJump = 1000;
// A CTA of the next kernel of `rank`, whichever, starts only after some jumps.
void delay(int rank, int jumps);

// Starts a kernel on `rank`, whose last one must be over.
void launch(int rank, int ctas, int threads, std::size_t shared_bytes,
            std::function<void()> kernel);
// Called when the last one is over.
inline std::function<void(int rank)> before_launch = [](int) {};
// The same as CUDA has it; a stream is the number of a rank.
template <typename... Parameters>
void start(void (*kernel)(Parameters...), int ctas, int threads, std::size_t shared_bytes,
           std::uintptr_t stream, Parameters... parameters) {
  launch(static_cast<int>(stream), ctas, threads, shared_bytes, [=] { kernel(parameters...); });
}
// Waits, on a rank's host, until its kernel is over.
void synchronize(int rank);
// The network between domains of ranks, if there is one (network.h), and a call as one of its
// fibers.
class Network;
inline Network* network = nullptr;
void run_as(Fiber& fiber, const std::function<void()>& body);
// Runs a host on each rank, and what they launch, to the end.
void run(int num_ranks, const std::function<void(int rank)>& host);

// --- the lengths of paths ------------------------------------------------------------------------

// Of the thread whose path is the longest, and of the one with the most fences.
struct Path {
  long steps, fences;
};
// What `queue` launches on rank 0, which is alone.  A thread takes a step with each access to
// memory that others use too, each exchange with its warp, barrier and fence; who waits goes on
// when the last one has come.  Nothing is drawn: at any time the thread with the fewest steps runs,
// copies take a step, and what is put gets nowhere.
Path measure(const std::function<void()>& queue);
inline bool is_measuring = false;
void take_step(bool is_fence = false);
// A step, if others use the memory there, too.
void note_access(const void* address);

// --- what kernels use ----------------------------------------------------------------------------

char* dynamic_shared();
char* static_shared(int declaration, std::size_t bytes);

// The `__shared__` variable of this CTA that has this declaration.
template <typename T>
T& shared(int declaration) {
  return *reinterpret_cast<T*>(static_shared(declaration, sizeof(T)));
}

void warp_barrier();
// What each lane of the warp gives, until the exchange after the next.
const long* exchange(long value);
bool cta_barrier(bool vote);

// Copies into shared memory that complete a phase of `full`.
void start_load(void* shared, const void* global, int bytes, std::uint64_t* full);
void wait_for_load(std::uint64_t* full, int parity);

// Groups of `copies` but the last `pending` of them.
void finish(std::vector<Copies>& copies, int pending);

}  // namespace emu
