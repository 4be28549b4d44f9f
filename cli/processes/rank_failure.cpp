#include "cli/processes/rank_failure.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "cli/json.hpp"
#include "cli/processes/parent_watch.hpp"

namespace crossdock::cli {

static void describe(auto& fields, RankFailure& failure) {
  fields("rank", failure.rank);
  fields("culprit", failure.culprit);
  fields("has_died", failure.has_died);
  fields("error", failure.message);
}

static void describe(auto& fields, RankProgress& progress) {
  fields("done", progress.done);
  fields("words", progress.words);
}

namespace {

constexpr char kMark = '\x1e';          // begins a line that is a report of a failure
constexpr char kProgressMark = '\x1f';  // or of progress

// Its launcher and the ranks of a job share one pipe: one write, so that reports do not mix.
void write_report(char mark, const Json& report) {
  std::cout.flush();
  const std::string line = "\n" + std::string(1, mark) + json_text(report, 0) + "\n";
  [[maybe_unused]] const ssize_t written = write(STDOUT_FILENO, line.data(), line.size());
}

// Removes the complete reports with this mark from position `at` on, and passes each to `take`.
// Returns the position before which none can begin any more.
size_t take_all(char mark, std::string& output, size_t at, const auto& take) {
  const std::string begin = {'\n', mark};
  while ((at = output.find(begin, at)) != std::string::npos) {
    const size_t text = at + begin.size();
    const size_t end = output.find('\n', text);
    if (end == std::string::npos) return at;
    const Json report =
        Json::parse(output.substr(text, end - text), nullptr, /*allow_exceptions=*/false);
    output.erase(at, end + 1 - at);
    if (report.is_object()) take(report);
  }
  return output.ends_with('\n') ? output.size() - 1 : output.size();
}

}  // namespace

bool is_rank_of_command() {
  const char* text = std::getenv(kEndsWithParent);
  return text != nullptr && *text != '\0';
}

void report_to_command(const RankFailure& failure) {
  write_report(kMark, json_of(failure));
}

void report_progress(const RankProgress& progress) {
  write_report(kProgressMark, json_of(progress));
}

std::optional<RankProgress> take_progress(std::string& output, size_t& searched) {
  std::optional<RankProgress> last;
  searched = take_all(kProgressMark, output, searched,
                      [&](const Json& report) { read_json(report, last.emplace()); });
  return last;
}

std::vector<RankFailure> take_reports(std::string& output) {
  std::vector<RankFailure> failures;
  take_all(kMark, output, 0,
           [&](const Json& report) { read_json(report, failures.emplace_back()); });
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
