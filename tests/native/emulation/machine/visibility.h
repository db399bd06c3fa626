// When others see what is stored into the memory of GPUs, and whether what they load is new.
//
// A plain store, or a bulk one, stays with its thread until a fence or a release of the GPU or the
// system, or the end of the thread, gives it to all: a fence of the thread itself, or of one to
// which the thread has shown the store by a barrier or a fence of the CTA.
//
// The stores of a CTA are numbered as they are given.  A thread has seen those of each CTA up to a
// number; where it loads, it may find what was there before any later store.  It learns of more at
// a barrier, from the others who came to it, and at a fence, from the words that it has read: a
// word says as much as the thread that wrote it had seen, or its CTA given, at its last fence
// before. Words and fences have scopes: a fence does nothing for words of a wider scope.  Atomics
// and words are seen at once themselves.
//
// Bulk copies see global memory through a proxy of their own: what the thread has seen by its last
// fence of the proxy; and what bulk copies have stored, if their thread had such a fence, too,
// before it was given.  Shared memory that was stored into needs a fence before a bulk copy uses
// it.
//
// The compiler calls a function for each store of a kernel (-fsanitize=thread, without its
// library).
#pragma once

#include <cstddef>
#include <vector>

namespace emu {

enum Scope { kCta, kGpu, kSystem, kNumScopes };

// The last store of each CTA of each rank that somebody has seen; never changed.
struct Known;

// Bytes that differ between those who see a store and those who do not: of one block at most.
constexpr std::size_t kBlock = 16;
struct Change {
  char* where;
  std::size_t size;
  long bulk;  // the group of bulk stores that it belongs to; -1: none
  char bytes[kBlock];
};

// What a thread has stored that others do not see, and what it has seen of others.
struct View {
  std::vector<Change> open;    // stores since it last ran: what was there before
  std::vector<Change> stores;  // the oldest first
  // So many of `stores` are shown to the others there.
  std::size_t to_warp = 0, to_cta = 0;
  const Known *seen = nullptr, *seen_by_bulk = nullptr;
  // By words of a scope: those that it has read, or will write.
  const Known *read[kNumScopes] = {}, *released[kNumScopes] = {};
  long bulk = -1;  // its bulk stores since the last fence of their proxy
};

// So many ranks run from now on.
void begin_run(int num_ranks);
// Memory that threads of several CTAs use, from its allocation on.
void add_memory(void* memory, std::size_t num_bytes);
void forget_memory(void* memory);

// Stores of the fiber that runs.
void store_in_bulk(char* to, const std::vector<char>& bytes);
void store_for_all(void* to, const void* from, std::size_t num_bytes);
// What is loaded by one who has seen so much.
void load(void* to, const void* from, std::size_t num_bytes, const Known* seen,
          bool in_bulk = false);

// Shared memory and bulk copies: false if a store goes elsewhere.
bool note_store_to_shared(const char* to, std::size_t num_bytes);
void require_fenced(const char* shared, std::size_t num_bytes);

// Words that say what else can be seen.
Scope scope_of(const void* word);  // of an atomic
void note_read(const void* word, Scope scope);
void note_write(const void* word, Scope scope, bool is_atomic);

// Points at which the fiber that runs shows something to others or learns from them.
void begin_thread();
void learn(const Known*& own, const Known* other);
void settle();  // it stops running
void show_to_warp();
void show_to_cta();
void acquire(Scope scope);
void release(Scope scope);
void fence_proxy();
void give_some();  // which may happen at any time
void end_thread();
// What all kernels of a rank that are over have seen.
const Known* seen_by(int rank);

}  // namespace emu
