#include "emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {

namespace {

constexpr std::size_t kStackBytes = 64 * 1024;
constexpr std::size_t kSharedAlignment = 128;
constexpr long kStepsWithoutProgress = 20'000'000;

// In percent: how often `maybe_yield` yields and lets copies get further, in this run.
struct Habits {
  unsigned yields, copies;
};

// Fibers that are held back for a while.
struct Mood {
  unsigned kind = 0, rank = 0, number = 0;
  long until = 0;

  bool holds_back(const Fiber& fiber) const {
    if (fiber.cta == nullptr) return false;
    const unsigned of_cta = number % fiber.cta->grid, of_warp = number % fiber.cta->warps.size();
    const bool is_rank = static_cast<unsigned>(fiber.rank) == rank;
    const unsigned index = fiber.cta->index, thread = fiber.thread;
    switch (kind) {
      case 1:
        return is_rank;
      case 2:
        return !is_rank;
      case 3:
        return is_rank && index == of_cta;
      case 4:
        return thread / kWarpSize == of_warp;
      case 5:
        return is_rank && thread / kWarpSize == of_warp;
      case 6:
        return thread % kWarpSize == number % kWarpSize;
      default:
        return false;
    }
  }
};

std::mt19937 generator;
Habits habits;
Fiber* running = nullptr;
jmp_buf scheduler;
std::vector<Fiber*> runnable;
std::vector<std::unique_ptr<char[]>> stacks;  // free ones
std::vector<int> live;                        // threads of each rank's kernel

struct BulkLoad {
  Copy copy;
  int rank;
};
std::map<std::uint64_t*, BulkLoad> bulk_loads;  // by the barrier that they complete
long steps, last_progress;

void suspend() {
  Fiber* fiber = running;
  if (_setjmp(fiber->where) == 0) _longjmp(scheduler, 1);
}

void finish_load(std::uint64_t* full) {
  const auto load = bulk_loads.find(full);
  load->second.copy.do_write();
  bulk_loads.erase(load);
  ++*full;
  note_progress();
}

void begin() {
  Fiber& fiber = self();
  fiber.body();
  if (fiber.cta != nullptr) {
    for (const auto* groups : {&fiber.stores, &fiber.loads}) {
      for (const Copies& group : *groups) {
        for (const Copy& copy : group) EMU_REQUIRE(copy.is_written);
      }
    }
    EMU_REQUIRE(fiber.open_stores.empty() && fiber.open_loads.empty());
    if (--live[fiber.rank] == 0) {
      for (const auto& [full, load] : bulk_loads) EMU_REQUIRE(load.rank != fiber.rank);
    }
  }
  note_progress();
  fiber.body = nullptr;  // it is over
  _longjmp(scheduler, 1);
}

void resume(Fiber* fiber) {
  running = fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber->is_started) _longjmp(fiber->where, 1);
  fiber->is_started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber->stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
  setcontext(&context);
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

unsigned draw(unsigned bound) { return generator() % bound; }

void seed(unsigned number) {
  generator.seed(number);
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
  if (++arrived_ < size_) {
    waiting_.push_back(running);
    suspend();
    return result_;
  }
  result_ = all_;
  all_ = true;
  arrived_ = 0;
  runnable.insert(runnable.end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
  return result_;
}

void Copy::do_read() {
  if (!is_read) read.assign(from, from + bytes);
  is_read = true;
}

void Copy::do_write() {
  do_read();
  if (!is_written) std::memcpy(to, read.data(), bytes);
  is_written = true;
}

Fiber& self() { return *running; }

void yield() {
  runnable.push_back(running);
  suspend();
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
  if (draw(100) < habits.yields) yield();
}

void note_progress() { last_progress = steps; }

void launch(int rank, int ctas, int threads, std::size_t shared_bytes,
            std::function<void()> kernel) {
  EMU_REQUIRE(live[rank] == 0);
  for (int index = 0; index < ctas; ++index) {
    auto cta = std::make_shared<Cta>(Cta{rank, index, ctas, {}, {}, Barrier(threads), {}});
    cta->dynamic.assign(shared_bytes + 2 * kSharedAlignment, '\xab');
    cta->warps.resize(threads / kWarpSize);
    for (int thread = 0; thread < threads; ++thread) {
      Fiber* fiber = make(kernel, rank);
      fiber->cta = cta;
      fiber->thread = thread;
    }
  }
  live[rank] = ctas * threads;
}

void synchronize(int rank) {
  while (live[rank] > 0) yield();
}

void run(int num_ranks, const std::function<void(int)>& host) {
  live.assign(num_ranks, 0);
  steps = last_progress = 0;
  Mood mood;
  for (int rank = 0; rank < num_ranks; ++rank) make([&host, rank] { host(rank); }, rank);
  while (!runnable.empty()) {
    if (++steps - last_progress > kStepsWithoutProgress) fail("nobody gets any further");
    if (steps >= mood.until) {
      mood = {draw(7), draw(num_ranks), draw(64),
              steps + 1000 + draw(draw(4) ? 50'000 : 1'000'000)};
    }
    if (!bulk_loads.empty() && draw(4000) == 0) {
      finish_load(std::next(bulk_loads.begin(), draw(bulk_loads.size()))->first);
    }
    const std::size_t place = draw(runnable.size());
    Fiber* fiber = runnable[place];
    if (mood.holds_back(*fiber) && draw(1000) != 0) continue;
    runnable[place] = runnable.back();
    runnable.pop_back();
    resume(fiber);
    if (fiber->body != nullptr) continue;
    stacks.push_back(std::move(fiber->stack));
    delete fiber;
  }
  for (const int threads : live) {
    if (threads > 0) fail("threads wait at barriers to which others never come");
  }
}

char* dynamic_shared() {
  const auto address = reinterpret_cast<std::uintptr_t>(self().cta->dynamic.data());
  return self().cta->dynamic.data() + (kSharedAlignment - address % kSharedAlignment);
}

char* static_shared(int declaration, std::size_t bytes) {
  std::unique_ptr<char[]>& memory = self().cta->statics[declaration];
  if (memory == nullptr) {
    memory.reset(new char[bytes]);
    std::memset(memory.get(), 0xcd, bytes);
  }
  return memory.get();
}

long shuffle(long value, int from) {
  Warp& all = warp();
  all.values[lane()] = value;
  all.barrier.wait();
  const long result = 0 <= from && from < kWarpSize ? all.values[from] : value;
  all.barrier.wait();
  return result;
}

unsigned ballot(bool vote) {
  Warp& all = warp();
  all.values[lane()] = vote;
  all.barrier.wait();
  unsigned votes = 0;
  for (int i = 0; i < kWarpSize; ++i) votes |= static_cast<unsigned>(all.values[i] != 0) << i;
  all.barrier.wait();
  return votes;
}

void start_load(void* shared, const void* global, int bytes, std::uint64_t* full) {
  const std::vector<char>& memory = self().cta->dynamic;
  char* to = static_cast<char*>(shared);
  EMU_REQUIRE(memory.data() <= to && to + bytes <= memory.data() + memory.size());
  EMU_REQUIRE(bulk_loads.count(full) == 0);
  Copy load{to, static_cast<const char*>(global), bytes};
  if (draw(2) == 0) load.do_read();
  std::memset(to, 0x77, bytes);  // what is there before the load has come must not be used
  bulk_loads.emplace(full, BulkLoad{std::move(load), self().rank});
  maybe_yield();
}

void wait_for_load(std::uint64_t* full, int parity) {
  while (static_cast<int>(*full & 1) == parity) {
    yield();
    if (draw(16) == 0 && bulk_loads.count(full) != 0) finish_load(full);
  }
}

void finish(std::deque<Copies>& copies, int pending) {
  while (static_cast<int>(copies.size()) > pending) {
    for (Copy& copy : copies.front()) copy.do_write();
    copies.pop_front();
  }
  note_progress();
}

}  // namespace emu
