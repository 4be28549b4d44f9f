// `crossdock verify --random`
#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>

#include "cli/commands.hpp"
#include "cli/device/rank_device.hpp"
#include "cli/output_file.hpp"
#include "cli/processes/interruption.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/progress_line.hpp"
#include "cli/verify/case_file.hpp"
#include "cli/verify/case_watch.hpp"
#include "cli/verify/random_cases.hpp"
#include "cli/verify/random_report.hpp"

namespace crossdock::cli {
namespace {

using testing::RandomCase;
using Clock = std::chrono::steady_clock;

constexpr int kThreads = 8;    // default limits on ranks
constexpr int kProcesses = 4;  // also if several communicators are compared
constexpr std::chrono::seconds kLimitOfCase{200};
constexpr std::chrono::seconds kTimeToReduce{120};  // all cases of a run
constexpr std::chrono::milliseconds kBetweenUpdates{100};

uint64_t new_seed() {
  std::random_device device;
  return device();  // 32 bits: short enough to type
}

RandomRun run_of(const VerifyArgs& args, uint64_t seed, int most_ranks) {
  return {.seed = seed,
          .first = args.first.value_or(0),
          .count = *args.random,
          .most_ranks = most_ranks,
          .strategies = args.strategies,
          .candidates = candidates_on(args.device),
          .on_gpu = args.device == "cuda",
          .group = group_options_of_cases()};
}

// Shows position, rate and time left.
class RandomProgress {
 public:
  RandomProgress(const RandomRun& run, std::string communicator)
      : run_(run), communicator_(std::move(communicator)) {}

  void show(int64_t number) {
    const Clock::time_point now = Clock::now();
    if (now - shown_ < kBetweenUpdates) return;
    shown_ = now;
    const auto done = static_cast<double>(number - run_.first);
    const double rate = done / std::chrono::duration<double>(now - begin_).count();
    const double left = rate > 0 ? (static_cast<double>(run_.count) - done) / rate : 0.0;
    line_.show(std::to_string(number - run_.first) + " of " + counted(run_.count, "random case") +
               " (" + communicator_ + "), " + fixed(rate, 0) + " per second, " + fixed(left, 0) +
               " s left");
  }

 private:
  const RandomRun& run_;
  std::string communicator_;
  ProgressLine line_;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point shown_ = begin_;
};

// The options besides number and seed on which a case and how it runs depend.
std::string options_of_case(const VerifyArgs& args, const RandomRun& run,
                            const std::string& communicator) {
  std::string options =
      " --ranks " + std::to_string(run.most_ranks) + " --communicator " + communicator;
  for (const std::string& strategy : args.strategies) options += " --strategy " + strategy;
  if (args.device != "cpu") options += " --device " + args.device;
  return options;
}

// Runs with progress, and with a note of the case if the process does not survive it.
// `shows`: on rank 0. `keep`: called with what has been found so far.
RandomResult watched(const VerifyArgs& args, RandomRun& run, const std::string& communicator,
                     bool shows, const auto& keep, const auto& body) {
  RandomProgress progress(run, communicator);
  CaseWatch watch({.seed = run.seed, .options = options_of_case(args, run, communicator)},
                  kLimitOfCase);
  run.progress = [&](int64_t number, const RandomResult& so_far) {
    watch.begin(number);
    keep(so_far);
    if (shows) progress.show(number);
  };
  run.idle = [&] { watch.pause(); };
  return body();
}

RandomReport run_on_threads(const VerifyArgs& args, uint64_t seed, int most_ranks,
                            const std::function<void(const RandomReport&)>& keep) {
  const Clock::time_point begin = Clock::now();
  RandomRun run = run_of(args, seed, most_ranks);
  RandomReport report{
      .communicator = "threads", .device = args.device, .ranks = most_ranks, .seed = seed};
  const auto keep_result = [&](const RandomResult& so_far) {
    report.result = so_far;
    report.result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    keep(report);
  };
  report.result =
      watched(args, run, "threads", true, keep_result, [&] { return run_random_on_threads(run); });
  return report;
}

RandomReport run_on_processes(const VerifyArgs& args, const std::string& communicator,
                              uint64_t seed, int most_ranks) {
  std::vector<std::string> words = {"verify", "--json", "--always-zero"};
  const auto add = [&](const char* option, const std::string& value) {
    words.insert(words.end(), {option, value});
  };
  add("--random", std::to_string(*args.random));
  add("--seed", std::to_string(seed));
  add("--first", std::to_string(args.first.value_or(0)));
  add("--communicator", communicator);
  add("--device", args.device);
  for (const std::string& strategy : args.strategies) add("--strategy", strategy);
  const std::string output = run_processes({.communicator = communicator,
                                            .ranks = most_ranks,
                                            .args = words,
                                            .limit = std::chrono::seconds(600 + *args.random)});
  std::vector<RandomReport> reports = parse_random_reports(output);
  if (reports.size() != 1) throw Error(ErrorCode::kInternal, "the ranks printed no report");
  return std::move(reports.front());
}

// Reduces the case of a failure and writes its file. On threads if it fails there too, which is
// quick, else in processes, of which each try needs new ones. Not reduced further after `end`.
void write_case(const VerifyArgs& args, const RandomReport& report, Clock::time_point end,
                RandomFailure& failure) {
  const RandomRun run = run_of(args, report.seed, report.ranks);
  const std::string file = (args.output.empty() ? "" : args.output + "/") + "crossdock-case-" +
                           std::to_string(report.seed) + "-" + std::to_string(failure.number) +
                           ".json";
  const RandomCase whole = make_random_case(report.seed, failure.number, report.ranks, run.on_gpu);
  const auto write = [&](const RandomCase& one, const std::string& communicator) {
    write_file("the case", file, one.to_file(failure.strategy, communicator, args.device) + "\n");
  };
  const auto fails_alone = [&](const RandomCase& one) {
    return !judge_on_threads(run, one, failure.strategy).passed();
  };
  const auto fails_on_threads = [&](const RandomCase& one) {
    return Clock::now() < end && fails_alone(one);
  };
  const auto fails_in_processes = [&](const RandomCase& one) {
    if (Clock::now() >= end) return false;
    write(one, report.communicator);
    try {
      return !run_case_file({failure.strategy, report.communicator, args.device, one}, file)
                  .passed();
    } catch (const Error&) {
      return true;  // the processes ended
    }
  };
  write(whole, report.communicator);  // something is left if the reduction is interrupted
  failure.file = file;
  if (fails_alone(whole)) return write(testing::reduce(whole, fails_on_threads), "threads");
  if (report.communicator == "threads") return;  // it does not always fail
  write(testing::reduce(whole, fails_in_processes), report.communicator);
}

// The report is printed even if a file cannot be written.
void write_cases(const VerifyArgs& args, RandomReport& report) {
  const Clock::time_point end = Clock::now() + kTimeToReduce;
  for (RandomFailure& failure : report.result.failures) {
    try {
      write_case(args, report, end, failure);
    } catch (const Error& error) {
      failure.findings.emplace_back(error.what());
    }
  }
}

// In the process that writes the cases, before the first one. A run that is killed prints no
// report.
void begin_run(const VerifyArgs& args, uint64_t seed) {
  if (!args.output.empty()) check_output_file("cases", args.output + "/crossdock-case.json");
  if (!args.seed) std::cerr << "crossdock verify: random cases of seed " << seed << std::endl;
}

// In a job, every process uses the seed of rank 0.
uint64_t agreed_seed(const VerifyArgs& args, const std::string& job) {
  if (args.seed) return *args.seed;
  const uint64_t own = new_seed();
  Group group(make_job_communicator(job, {}));
  const Agreement all =
      group.agree({.operation = "seed", .body = std::as_bytes(std::span<const uint64_t>(&own, 1))});
  uint64_t seed = 0;
  std::memcpy(&seed, all.body(0).data(), sizeof(seed));
  return seed;
}

void write_reports(const VerifyArgs& args, const std::vector<RandomReport>& reports) {
  std::cout << (args.json ? to_json(reports) + "\n" : to_text(reports, output_style()))
            << std::flush;
}

int print(const VerifyArgs& args, std::vector<RandomReport> reports) {
  compare_checksums(reports);
  const bool passed = std::ranges::all_of(reports, &RandomReport::passed);
  write_reports(args, reports);
  return passed || args.always_zero ? 0 : 1;
}

// This process is one rank of a job.
int run_as_rank(const VerifyArgs& args, const std::string& job) {
  const uint64_t seed = agreed_seed(args, job);
  const std::unique_ptr<Communicator> whole = make_job_communicator(job, {});
  if (whole->rank() == 0 && !args.always_zero) begin_run(args, seed);
  check_against_job(*whole, args.communicators, args.ranks);
  RandomRun run = run_of(args, seed, whole->size());
  const auto connect = [&](int ranks_per_node) {
    return make_job_communicator(job, {.ranks_per_node = ranks_per_node});
  };
  RandomReport report{.communicator = job,
                      .device = args.device,
                      .ranks = whole->size(),
                      .seed = seed,
                      .result = watched(
                          args, run, job, whole->rank() == 0, [](const RandomResult&) {},
                          [&] { return run_random_as_process(run, connect); })};
  if (whole->rank() != 0) return 0;
  // The process that started the ranks, if it is this program, reduces and writes the cases.
  if (!args.always_zero) write_cases(args, report);
  return print(args, {std::move(report)});
}

void check_arguments(const VerifyArgs& args) {
  if (args.quick || args.faults || args.list || !args.cases.empty() || !args.dtypes.empty() ||
      args.ranks_per_node > 0) {
    throw ArgumentError(
        "--random chooses everything itself and cannot be combined with --quick, --faults, "
        "--list, --case, --dtype or --ranks-per-node");
  }
  if (args.ranks.size() > 1) throw ArgumentError("--random takes one number, the most ranks");
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw Error(ErrorCode::kInvalidArgument, "cannot read \"" + path + "\"");
  return text.str();
}

}  // namespace

int run_verify_case_file(const VerifyArgs& args) {
  const CaseFile file = parse_case_file(read_file(args.case_file));
  const std::string job = launched_communicator(args.communicators);
  const CaseReport report =
      job.empty() ? run_case_file(file, args.case_file) : run_case_file_as_rank(file, job);
  if (speaks_for_job(job)) std::cout << to_json(report) << "\n" << std::flush;
  return report.passed() || args.always_zero ? 0 : 1;
}

int run_verify_random(const VerifyArgs& args) {
  check_arguments(args);
  if (args.device == "cuda") prepare_gpus();
  if (const std::string job = launched_communicator(args.communicators); !job.empty()) {
    return run_as_rank(args, job);
  }
  const std::vector<std::string> communicators =
      args.communicators.empty() ? std::vector<std::string>{"threads"} : args.communicators;
  const bool has_processes = communicators != std::vector<std::string>{"threads"};
  const int most_ranks =
      !args.ranks.empty() ? args.ranks.front() : (has_processes ? kProcesses : kThreads);
  const uint64_t seed = args.seed ? *args.seed : new_seed();
  begin_run(args, seed);
  std::vector<RandomReport> reports;
  std::vector<RandomReport> so_far;  // the same, and what has been found of one that still runs
  Interruption interruption([&] {
    ProgressLine().show("");
    if (so_far.empty()) return;
    write_reports(args, so_far);
    std::cerr << "interrupted after " << so_far.back().result.num_cases << " of "
              << counted(*args.random, "random case") << " on " << so_far.back().communicator
              << "\n";
  });
  const auto keep = [&](const RandomReport& running) {
    interruption.change([&] {
      so_far = reports;
      so_far.push_back(running);
    });
  };
  for (const std::string& communicator : communicators) {
    reports.push_back(communicator == "threads"
                          ? run_on_threads(args, seed, most_ranks, keep)
                          : run_on_processes(args, communicator, seed, most_ranks));
    write_cases(args, reports.back());
    interruption.change([&] { so_far = reports; });
  }
  return print(args, std::move(reports));
}

}  // namespace crossdock::cli
