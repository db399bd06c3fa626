// Low-latency mode: dispatch and combine of a few tokens, without a plan.
//
// Every rank has one more window.  In dispatch a rank copies the row of each of its tokens once to
// every rank that has experts for it, into the part of that rank's window reserved for the source
// rank, in token order; the token's experts on that rank and their weights travel with the row.  In
// combine the experts' outputs come back, one row for each (token, rank), to the same index in the
// source rank's window, and the source rank adds the rows up.
//
// Each operation ends with one word to every rank, which says that everything has been written, and
// how many rows; and with a wait for all ranks' words.  There is no other wait: no grid barrier,
// and no barrier at the start of the call.  A CTA that has sent counts itself; the last one has
// seen the writes of all (each CTA issues a GPU-scope fence before it counts) and publishes them
// with one system fence.  In dispatch it alone waits for the others' words.  In combine every CTA
// waits for them, because all of them add up, so its CTAs must be resident on the GPU together.
//
// Why one window and one word per source are enough.  Dispatch and combine alternate, D1, C1, D2,
// C2...; a rank begins an operation after its previous one is over; an operation is over on a rank
// only when all ranks' words for it have arrived; and a rank posts its word only when all of its
// CTAs have sent.  Let rank B write into rank A's window:
//
// - In Dn: rows, experts and weights, where only B writes.  A reads what D(n-1) wrote there in the
//   experts' kernels, which come before C(n-1) on A's stream, and in the sending part of C(n-1).  B
//   is in Dn, so it has A's word of C(n-1), which A posted when all of its CTAs had sent.  (While
//   it adds up, A also reads its own rows in its own window, which only A overwrites.)
// - In Cn: sums.  A reads the previous ones in C(n-1), which was over before A's Dn began; and B
//   has A's word of Dn.
// - The word of Dn.  A reads it in Dn, while waiting, and in Cn, for the number of rows to send
//   back, in every CTA before it counts itself.  B posts its next, of D(n+1), once it has A's word
//   of Cn.
// - The word of Cn.  A reads it in Cn only.  B posts its next once it has A's word of D(n+1).
//
// So addresses never change, and a CUDA graph can hold any number of operations and be replayed any
// number of times as long as they alternate.  Rows are valid until this rank's next dispatch
// begins.  Two micro-batches at a time need two objects, whose operations all ranks queue in the
// same order.
//
// Several NVLink domains (native/rail_layout.h).  A rank puts the rows of its tokens for a domain,
// with their experts and weights, to its rail peer there, in one message.  When the rail peer
// completes the dispatch, it sends them on to the ranks of its domain as if it were the source
// rank, and posts the source's words; so all its CTAs wait, too.  In combine a rank sends the sums
// for a token of another domain to that source's rail peer, which adds them up when it completes
// the combine, its own unrounded, rounds, and puts a row for each token back.  The source adds up
// the domains' sums, all of them rounded.  Why one copy of each is enough, for rank S, its rail
// peer B, and rank Q of B's domain:
//
// - What S puts in D(n+1): B reads that of Dn until it has put Cn, without which S is still in Cn.
// - What B puts in Cn: S reads that of C(n-1) in C(n-1), and puts Dn afterwards, without which B is
//   still in Dn.  For the same reasons both may write again what is on its way.
// - What B sends on to Q in D(n+1), and S's word: Q reads those of Dn until it posts its word of
//   Cn, without which B is still in Cn.
// - What Q sends to B in C(n+1): B reads that of Cn before it completes Cn, and posts S's word of
//   D(n+1) afterwards.
//
// Halves: `sends` writes and posts the word, `completes` waits and delivers.  The argument above
// holds when an operation counts as over after its second half.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "native/rail_layout.h"
#include "native/state.h"

namespace ncclep::native {

// The most tokens of a rank: a thread for each.
constexpr int kLowLatencyTokens = 512;

// A rank's window.  `[r]` is written by rank r.  Bytes are multiples of 16.
struct LowLatencyWindow {
  int num_ranks, max_tokens, top_k;
  int row_bytes, scale_bytes, sum_bytes;  // of a dispatched row, of its scales, of a sum
  int num_domains = 1;

  NCCLEP_BOTH std::size_t num_rows() const {
    return static_cast<std::size_t>(num_ranks) * max_tokens;
  }
  // uint64 [2][R]: the last dispatch and the last combine that rank r has sent: kBadRouting and the
  // number of rows, tagged with the operation's number (device/wait.cuh).
  NCCLEP_BOTH std::size_t sent() const { return 0; }
  // int32 [R][max_tokens][K]: a row's experts among this rank's, -1 for those of other ranks, and
  // where there is no row.
  NCCLEP_BOTH std::size_t experts() const { return 2 * num_ranks * 8; }
  // float [R][max_tokens][K]; at a multiple of 16 bytes, because `fill_nan` writes vectors.
  NCCLEP_BOTH std::size_t weights() const {
    return (experts() + num_rows() * top_k * 4 + 15) / 16 * 16;
  }
  // [R][max_tokens] of scale_bytes, row_bytes, sum_bytes.
  NCCLEP_BOTH std::size_t scales() const {
    return (weights() + num_rows() * top_k * 4 + 127) / 128 * 128;
  }
  NCCLEP_BOTH std::size_t rows() const { return scales() + num_rows() * scale_bytes; }
  NCCLEP_BOTH std::size_t sums() const { return rows() + num_rows() * row_bytes; }
  NCCLEP_BOTH std::size_t own_bytes() const { return sums() + num_rows() * sum_bytes; }

  // With several domains.  A message to a rail peer: uint64 [2], the number of its tokens and
  // kBadRouting; then for each its experts int32 [K], by number in the domain or -1, its weights
  // float [K], its scales and its row.
  NCCLEP_BOTH std::size_t header_bytes() const { return (std::size_t{8} * top_k + 15) / 16 * 16; }
  NCCLEP_BOTH std::size_t token_bytes() const { return header_bytes() + scale_bytes + row_bytes; }
  NCCLEP_BOTH std::size_t message_bytes(int tokens) const { return 16 + tokens * token_bytes(); }
  // [D], on their way and there.
  NCCLEP_BOTH std::size_t sent_message(int domain) const {
    return (own_bytes() + 127) / 128 * 128 + domain * message_bytes(max_tokens);
  }
  NCCLEP_BOTH std::size_t message(int domain) const { return sent_message(num_domains + domain); }
  // [D][L][max_tokens]: sums of the ranks of this domain for tokens of each rail peer, by local
  // rank.
  NCCLEP_BOTH std::size_t rank_sums(int domain, int local_rank) const {
    const int number = domain * (num_ranks / num_domains) + local_rank;
    return message(num_domains) + std::size_t{1} * number * max_tokens * sum_bytes;
  }
  // [D][max_tokens], on their way to rail peers and there.
  NCCLEP_BOTH std::size_t sent_sums(int domain) const {
    return rank_sums(num_domains, 0) + std::size_t{1} * domain * max_tokens * sum_bytes;
  }
  NCCLEP_BOTH std::size_t domain_sums(int domain) const { return sent_sums(num_domains + domain); }
  NCCLEP_BOTH std::size_t num_bytes() const {
    return num_domains == 1 ? own_bytes() : domain_sums(num_domains);
  }
};

// In a word of dispatch: the sender's routing names an invalid expert, or an expert twice.
constexpr std::uint32_t kBadRouting = 1u << 31;

// In device memory of one rank; zero at the start.
struct LowLatencyState {
  std::uint64_t dispatches, combines;   // that were sent
  std::uint64_t tokens_put;             // the rail peers' signal of the last dispatch
  unsigned int sent;                    // CTAs of the current operation (operation.cuh)
  unsigned int passed;                  // CTAs that have added up their part for the rail peers
  unsigned int passed_on[kMaxDomains];  // CTAs that have sent on their part of a domain's tokens
  unsigned int domains_passed;          // domains of which all CTAs have
  int cleared[kMaxRanks];               // of each rank's rows, how many last ones have no experts
  // For the combine of the last dispatch: the ranks of each token in this domain, a bit for each
  // local rank, and its other domains.
  std::uint32_t ranks_of[kLowLatencyTokens];
  std::uint64_t domains_of[kLowLatencyTokens];
};

// Passed to every low-latency kernel besides KernelContext.
struct LowLatencyContext {
  LowLatencyWindow window;
  DomainWindows window_of;  // by rank
  LowLatencyState* state;
};

struct LowLatencyDispatch {
  bool sends, completes;
  const char* x;         // [T, row_bytes]
  const char* scales;    // [T, scale_bytes]; not read without any
  const float* weights;  // [T, K]
  const void* topk_idx;  // [T, K], int32 or int64; -1: not routed
  bool is_int64;
  int num_tokens;
  std::int32_t* counts;  // [R]: rows received from each rank; 0 after a failure
};

struct LowLatencyCombine {
  bool sends, completes;
  // A row for each received one, [R, max_tokens, sum_bytes]; or, with `rows_of`, rows in any order.
  const char* y;
  // int32 [R, max_tokens, K]: the rows of y to add up for each, in this order; -1: none.
  const std::int32_t* rows_of;
  int num_rows;    // of y, with `rows_of`; indices outside are ignored
  char* out;       // [T, sum_bytes]
  int num_tokens;  // as dispatched
  DType dtype;
};

// `rails`, whose first window is the object's, are null unless there are several domains.
void low_latency_dispatch(const KernelContext& ctx, const LowLatencyContext& ll,
                          const LowLatencyDispatch& job, int num_ctas, std::uintptr_t stream,
                          const Rails* rails = nullptr);
void low_latency_combine(const KernelContext& ctx, const LowLatencyContext& ll,
                         const LowLatencyCombine& job, int num_ctas, std::uintptr_t stream,
                         const Rails* rails = nullptr);

}  // namespace ncclep::native
