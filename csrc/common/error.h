// The exceptions of the native code, and the check that throws.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ncclep {

// A call of NCCL, of CUDA, of the system or of an engine's library failed.  Python sees
// errors.LibraryError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Another rank died, did not come in time, or is in another call.  Python sees errors.PeerError.
class PeerError : public Error {
 public:
  using Error::Error;
};

// Joins its arguments into one text.
template <typename... Parts>
std::string join_text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Joins its arguments into the text of an Error.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(join_text(parts...));
}

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(parts...);
}

}  // namespace ncclep
