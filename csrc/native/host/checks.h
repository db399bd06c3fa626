// Validates the arguments of every call of the group, from any caller: nothing invalid may reach a
// kernel.
//
// The engine has already checked its arguments on all ranks, with messages in the user's terms;
// these checks are for every other caller.  A call compares a few integers and builds a message
// only when it throws.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/tensor.h"
#include "native/host/group.h"
#include "native/state.h"

namespace ncclep::native {

// Says what the current device lacks for the engine's kernels; empty if nothing.  Those of
// low-latency mode have static shared memory only, of which every GPU has enough.
std::string device_problem(int rank_groups = 1);

// A deadline in seconds: positive, and in nanoseconds far below 2^64.
void check_timeout(double seconds);
void check_group(int num_ranks, int num_experts, double timeout_s);
// Of the ranks, in NVLink domains.
void check_domains(int num_ranks, int num_domains);
// Of windows.
void check_shape(const ncclepShape_t& shape);
void check_room(const Control& control, std::int64_t max_pairs, std::int64_t max_assignments,
                int most_tokens);

// `num_sms` out of the GPU's `max_sms`.
void check_num_sms(const Control& control, int num_sms, int max_sms);

// A plan of this group that its windows can hold.
void check_plan(const Control& control, const Plan& plan);
// Such a plan with its routes received.
void check_received(const Control& control, const Plan& plan);
// topk_idx: int32 or int64 [T, K] of that plan.
void check_topk(const Plan& plan, const Tensor& topk_idx, int alignment);
void check_drop(const Control& control, const Plan& plan, std::int64_t max_recv_rows,
                const Tensor& kept, const std::optional<Tensor>& lacked);
void check_routes(const Tensor& routes, std::int64_t size);
// `token_rows` and `topk_w` are [T, H] and [T, K], `rows` and `row_w` [N, H] and [N]; the weights
// are both given or both absent.  Dispatch copies rows, so they may be bytes; combine adds them up.
void check_rows(Phase phase, const Plan& plan, std::size_t max_row_bytes, const Tensor& token_rows,
                const std::optional<Tensor>& topk_w, const Tensor& rows,
                const std::optional<Tensor>& row_w);
void check_sums(const std::optional<Tensor>& sums, std::int64_t num_sums, const Tensor& rows);

}  // namespace ncclep::native
