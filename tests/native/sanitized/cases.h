// Cases that a program runs one at a time, by name.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "common/error.h"

#define REQUIRE(holds)                                                         \
  do {                                                                         \
    if (!(holds)) {                                                            \
      std::fprintf(stderr, "FAILED: %s:%d: %s\n", __FILE__, __LINE__, #holds); \
      std::abort();                                                            \
    }                                                                          \
  } while (false)

// The text of the error that `call` must throw.
template <typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const ncclep::Error& error) {
    return error.what();
  }
  REQUIRE(!"an error was expected");
  return "";
}

template <typename Call>
bool refuses(Call&& call, const std::string& text) {
  const std::string found = error_of(call);
  if (found.find(text) != std::string::npos) return true;
  std::fprintf(stderr, "expected '%s' in: %s\n", text.c_str(), found.c_str());
  return false;
}

// Runs the case that the command line names; the name list without one.
inline int run_case(int count, char** words, const std::map<std::string, void (*)()>& cases) {
  if (count == 1) {
    for (const auto& [name, function] : cases) std::printf("%s\n", name.c_str());
    return 0;
  }
  cases.at(words[1])();
  return 0;
}
