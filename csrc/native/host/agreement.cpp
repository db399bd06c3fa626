#include "native/host/agreement.h"

#include <algorithm>
#include <exception>
#include <vector>

#include "common/error.h"

namespace ncclep::native {

namespace {

// Of a rank's problem; longer ones are truncated.
constexpr std::size_t kTextBytes = 1024;

}  // namespace

std::string Agreement::gather_problems(const std::string& problem, const char* what) const {
  std::string mine = problem.substr(0, kTextBytes);
  mine.resize(kTextBytes, '\0');
  std::string all(num_ranks_ * kTextBytes, '\0');
  all_gather_(mine.data(), mine.size(), all.data(),
              join_text(what, ", exchanging error messages").c_str());
  std::vector<std::string> problems;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const std::string text = all.substr(rank * kTextBytes, kTextBytes);
    problems.push_back(text.substr(0, text.find('\0')));
  }
  const auto is_first = [&](const std::string& text) { return text == problems.front(); };
  if (num_ranks_ > 1 && std::all_of(problems.begin(), problems.end(), is_first)) {
    return problems.front();
  }
  std::string joined;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (problems[rank].empty()) continue;
    joined += join_text(joined.empty() ? "" : "; ", "rank ", rank, ": ", problems[rank]);
  }
  return joined;
}

void Agreement::on_all_ranks(const char* what, const std::function<void()>& step,
                             const std::string& remedy) const {
  std::string problem;
  try {
    step();
  } catch (const std::exception& error) {  // of any kind: the other ranks have to know
    problem = error.what();
  }
  const std::string problems = gather_problems(problem, what);
  ensure(problems.empty(), "engine 'native', ", what, " (", cause_, "): ", problems, "; ", remedy);
}

}  // namespace ncclep::native
