#include "cli/processes/rank_failure.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/processes/parent_watch.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;

constexpr char kMark = '\x1e';  // begins a line that is a report

}  // namespace

bool is_rank_of_command() {
  const char* text = std::getenv(kEndsWithParent);
  return text != nullptr && *text != '\0';
}

void report_to_command(const RankFailure& failure) {
  const json report = {{"rank", failure.rank},
                       {"culprit", failure.culprit},
                       {"has_died", failure.has_died},
                       {"error", failure.message}};
  const std::string text = report.dump(-1, ' ', false, json::error_handler_t::replace);
  std::cout.flush();
  const std::string line = "\n" + std::string(1, kMark) + text + "\n";
  // One write, so that reports of several ranks do not mix.
  [[maybe_unused]] const ssize_t written = write(STDOUT_FILENO, line.data(), line.size());
}

std::vector<RankFailure> take_reports(std::string& output) {
  std::vector<RankFailure> failures;
  const std::string begin = {'\n', kMark};
  for (size_t at = 0; (at = output.find(begin, at)) != std::string::npos;) {
    const size_t text = at + begin.size();
    const size_t end = std::min(output.find('\n', text), output.size());
    const json report =
        json::parse(output.substr(text, end - text), nullptr, /*allow_exceptions=*/false);
    output.erase(at, std::min(end + 1, output.size()) - at);
    if (!report.is_object()) continue;
    failures.push_back({.rank = report.value("rank", -1),
                        .culprit = report.value("culprit", -1),
                        .has_died = report.value("has_died", false),
                        .message = report.value("error", "")});
  }
  std::ranges::sort(failures, {}, &RankFailure::rank);
  return failures;
}

std::string describe(const std::vector<RankFailure>& failures) {
  const auto died = std::ranges::find_if(failures, &RankFailure::has_died);
  if (died != failures.end()) return "rank " + std::to_string(died->rank) + " " + died->message;
  const RankFailure& first = failures.front();
  const auto culprit = std::ranges::find(failures, first.culprit, &RankFailure::rank);
  if (culprit == failures.end() || first.culprit < 0 || culprit->message == first.message) {
    return first.message;
  }
  return "rank " + std::to_string(culprit->rank) + ": " + culprit->message;
}

std::string describe_end(int status) {
  if (!WIFSIGNALED(status)) return "ended with status " + std::to_string(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return "was ended by signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
}

}  // namespace crossdock::cli
