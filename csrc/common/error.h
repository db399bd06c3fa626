// The one exception of the native code, and the check that throws it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ncclep {

// A call of NCCL, of CUDA or of an engine's library failed.  Python sees errors.LibraryError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Joins its arguments into the text of an Error.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(parts...);
}

}  // namespace ncclep
