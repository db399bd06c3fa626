// When others see what is stored into windows, and whether what is loaded from them is new.
//
// A plain store, or a bulk one, stays with its thread until a fence, a release or the end of the
// kernel gives it to all: a fence of the thread itself, or of one to which the thread has shown the
// store, by a barrier or a fence of the CTA, or by a fence of the GPU.  A load may find what was
// there before anything that its thread has not been made to see: by an acquire or a fence of its
// own, or of a thread that has shown it what it saw.  Atomics and relaxed stores of words are seen
// at once.
//
// A GPU is worse in one respect: here a fence gives to all ranks at once, there a chain of fences
// is needed where one CTA passes on what another one has stored.
//
// The compiler calls a function for each store of a kernel (-fsanitize=thread, without its
// library).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace emu {

struct Cta;
struct Fiber;

// Bytes of a window that differ between those who see a store and those who do not.
struct Change {
  char* where;
  std::vector<char> bytes;
};

// What a thread has stored that others do not see, and what it has seen of others.
struct View {
  std::vector<Change> stores;  // the oldest first
  std::vector<Change> open;    // stores since it last ran: what was there before
  // So many of `stores` are shown to the others there.
  std::size_t to_warp = 0, to_cta = 0, to_device = 0;
  long seen = 0;  // stores to windows that were given to all by then
};

void add_window(char* memory, std::size_t num_bytes);
void forget_windows();
// The CTAs of the kernel that a rank starts.
void note_grid(int rank, std::vector<std::shared_ptr<Cta>> ctas);

// A store of the fiber that runs.
void store(char* to, const std::vector<char>& bytes);
void store_for_all(void* to, const void* from, std::size_t num_bytes);
// What is loaded by a thread that has seen so much.
void load(void* to, const void* from, std::size_t num_bytes, long seen);
long num_given();

// Points at which the fiber that runs shows something to others or learns from them.
void settle();  // it stops running
void show_to_warp();
void show_to_cta();
void fence_cta();
void fence_device();
void release();
void acquire();
void give_some();  // which may happen at any time
void end_thread();

}  // namespace emu
