#include "cli/eval/processes.hpp"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <span>

#include "cli/processes/free_port.hpp"
#include "crossdock/group.hpp"
#include "crossdock/sockets.hpp"

namespace crossdock::cli {
namespace {

// Vectors of numbers as one row of doubles, which represent all of them exactly.
class NumberWriter {
 public:
  template <typename Number>
  void add(const std::vector<Number>& numbers) {
    row_.push_back(static_cast<double>(numbers.size()));
    for (const Number number : numbers) row_.push_back(static_cast<double>(number));
  }
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(row_)); }

 private:
  std::vector<double> row_;
};

class NumberReader {
 public:
  explicit NumberReader(std::span<const std::byte> bytes) : row_(bytes.size() / sizeof(double)) {
    std::memcpy(row_.data(), bytes.data(), bytes.size());
  }
  template <typename Number>
  void take(std::vector<Number>& numbers) {
    numbers.resize(static_cast<size_t>(row_[next_++]));
    for (Number& number : numbers) number = static_cast<Number>(row_[next_++]);
  }

 private:
  std::vector<double> row_;
  size_t next_ = 0;
};

// Calls `action` with every vector that a rank contributes to the result.
template <typename Action>
void for_each_part(EvalRank& rank, std::vector<reference::MlpWeights>& expert_grads,
                   const Action& action) {
  action(rank.rows);
  action(rank.rows_per_expert);
  action(rank.out);
  action(rank.grad_x);
  action(rank.grad_weights);
  action(rank.dropped);
  for (reference::MlpWeights& grads : expert_grads) {
    action(grads.w1);
    action(grads.b1);
    action(grads.w2);
    action(grads.b2);
  }
}

// Every rank gets the results of all; an expert's gradients are those of its owner.
void share_results(Group& group, EvalResult& result) {
  NumberWriter own;
  for_each_part(result.ranks[static_cast<size_t>(group.rank())], result.expert_grads,
                [&](const auto& numbers) { own.add(numbers); });
  const Agreement all = group.agree({.operation = "results", .body = own.bytes()});
  for (int rank = 0; rank < group.size(); ++rank) {
    NumberReader reader(all.body(rank));
    std::vector<reference::MlpWeights> grads(result.expert_grads.size());
    for_each_part(result.ranks[static_cast<size_t>(rank)], grads,
                  [&](auto& numbers) { reader.take(numbers); });
    for (size_t e = 0; e < grads.size(); ++e) {
      if (!grads[e].w1.empty()) result.expert_grads[e] = std::move(grads[e]);
    }
  }
}

EvalResult run_as_rank(const SocketsLaunch& launch, const EvalCase& eval_case) {
  SocketsOptions options;
  options.ranks_per_node = eval_case.ranks_per_node;
  Group group(make_sockets_communicator(launch, std::move(options)));
  EvalResult result = empty_result(eval_case);
  run_rank(group, eval_case, result);
  share_results(group, result);
  return result;
}

// Forked ranks. The destructor ends them: rank 0 has its results by then, or an error.
class ForkedRanks {
 public:
  ForkedRanks() = default;
  ~ForkedRanks() {
    for (const pid_t pid : pids_) kill(pid, SIGKILL);
    for (const pid_t pid : pids_) waitpid(pid, nullptr, 0);
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  void start(const SocketsLaunch& launch, const EvalCase& eval_case) {
    const pid_t pid = fork();
    if (pid < 0) throw Error(ErrorCode::kCommunication, "cannot start a process for a rank");
    if (pid > 0) {
      pids_.push_back(pid);
      return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      run_as_rank(launch, eval_case);
    } catch (const std::exception&) {
      // Rank 0 gets the same error and reports it.
    }
    _exit(0);
  }

 private:
  std::vector<pid_t> pids_;
};

}  // namespace

EvalResult run_case_on_processes(const EvalCase& eval_case) {
  SocketsLaunch launch;
  launch.size = eval_case.num_ranks();
  launch.master_port = find_free_port();
  launch.job = std::to_string(getpid());
  ForkedRanks others;
  for (launch.rank = 1; launch.rank < launch.size; ++launch.rank) others.start(launch, eval_case);
  launch.rank = 0;
  return run_as_rank(launch, eval_case);
}

}  // namespace crossdock::cli
