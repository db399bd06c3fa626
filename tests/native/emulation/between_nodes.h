// Kernels that pack, unpack and add up what crosses between nodes.
#pragma once

// One job of each, drawn at random, on one rank.
void run_network_rows();
