// Words that ranks leave in each other's windows, to see whether they reach them.
#pragma once

#include <cstdint>
#include <vector>

namespace ncclep::native {

// What the device reads at these addresses of this rank's or another's memory, as the engine's
// kernels would.  Waits for the device.
std::vector<std::uint64_t> load_words(const std::vector<std::uintptr_t>& addresses);

// Has the device write one word to each address, and waits until it has.
void store_words(const std::vector<std::uintptr_t>& addresses,
                 const std::vector<std::uint64_t>& words);

}  // namespace ncclep::native
