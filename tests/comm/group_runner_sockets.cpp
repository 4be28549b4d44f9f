// Ranks are processes that run_group forks; they exchange their blobs in shared memory.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "comm/group_runner.hpp"
#include "crossdock/sockets.hpp"

#ifndef CROSSDOCK_TEST_RANKS_PER_NODE
#define CROSSDOCK_TEST_RANKS_PER_NODE 0
#endif

namespace crossdock::testing {
namespace {

constexpr int kMaxRanks = 16;
constexpr std::chrono::seconds kProcessDeadline{1200};

/// Messages from one process to the others and to the test.
struct Seat {
  std::atomic<int> has_blob = 0;
  size_t blob_bytes = 0;
  std::array<std::byte, 1024> blob{};
  std::atomic<int> has_ended = 0;
  int threw = 0;
  ErrorCode code = ErrorCode::kInternal;
  int culprit = -1;
  uint64_t sequence = 0;
  std::array<char, 32> operation{};
  std::array<char, 2048> message{};
  std::array<char, 4096> failed_expectations{};
};

struct Board {
  std::array<Seat, kMaxRanks> seats;
};

Board* board = nullptr;  // of the current run_group
int board_size = 0;

template <size_t N>
void set_text(std::array<char, N>& target, const std::string& text) {
  const size_t length = std::min(text.size(), N - 1);
  std::copy_n(text.begin(), length, target.begin());
  target[length] = '\0';
}

void sleep_a_little() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::vector<std::vector<std::byte>> exchange_blobs(std::span<const std::byte> own, int rank) {
  Seat& seat = board->seats[static_cast<size_t>(rank)];
  seat.blob_bytes = own.size();
  std::copy(own.begin(), own.end(), seat.blob.begin());
  seat.has_blob = 1;
  std::vector<std::vector<std::byte>> blobs;
  for (int other = 0; other < board_size; ++other) {
    const Seat& theirs = board->seats[static_cast<size_t>(other)];
    while (theirs.has_blob == 0) sleep_a_little();
    blobs.emplace_back(theirs.blob.begin(),
                       theirs.blob.begin() + static_cast<ptrdiff_t>(theirs.blob_bytes));
  }
  return blobs;
}

/// Runs in the process of the rank.
void run_rank(int rank, const std::function<void(Group&)>& body, const GroupOptions& options) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const int num_results_before = test->result()->total_part_count();
  Seat& seat = board->seats[static_cast<size_t>(rank)];
  const Outcome outcome = outcome_of([&] {
    // Several chunks and windows for the larger blocks of the tests.
    SocketsBootstrap bootstrap({.chunk_bytes = 16 << 10,
                                .window_bytes = 64 << 10,
                                .ranks_per_node = CROSSDOCK_TEST_RANKS_PER_NODE,
                                .address = "127.0.0.1",
                                .setup_deadline = kAmple});
    const auto blobs = exchange_blobs(bootstrap.blob(), rank);
    Group group(bootstrap.join(blobs, rank), options);
    try {
      body(group);
    } catch (const std::exception& error) {
      group.leave(std::string("it threw: ") + error.what());
      throw;
    }
    group.leave("it returned");
  });
  seat.threw = outcome.threw ? 1 : 0;
  seat.code = outcome.code;
  seat.culprit = outcome.culprit;
  seat.sequence = outcome.sequence;
  set_text(seat.operation, outcome.operation);
  set_text(seat.message, outcome.message);
  std::string failed;
  for (int i = num_results_before; i < test->result()->total_part_count(); ++i) {
    const auto& part = test->result()->GetTestPartResult(i);
    if (part.failed()) failed += std::string(part.message()) + "\n";
  }
  set_text(seat.failed_expectations, failed);
  seat.has_ended = 1;
}

/// Waits for the process; ends it if it takes too long.
std::string end_of(pid_t process) {
  const auto deadline = std::chrono::steady_clock::now() + kProcessDeadline;
  int status = 0;
  while (waitpid(process, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(process, SIGKILL);
      waitpid(process, &status, 0);
      return "its process hung and was killed";
    }
    sleep_a_little();
  }
  return WIFSIGNALED(status) ? "its process died of signal " + std::to_string(WTERMSIG(status))
                             : "its process ended early";
}

Outcome outcome_in(const Seat& seat, const std::string& how_it_ended) {
  if (seat.has_ended == 0) return {.threw = true, .message = how_it_ended};
  return {.threw = seat.threw != 0,
          .code = seat.code,
          .culprit = seat.culprit,
          .sequence = seat.sequence,
          .operation = seat.operation.data(),
          .message = seat.message.data()};
}

}  // namespace

std::vector<int> group_sizes() {
  return {1, 2, 4, 7, 8};
}

std::vector<Outcome> run_group(int size, const std::function<void(Group&)>& body,
                               GroupOptions options) {
  void* memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || size > kMaxRanks) throw std::runtime_error("cannot run the group");
  board = new (memory) Board;
  board_size = size;
  std::fflush(nullptr);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = fork();
    if (process == 0) {
      run_rank(rank, body, options);
      std::fflush(nullptr);
      _exit(0);
    }
    if (process > 0) processes.push_back(process);
  }
  std::vector<Outcome> outcomes;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    const std::string end = end_of(processes[rank]);
    const Seat& seat = board->seats[rank];
    outcomes.push_back(outcome_in(seat, end));
    if (seat.failed_expectations[0] != '\0') {
      ADD_FAILURE() << "rank " << rank << ": " << seat.failed_expectations.data();
    }
  }
  munmap(memory, sizeof(Board));
  board = nullptr;
  if (static_cast<int>(processes.size()) != size) throw std::runtime_error("cannot fork");
  return outcomes;
}

void stall() {
  const auto num_ended = [] {
    return std::count_if(board->seats.begin(), board->seats.begin() + board_size,
                         [](const Seat& seat) { return seat.has_ended != 0; });
  };
  while (num_ended() < board_size - 1) sleep_a_little();
}

}  // namespace crossdock::testing
