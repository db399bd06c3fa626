// The GPU that stands in for one: what tests tell it, and what it saw.
//
// Device memory is host memory, so that AddressSanitizer watches it, and every allocation has its
// own size.  A kernel is a function that reads and writes all memory that the real one may, and
// ends the process with a text when one of the real one's assumptions does not hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

namespace standin {

// Work on a stream is over at once, unless the stream is held: then it is over after `release`.
bool is_held(std::uintptr_t stream);
void hold(std::uintptr_t stream);
void run_on_device(std::uintptr_t stream, std::function<void()> work);
// Notes a kernel that may run only after all that were noted before in the same capture, or
// outside of captures; ends the process if nothing makes this stream wait for them.
void note_kernel(std::uintptr_t stream);

// Ends the process with the text, unless `holds`.
void require(bool holds, const char* text);

// Reads and writes `count` elements: one byte of each 8 that a sanitizer tells apart, and the last.
template <typename T>
void touch(T* memory, std::int64_t count, std::size_t itemsize = sizeof(T)) {
  require(count >= 0, "a negative number of elements");
  auto* bytes = reinterpret_cast<volatile char*>(const_cast<std::remove_const_t<T>*>(memory));
  const std::size_t num_bytes = count * itemsize;
  for (std::size_t i = 0; i < num_bytes; i += 8) bytes[i] = bytes[i];
  if (num_bytes > 0) bytes[num_bytes - 1] = bytes[num_bytes - 1];
}
inline void touch_bytes(const void* memory, std::int64_t num_bytes) {
  touch(static_cast<const char*>(memory), num_bytes);
}

}  // namespace standin
