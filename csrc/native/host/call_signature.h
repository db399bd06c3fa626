// Packs into 48 bits the arguments that must be equal on all ranks, for calls that the device
// compares because the hosts do not agree on them first (device/call_barrier.cuh).
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "common/dtype.h"
#include "native/state.h"

namespace ncclep::native {

// For dispatch and combine.  Keeps as many bits of the number `plan` as tell plans of different
// layers and micro-batches apart.
std::uint64_t call_of_rows(Phase phase, std::uint64_t plan, DType dtype, int row_bytes,
                           bool has_weights);
// For a plan in static mode.
std::uint64_t call_of_plan(int top_k, int alignment, std::int64_t max_recv_rows);

// The packed values by name; without "phase" when there is no call.
std::map<std::string, std::int64_t> values_of(std::uint64_t call);

// The names of a phase and of a failure's reason in errors.
const char* name_of(Phase phase);
const char* name_of(Reason reason);
// The phase with that name, which must be one of a call.
Phase phase_of(const std::string& name);

}  // namespace ncclep::native
