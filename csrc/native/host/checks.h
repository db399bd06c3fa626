// What a call of the group must get, whoever makes it: nothing else may reach a kernel.
//
// The engine has checked its arguments on all ranks, in the user's words, before it calls; these
// are for everybody else.  A call compares a few integers, and makes a text only when it throws.
#pragma once

#include <cstdint>
#include <optional>

#include "common/tensor.h"
#include "native/host/group.h"
#include "native/state.h"

namespace ncclep::native {

// Seconds that a wait may have: positive, and as nanoseconds far from the end of 64 bits.
void check_timeout(double seconds);
void check_group(int num_ranks, int num_experts, double timeout_s);
// Of windows.
void check_sizes(int max_tokens, int top_k, std::size_t row_bytes);
void check_room(const Control& control, std::int64_t max_pairs, std::int64_t max_assignments,
                int num_chunks);

// Of the GPU's `max_sms`.
void check_num_sms(const Control& control, int num_sms, int max_sms);

// A plan of this group, for windows that hold it.
void check_plan(const Control& control, const Plan& plan);
// The same, whose routes are there.
void check_received(const Control& control, const Plan& plan);
// int32 or int64 [T, K] of that plan.
void check_topk(const Plan& plan, const Tensor& topk_idx, int alignment);
void check_drop(const Control& control, const Plan& plan, std::int64_t max_recv_rows,
                const Tensor& kept, const std::optional<Tensor>& lacked);
void check_routes(const Tensor& routes, std::int64_t size);
// `token_rows` and `topk_w` are [T, H] and [T, K], `rows` and `row_w` [N, H] and [N]; the weights
// are both there or not.  Dispatch copies rows, so that they may be bytes; combine adds them up.
void check_rows(Phase phase, const Plan& plan, std::size_t max_row_bytes, const Tensor& token_rows,
                const std::optional<Tensor>& topk_w, const Tensor& rows,
                const std::optional<Tensor>& row_w);
void check_sums(const std::optional<Tensor>& sums, std::int64_t num_sums, const Tensor& rows);

}  // namespace ncclep::native
