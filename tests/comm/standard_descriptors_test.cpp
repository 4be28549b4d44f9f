// The library owns none of the descriptors 0 to 2, even in a program that has closed them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/group_runner.hpp"
#include "comm/memory/descriptor_socket.hpp"
#include "comm/memory/window.hpp"
#include "core/descriptor.hpp"
#include "crossdock/sockets.hpp"
#include "support/forked_child.hpp"

namespace crossdock::testing {
namespace {

constexpr int kFirstOther = STDERR_FILENO + 1;

void close_standard_descriptors() {
  for (int number = 0; number < kFirstOther; ++number) close(number);
}

/// One bit for each of them that is open.
int open_standard_descriptors() {
  int open_ones = 0;
  for (int number = 0; number < kFirstOther; ++number) {
    if (fcntl(number, F_GETFD) >= 0) open_ones |= 1 << number;
  }
  return open_ones;
}

constexpr int kHasThrown = 64;

/// The open standard descriptors after `body`, which ran without any.
int left_by(const std::function<void()>& body) {
  return exit_status_of_child([&] {
    close_standard_descriptors();
    return outcome_of(body).threw ? kHasThrown : open_standard_descriptors();
  });
}

/// Rank 0 passes the handle of its window to all, who read it.
void share_a_window(Group& group) {
  comm::WindowPool pool(group.communicator());
  const Buffer own = pool.take(100);
  own.data()[0] = std::byte{7};
  const comm::WindowHandle handle = *pool.find(own.data(), 100);
  const Agreement all =
      group.agree({.operation = "windows", .body = std::as_bytes(std::span(&handle, 1))});
  comm::WindowHandle of_rank_0;
  std::memcpy(&of_rank_0, all.body(0).data(), sizeof of_rank_0);
  EXPECT_EQ(*pool.reach(0, of_rank_0), std::byte{7});
  // A rank that is further may have failed the group already.
  static_cast<void>(outcome_of([&] { group.agree({.operation = "end"}); }));
}

/// Rank of a group whose ranks make one node, or two with TCP connections between them.
int run_as_rank(SocketsLaunch launch, int ranks_per_node) {
  alarm(kHangSeconds);
  close_standard_descriptors();
  int left = 0;
  const Outcome outcome = outcome_of([&] {
    GroupOptions options = ample_deadlines();
    options.report_file = ::testing::TempDir() + "standard_descriptors_" + launch.job;
    Group group(make_sockets_communicator(
                    launch, {.ranks_per_node = ranks_per_node, .setup_deadline = kAmple}),
                options);
    left = open_standard_descriptors();
    share_a_window(group);
    left |= open_standard_descriptors();
    group.fail(Error(ErrorCode::kCommunication, "writes a flight report"));
  });
  left |= open_standard_descriptors();
  return outcome.threw || ::testing::Test::HasFailure() ? kHasThrown : left;
}

TEST(StandardDescriptors, AreNotOwnedByGroupsOfProcesses) {
  constexpr int kSize = 4;
  for (const int ranks_per_node : {0, 2}) {
    const std::string job = std::to_string(getpid());
    std::vector<pid_t> processes;
    for (int rank = 0; rank < kSize; ++rank) {
      processes.push_back(fork());
      if (processes.back() != 0) continue;
      _exit(run_as_rank({.rank = rank,
                         .size = kSize,
                         .master_address = "127.0.0.1",
                         .master_port = 20000 + getppid() % 12000,
                         .job = job},
                        ranks_per_node));
    }
    for (const pid_t process : processes) {
      int status = -1;
      waitpid(process, &status, 0);
      EXPECT_EQ(status, 0);
    }
    unlink((::testing::TempDir() + "standard_descriptors_" + job).c_str());
  }
}

TEST(StandardDescriptors, AreNotOwnedByConnectionsThatPassDescriptors) {
  EXPECT_EQ(left_by([] {
              comm::DescriptorListener listener;
              const comm::DescriptorConnection here(listener.address());
              std::vector<comm::DescriptorConnection> accepted = listener.accept();
              const Descriptor file(memfd_create("standard_descriptors", MFD_CLOEXEC));
              here.send(file, {});
              std::optional<comm::DescriptorConnection::Received> received;
              while (!received) received = accepted.at(0).receive();
              const comm::ServedConnection served(std::move(accepted[0]),
                                                  {.take = [](const auto&) {}, .closed = [] {}});
              if (open_standard_descriptors() != 0) throw Error(ErrorCode::kInternal, "owned");
            }),
            0);
}

// Another library opens its own descriptors while it starts: MPI, NCCL, the CUDA driver.
TEST(StandardDescriptors, AreNotGivenToOtherLibrariesWhileTheyStart) {
  EXPECT_EQ(left_by([] {
              const StandardDescriptorGuard outer;
              const int opened_by_library = open("/dev/null", O_RDONLY | O_CLOEXEC);
              { const StandardDescriptorGuard inner; }
              const int opened_later = open("/dev/null", O_RDONLY | O_CLOEXEC);
              if (opened_by_library < kFirstOther || opened_later < kFirstOther) {
                throw Error(ErrorCode::kInternal, "given");
              }
            }),
            0);
}

// The program may use the numbers itself; then nothing is opened or closed there.
TEST(StandardDescriptors, ThatAreOpenAreLeftAlone) {
  EXPECT_EQ(exit_status_of_child([] {
              close(STDOUT_FILENO);
              { const StandardDescriptorGuard guard; }
              return open_standard_descriptors();
            }),
            1 << STDIN_FILENO | 1 << STDERR_FILENO);
}

}  // namespace
}  // namespace crossdock::testing
