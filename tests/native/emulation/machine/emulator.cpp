#include "emulator.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "network.h"

namespace emu {

namespace {

constexpr std::size_t kSharedAlignment = 128;
// Stacks begin at different places of a page, or all would share few lines of the CPU's cache.
constexpr std::size_t kLine = 64, kColors = 61;
// Without progress, before the clock jumps: so many steps, and so many for each fiber that can run,
// as a wait looks at the clock at every 64th turn.  And so many jumps before there is no hope.
// Warps that look for something again and again have fewer barriers from one look to the next.
constexpr int kWarpBarriersOfLook = 16;
constexpr long kSteps = 100'000, kStepsOfFiber = 300, kMostJumps = 16;

// In percent: how often `maybe_yield` yields and lets copies get further, in this run.
struct Habits {
  unsigned yields, copies;
};

// Fibers that are held back for a while.
struct Mood {
  unsigned kind = 0, rank = 0, number = 0;
  long until = 0;

  bool holds_back(const Fiber& fiber) const {
    if (kind == 0 || fiber.cta == nullptr) return false;
    const auto thread = static_cast<unsigned>(fiber.thread);
    const bool is_rank = static_cast<unsigned>(fiber.rank) == rank;
    switch (kind) {
      case 1:
        return is_rank;
      case 2:
        return !is_rank;
      case 3:
        return is_rank && static_cast<unsigned>(fiber.cta->index) == number % fiber.cta->grid;
      case 4:
        return thread / kWarpSize == number % fiber.cta->warps.size();
      case 5:
        return is_rank && thread / kWarpSize == number % fiber.cta->warps.size();
      default:
        return thread % kWarpSize == number % kWarpSize;
    }
  }
};

std::uint64_t generator;  // state of splitmix64
Habits habits;
Registers scheduler;
std::vector<Fiber*> runnable;
std::vector<std::unique_ptr<char[]>> stacks;  // free ones
std::vector<int> live;                        // threads of each rank's kernel

struct BulkLoad {
  std::uint64_t* full;  // the barrier that it completes
  Copy copy;
  int rank;
};
std::vector<BulkLoad> bulk_loads;
long steps, last_progress, jumps;
std::uint64_t clock_ns = kJump, num_readings = 0;
Path longest;

struct Delay {
  int cta = -1;
  std::uint64_t until = 0;
};
std::map<int, Delay> delays;  // of a CTA of the next kernel, by rank

// Not in the functions that call __builtin_setjmp.
[[noreturn]] __attribute__((noinline)) void go_to(Registers& where) { __builtin_longjmp(where, 1); }

__attribute__((noinline)) void suspend() {
  settle();
  Fiber* fiber = running;
  if (__builtin_setjmp(fiber->where) == 0) go_to(scheduler);
}

void let_others_run() {
  runnable.push_back(running);
  suspend();
}

auto find_load(const std::uint64_t* full) {
  return std::find_if(bulk_loads.begin(), bulk_loads.end(),
                      [full](const BulkLoad& load) { return load.full == full; });
}

void finish_load(std::vector<BulkLoad>::iterator load) {
  load->copy.do_write();
  ++*load->full;
  bulk_loads.erase(load);
  note_progress();
}

void begin() {
  Fiber& fiber = self();
  if (fiber.cta != nullptr) begin_thread();
  fiber.body();
  if (fiber.cta != nullptr) {
    longest = {std::max(longest.steps, fiber.time), std::max(longest.fences, fiber.fences)};
    EMU_REQUIRE(fiber.open_stores.empty());
    for (const Copies& group : fiber.stores) {
      for (const Copy& copy : group) {
        if (!copy.is_written) fail("a thread ends before its stores");
      }
    }
    end_thread();
    if (--live[fiber.rank] == 0) {
      for (const BulkLoad& load : bulk_loads) EMU_REQUIRE(load.rank != fiber.rank);
    }
  }
  note_progress();
  fiber.body = nullptr;  // it is over
  go_to(scheduler);
}

__attribute__((noinline)) void resume(Fiber* fiber) {
  running = fiber;
  if (__builtin_setjmp(scheduler) != 0) return;
  if (fiber->is_started) go_to(fiber->where);
  fiber->is_started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber->stack.get();
  context.uc_stack.ss_size = kStackBytes - fiber->thread % kColors * kLine;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
  setcontext(&context);
}

// Hosts come last: they only wait.
std::size_t first_in_time() {
  const auto is_before = [](const Fiber* one, const Fiber* other) {
    if ((one->cta == nullptr) != (other->cta == nullptr)) return one->cta != nullptr;
    return one->time < other->time;
  };
  return std::min_element(runnable.begin(), runnable.end(), is_before) - runnable.begin();
}

Fiber* make(std::function<void()> body, int rank) {
  auto* fiber = new Fiber;
  fiber->body = std::move(body);
  fiber->rank = rank;
  if (stacks.empty()) stacks.emplace_back(new char[kStackBytes]);
  fiber->stack = std::move(stacks.back());
  stacks.pop_back();
  runnable.push_back(fiber);
  return fiber;
}

}  // namespace

unsigned draw(unsigned bound) {
  if (is_measuring) return 0;
  std::uint64_t mixed = generator += 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
  return static_cast<unsigned>((mixed >> 32) * bound >> 32);
}

void seed(unsigned number) {
  // On a stack of its own: a fiber's is small.
  static char stack[64 * 1024];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof(stack);
  sigaltstack(&alternative, nullptr);
  struct sigaction action{};
  action.sa_flags = SA_ONSTACK;
  action.sa_handler = [](int) {
    constexpr char kText[] = "FAILED: an address leads nowhere\n";
    std::_Exit(write(STDOUT_FILENO, kText, sizeof(kText) - 1) > 0 ? 1 : 2);
  };
  for (const int number : {SIGSEGV, SIGBUS, SIGABRT}) sigaction(number, &action, nullptr);
  generator = number;
  const unsigned yields[] = {0, 5, 30}, copies[] = {0, 2, 20};
  habits = {yields[draw(3)], copies[draw(3)]};
}

void fail(const std::string& text) {
  std::printf("FAILED: %s\n", text.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

bool Barrier::wait(bool vote) {
  all_ = all_ && vote;
  time_ = std::max(time_, running->time + 1);
  if (++arrived_ < size_) {
    waiting_.push_back(running);
    suspend();
    return result_;
  }
  result_ = all_;
  all_ = true;
  arrived_ = 0;
  if (is_measuring) {
    for (Fiber* fiber : waiting_) fiber->time = time_;
    running->time = time_;
  }
  runnable.insert(runnable.end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
  return result_;
}

void Copy::do_read() {
  if (is_read) return;
  read.resize(bytes);
  is_store ? static_cast<void>(std::memcpy(read.data(), from, bytes))
           : load(read.data(), from, bytes, seen, is_bulk);
  is_read = true;
}

void Copy::do_write() {
  do_read();
  if (is_written) return;
  is_store ? store_in_bulk(to, read) : static_cast<void>(std::memcpy(to, read.data(), bytes));
  is_written = true;
}

void yield() {
  if (self().cta != nullptr) warp().barriers = 0;
  let_others_run();
}

void maybe_yield() {
  auto& stores = self().stores;
  if (draw(100) < habits.copies && !stores.empty()) {
    Copies& group = stores[draw(stores.size())];
    if (!group.empty()) {
      Copy& copy = group[draw(group.size())];
      copy.is_read || draw(2) == 0 ? copy.do_write() : copy.do_read();
    }
  }
  if (draw(100) < habits.copies) give_some();
  if (draw(100) < habits.yields) let_others_run();
}

void note_progress() {
  last_progress = steps;
  jumps = 0;
}

std::uint64_t now() { return clock_ns - num_readings++ % 2; }

void delay(int rank, int jumps) {
  delays[rank] = {static_cast<int>(draw(64)), clock_ns + jumps * kJump};
}

void run_as(Fiber& fiber, const std::function<void()>& body) {
  Fiber* const before = std::exchange(running, &fiber);
  body();
  running = before;
}

void launch(int rank, int ctas, int threads, std::size_t shared_bytes,
            std::function<void()> kernel) {
  synchronize(rank);  // a rank has one stream
  before_launch(rank);
  const Delay delay = delays[rank];
  delays.erase(rank);
  const auto shared = std::make_shared<std::function<void()>>(std::move(kernel));
  for (int index = 0; index < ctas; ++index) {
    auto cta = std::make_shared<Cta>(Cta{rank, index, ctas, {}, {}, Barrier(threads), {}, {}});
    cta->dynamic.assign(shared_bytes + 2 * kSharedAlignment, '\xab');
    cta->stored_into.assign(cta->dynamic.size() / kBlock + 1, 0);
    cta->warps.resize(threads / kWarpSize);
    for (int thread = 0; thread < threads; ++thread) {
      Fiber* fiber = make([shared] { (*shared)(); }, rank);
      fiber->cta = cta;
      fiber->thread = thread;
      cta->fibers.push_back(fiber);
      if (delay.cta % ctas == index) fiber->not_before = delay.until;
    }
  }
  live[rank] = ctas * threads;
}

void synchronize(int rank) {
  while (live[rank] > 0) yield();
}

void run(int num_ranks, const std::function<void(int)>& host) {
  live.assign(num_ranks, 0);
  begin_run(num_ranks);
  steps = last_progress = jumps = 0;
  Mood mood;
  for (int rank = 0; rank < num_ranks; ++rank) make([&host, rank] { host(rank); }, rank);
  while (!runnable.empty()) {
    const long patience = kSteps + kStepsOfFiber * static_cast<long>(runnable.size());
    if (++steps >= mood.until) {
      mood = {draw(7), draw(num_ranks), draw(64),
              steps + 1000 + draw(draw(4) ? 50'000 : 1'000'000)};
      if (mood.kind == 0) last_progress = steps;  // there may be more from now on
    }
    if (steps - last_progress > patience) {
      if (mood.kind == 0) {
        clock_ns += kJump;
        if (++jumps > kMostJumps) fail("nobody gets any further");
      }
      mood = {0, 0, 0, steps + 2 * patience};
      last_progress = steps;
    }
    if (!bulk_loads.empty() && draw(4000) == 0) {
      finish_load(bulk_loads.begin() + draw(bulk_loads.size()));
    }
    if (network != nullptr && !is_measuring && draw(100) == 0) network->get_further();
    const std::size_t place = is_measuring ? first_in_time() : draw(runnable.size());
    Fiber* fiber = runnable[place];
    if (mood.holds_back(*fiber) && draw(1000) != 0) continue;
    if (fiber->not_before > clock_ns) continue;
    runnable[place] = runnable.back();
    runnable.pop_back();
    resume(fiber);
    if (fiber->body != nullptr) continue;
    stacks.push_back(std::move(fiber->stack));
    delete std::exchange(running, nullptr);
  }
  for (const int threads : live) {
    if (threads > 0) fail("threads wait at barriers to which others never come");
  }
}

Path measure(const std::function<void()>& queue) {
  is_measuring = true;
  habits = {100, 0};  // others could come in between at any time
  longest = {};
  run(1, [&queue](int rank) {
    queue();
    synchronize(rank);
  });
  is_measuring = false;
  return longest;
}

void take_step(bool is_fence) {
  if (!is_measuring || !is_in_kernel()) return;
  ++running->time;
  running->fences += is_fence;
}

char* dynamic_shared() {
  const auto address = reinterpret_cast<std::uintptr_t>(self().cta->dynamic.data());
  return self().cta->dynamic.data() + (kSharedAlignment - address % kSharedAlignment);
}

char* static_shared(int declaration, std::size_t bytes) {
  return self().cta->statics.try_emplace(declaration, bytes, '\xcd').first->second.data();
}

void warp_barrier() {
  Warp& all = warp();
  if (lane() == 0 && ++all.barriers > kWarpBarriersOfLook) note_progress();
  show_to_warp();
  all.barrier.wait();
  learn(self().view.seen, all.seen);
}

bool cta_barrier(bool vote) {
  note_progress();
  show_to_cta();
  const bool result = self().cta->barrier.wait(vote);
  learn(self().view.seen, self().cta->seen);
  return result;
}

// Two sets of values take turns: whoever writes into one of them again has met, for the other, all
// who read it.
const long* exchange(long value) {
  long* const values = warp().values[self().num_exchanges++ % 2];
  values[lane()] = value;
  warp_barrier();
  return values;
}

void start_load(void* shared, const void* global, int bytes, std::uint64_t* full) {
  char* to = static_cast<char*>(shared);
  require_fenced(to, bytes);
  take_step();
  EMU_REQUIRE(find_load(full) == bulk_loads.end());
  Copy load{to, static_cast<const char*>(global), bytes, self().view.seen_by_bulk, false, true};
  if (draw(2) == 0) load.do_read();
  std::memset(to, 0x77, bytes);  // what is there before the load has come must not be used
  bulk_loads.push_back({full, std::move(load), self().rank});
  maybe_yield();
}

void wait_for_load(std::uint64_t* full, int parity) {
  while (static_cast<int>(*full & 1) == parity) {
    yield();
    const auto load = draw(16) == 0 ? find_load(full) : bulk_loads.end();
    if (load != bulk_loads.end()) finish_load(load);
  }
}

void finish(std::vector<Copies>& copies, int pending) {
  const int number = std::max(0, static_cast<int>(copies.size()) - pending);
  for (int i = 0; i < number; ++i) {
    for (Copy& copy : copies[i]) copy.do_write();
  }
  copies.erase(copies.begin(), copies.begin() + number);
  if (number > 0) note_progress();
}

}  // namespace emu
