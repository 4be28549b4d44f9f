// What a notice of a long wait says. Not in waiting.cpp, which the MPI plugin contains too: it
// would export this member a second time.
#include <cmath>

#include "comm/waiting.hpp"
#include "core/check.hpp"

namespace crossdock {
namespace comm {
namespace {

// Whole seconds, unless there are few of them: tests have short deadlines.
std::string to_rough_text(std::chrono::nanoseconds duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  return concat(seconds < 3 ? std::round(seconds * 10) / 10 : std::round(seconds), " s");
}

}  // namespace

std::string to_ranks_text(std::span<const int> ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < ranks.size() && i < kMaxNamedRanks; ++i) {
    text += concat(i > 0 ? ", " : "", ranks[i]);
  }
  return ranks.size() > kMaxNamedRanks ? text + ", ..." : text;
}

}  // namespace comm

std::string WaitNotice::text() const {
  const bool is_setup = sequence == 0;
  return concat(
      "rank ", rank, " of ", size, ": waiting for ",
      awaited.empty() ? std::string("other ranks") : comm::to_ranks_text(awaited),
      is_setup ? std::string(" to start") : concat(" in ", operation, " (call ", sequence, ")"),
      " for ", comm::to_rough_text(waited), "; gives up in ", comm::to_rough_text(left));
}

}  // namespace crossdock
