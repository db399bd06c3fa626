// Sequences of low-latency dispatches and combines.
#pragma once

#include <string>

#include "routing.h"

//   ll            one or two objects, halves of whose operations lie between each other's
//   ll-failures   a rank that does not come, not in time, goes no further, or does not take turns
bool is_low_latency(const std::string& kind);
void run_low_latency(const std::string& kind, int ranks, const Starts& starts);
