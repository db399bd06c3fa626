// The GPU that stands in for one: what tests tell it, and what it saw.
//
// Device memory is host memory, so that AddressSanitizer watches it.  A kernel requires that it may
// run when it does, and a plan's tells the host what a test says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// As changed sources ask (emulation/translate.py).
namespace emu {
inline int mistake = -1;
inline bool is_changed(int number) { return number == mistake; }
}  // namespace emu

namespace standin {

// Ends the process with the text, unless `holds`.
void require(bool holds, const std::string& text);
#define REQUIRE(holds) standin::require(holds, std::string(__func__) + ": " #holds)

// --- what tests call -----------------------------------------------------------------------------

// The call after `num_calls` more fails, once; negative: none does.
void fail_after(int num_calls);
// Allocations that were not freed.
int num_allocations();
// From now on these streams are being captured, together, and no others; 0 is none.
void capture(std::uintptr_t first, std::uintptr_t second = 0);
// Makes a stream that has the handle of one that is gone.
void remake(std::uintptr_t stream);
// Work on a stream is over at once, unless the stream is held: then it is over after `release`.
void hold(std::uintptr_t stream);
bool is_held(std::uintptr_t stream);
// Ends the work of all streams, now or when the status of work is queried for the n-th time.
void release();
void release_at_query(int n);

// What the next plans find, and the words that the host is told only after a release: a bit for
// each of the four, and then for each expert of the rank.  `bad_rank` is 1 + the rank, or 0.
struct Plans {
  std::uint32_t rows = 2, pairs = 1, assignments = 2, bad_rank = 0, late_words = 0;
  bool fail = false;  // the deadline of a wait passes, for rank 1, which has entered `peer_call`
  std::uint64_t own_call = 0, peer_call = 0;
};
extern Plans plans;

// What each kernel needs; the GPU has 132, and as many SMs.
extern std::size_t shared_bytes;

// What kernels got with several NVLink domains.
struct Launched {
  int num_rounds = 0, num_phases = 0;  // of the last dispatch or combine
  std::uint64_t received = 0;          // the plan whose routes all had received, to the last plan
  int num_closes = 0;                  // kernels before windows close, which were open then
};
extern Launched launched;

// --- what kernels call ---------------------------------------------------------------------------

void run_on_device(std::uintptr_t stream, std::function<void()> work);
// Notes a kernel that may run only after all that were noted before in the same capture, or
// outside of captures; ends the process if nothing makes this stream wait for them.
void note_kernel(std::uintptr_t stream);

}  // namespace standin
