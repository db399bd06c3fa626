// The GPU that stands in for one: what a test tells it, and what it saw.
//
// Device memory is host memory, so that AddressSanitizer watches it, and every allocation has its
// own size.  A kernel is a function that touches all memory that the real one may touch, and says
// which of its assumptions does not hold, in place of reading somewhere else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace standin {

// The call of the CUDA runtime after `num_calls` more fails, once; negative: none does.
void fail_after(int num_calls);
// Calls of the CUDA runtime so far.
int num_calls();
// Allocations that nobody has freed.
int num_allocations();
// Loses this one: nobody has its address any more.
void forget(void* memory);
// Says that this stream is being captured.
void capture(std::uintptr_t stream);
// Work that a kernel does on its own thread; cudaDeviceSynchronize waits for it.
void run_on_device(std::function<void()> work);
// What plans find: rows, assignments and so on; and milliseconds until the host is told.
struct Sizes {
  std::uint32_t num_rows, num_pairs, num_assignments, bad_ranks;
  int delay_ms;
  bool fails;  // a wait's deadline passes instead
};
extern Sizes sizes;
// Ends the process with the text, unless `holds`.
void require(bool holds, const char* text);
// Reads and writes every byte.
void touch(void* memory, std::size_t num_bytes);

}  // namespace standin
