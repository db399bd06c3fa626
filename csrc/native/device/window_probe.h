// Words that ranks write into each other's windows, to verify that the addresses are right.
#pragma once

#include <cstdint>
#include <vector>

namespace ncclep::native {

// Reads the words at these addresses, in this rank's or another's memory, on the device as the
// engine's kernels would.  Waits for the device.
std::vector<std::uint64_t> load_words(const std::vector<std::uintptr_t>& addresses);

// Writes one word to each address on the device, and waits until that is done.
void store_words(const std::vector<std::uintptr_t>& addresses,
                 const std::vector<std::uint64_t>& words);

}  // namespace ncclep::native
