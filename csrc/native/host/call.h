// What all ranks must have alike in a call on which their hosts do not agree, in 48 bits
// (device/call_barrier.cuh).
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "common/dtype.h"
#include "native/state.h"

namespace ncclep::native {

// Of dispatch and combine.  Of `plan`, its number, as many bits as keep plans of different layers
// and micro-batches apart.
std::uint64_t call_of_rows(Phase phase, std::uint64_t plan, DType dtype, int row_bytes,
                           bool has_weights);
// Of a plan in static mode.
std::uint64_t call_of_plan(int top_k, int alignment, std::int64_t max_recv_rows);

// The same, by name; without "phase" when there is no call.
std::map<std::string, std::int64_t> values_of(std::uint64_t call);

// What errors call a phase, and why a group has failed.
const char* name_of(Phase phase);
const char* name_of(Reason reason);
// The phase of that name, which must be that of a call.
Phase phase_of(const std::string& name);

}  // namespace ncclep::native
