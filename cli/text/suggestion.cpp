#include "cli/text/suggestion.hpp"

#include <algorithm>
#include <cctype>

namespace crossdock::cli {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(), [](unsigned char c) { return std::tolower(c); });
  return result;
}

// Letters to insert, delete, replace or exchange with their neighbour.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      size_t& best = cost[i][j];
      if (i == 0 || j == 0) {
        best = i + j;
        continue;
      }
      best = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1,
                       cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        best = std::min(best, cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

std::string closest_name(std::string_view word, const std::vector<std::string>& names) {
  const std::string typed = lower(word);
  // 3: begins with the word, 2: contains it, 1: differs by typing errors, 0: is another word.
  const auto kind_of = [&](const std::string& name, size_t changes) {
    const size_t position = typed.size() < 3 ? std::string::npos : name.find(typed);
    if (position != std::string::npos) return position == 0 ? 3 : 2;
    return changes <= std::max<size_t>(1, typed.size() / 4) ? 1 : 0;
  };
  std::string closest;
  int best_kind = 0;
  size_t least = 0;
  for (const std::string& name : names) {
    const size_t changes = distance(typed, lower(name));
    const int kind = kind_of(lower(name), changes);
    if (kind < best_kind || kind == 0 || (kind == best_kind && changes >= least)) continue;
    closest = name;
    best_kind = kind;
    least = changes;
  }
  return closest;
}

std::string suggestion(std::string_view word, const std::vector<std::string>& names) {
  const std::string name = closest_name(word, names);
  return name.empty() ? "" : "; did you mean \"" + name + "\"?";
}

std::string unknown_name(const std::string& what, const std::string& word,
                         const std::vector<std::string>& names, const std::string& list_command) {
  std::string known;
  for (const std::string& name : names) known += (known.empty() ? "" : ", ") + name;
  return (list_command.empty() ? what + " must be one of " + known
                               : what + " must be one of those that `" + list_command + "` lists") +
         "; got \"" + word + "\"" + suggestion(word, names);
}

}  // namespace crossdock::cli
