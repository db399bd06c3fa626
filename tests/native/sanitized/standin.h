// The GPU that stands in for one: what a test tells it, and what it saw.
//
// Device memory is host memory, so that AddressSanitizer watches it, and every allocation has its
// own size.  A kernel is a function that touches all memory that the real one may touch, and says
// which of its assumptions does not hold, in place of reading somewhere else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace standin {

// The call of the CUDA runtime after `num_calls` more fails, once; negative: none does.
void fail_after(int num_calls);
// Calls of the CUDA runtime so far.
int num_calls();
// Allocations that nobody has freed.
int num_allocations();
// Loses this one: nobody has its address any more.
void forget(void* memory);

// --- streams -------------------------------------------------------------------------------------
// They do at once what is queued, unless they are held.

// From now on these streams are being captured, together, and no others.
void capture(const std::vector<std::uintptr_t>& streams);
// Makes a stream that has the handle of one that is gone.
void remake(std::uintptr_t stream);
// Queues work on the stream that is not over before `release`.
void hold(std::uintptr_t stream);
// Whether the stream has such work, its own or that of a stream that it waits for.
bool is_held(std::uintptr_t stream);
// Ends the work of all streams; cudaDeviceSynchronize does, too.
void release();
// Does `work` when the stream comes to it.
void run_on_device(std::uintptr_t stream, std::function<void()> work);
// Notes a kernel that may run only after all that were noted before, in the same capture or outside
// of any; ends the process if nothing has this stream wait for them.
void note_kernel(std::uintptr_t stream);

// --- kernels -------------------------------------------------------------------------------------

// What plans find: rows, assignments and so on.
struct Sizes {
  std::uint32_t num_rows, num_pairs, num_assignments, bad_ranks;
  bool fails;  // a wait's deadline passes instead
  // The words that the host is told only after `release`: a bit for each of the four above, and
  // then for each expert of the rank.
  std::uint32_t late_words;
};
extern Sizes sizes;
// `KernelContext::call` of the kernels since the last time, where it is not 0.
std::vector<std::uint64_t> take_calls();
// Ends the process with the text, unless `holds`.
void require(bool holds, const char* text);
// Reads and writes every byte.
void touch(void* memory, std::size_t num_bytes);

}  // namespace standin
