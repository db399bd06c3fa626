// Cases of the native engine's groups.
#pragma once

// Lives of a group, and of low-latency objects, with every call of NCCL and of CUDA failing once.
void native_group();
void native_low_latency();
// What a group does that was closed.
void closed_group();
// Which operations wait for which, on several streams and in captures.
void order();
// What kernels get to compare between ranks.
void calls();
// How the host waits for a plan's sizes.
void sizes();
// Windows that the ranks make together.
void growth();
