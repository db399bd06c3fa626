// How the C interface's structs are read and written, those of older callers too.
#pragma once

#include <cstddef>
#include <cstring>

#include "common/error.h"
#include "include/ncclep.h"

namespace ncclep {

// Bytes of a struct in the first version of the interface, which no caller's is smaller than.  A
// struct to which fields were appended has a line of its own here.
template <typename Struct>
inline constexpr std::size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr std::size_t kFirstSize<ncclepGroupInfo_t> =
    offsetof(ncclepGroupInfo_t, num_domains);
template <>
inline constexpr std::size_t kFirstSize<ncclepPlanConfig_t> =
    offsetof(ncclepPlanConfig_t, leaves_unused);

template <typename Struct>
void require_size(const Struct* given, const char* name) {
  require(given != nullptr, name, ": NULL");
  require(kFirstSize<Struct> <= given->size && given->size <= sizeof(Struct), name, " of ",
          given->size, " bytes: this library, version ", NCCLEP_VERSION, ", knows one of ",
          sizeof(Struct), "; initialise it with the macro next to it, and use a library that is ",
          "at least as new as the header");
}

// The struct that the caller passed; fields that an older caller does not know are zero.  `name` is
// its type's.
template <typename Struct>
Struct read(const Struct* given, const char* name) {
  require_size(given, name);
  Struct all{};
  std::memcpy(static_cast<void*>(&all), given, given->size);
  return all;
}

// Writes a struct that the caller has initialised, as far as the caller knows it.
template <typename Struct>
void write(Struct made, Struct* given, const char* name) {
  require_size(given, name);
  made.size = given->size;
  std::memcpy(static_cast<void*>(given), &made, given->size);
}

}  // namespace ncclep
