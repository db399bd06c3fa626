// The exceptions of the native code, and the check that throws.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace ncclep {

// A call to NCCL, CUDA, the system or an engine's library failed.  Python sees errors.LibraryError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A value is wrong, and nothing was done.  Python, which checks values before, sees LibraryError.
class ArgumentError : public Error {
 public:
  using Error::Error;
};

// The values are right, but the call is not allowed now.  Python sees errors.InputError.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Another rank died, missed the deadline, or is in a different call.  Python sees errors.PeerError.
class PeerError : public Error {
 public:
  using Error::Error;
};

// A callback of the caller ended the call.  Python sees the callback's exception.
class InterruptedError : public Error {
 public:
  using Error::Error;
};

// Formats a number, a pointer or a string.  Avoids iostreams: their locales crash in a process that
// has two copies of the C++ library, one of them linked into this extension.
template <typename Part>
std::string text_of(const Part& part) {
  char digits[32];
  if constexpr (std::is_floating_point_v<Part>) {
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    return digits;
  } else if constexpr (std::is_integral_v<Part>) {
    return std::to_string(part);
  } else if constexpr (std::is_same_v<Part, void*>) {
    std::snprintf(digits, sizeof(digits), "%p", part);
    return digits;
  } else {
    return std::string(part);
  }
}

// Joins its arguments into one text.
template <typename... Parts>
std::string join_text(const Parts&... parts) {
  return (std::string() + ... + text_of(parts));
}

// Joins its arguments into the text of an Error.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(join_text(parts...));
}

// Checks the result of a call to something else.
template <typename... Parts>
void ensure(bool holds, const Parts&... parts) {
  if (!holds) fail(parts...);
}

// Checks the caller's arguments.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw ArgumentError(join_text(parts...));
}

}  // namespace ncclep
