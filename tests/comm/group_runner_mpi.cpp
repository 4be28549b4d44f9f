#include <mpi.h>

#include <algorithm>
#include <array>
#include <thread>

#include "comm/group_runner.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::testing {
namespace {

/// An outcome in the form in which processes exchange it.
struct PackedOutcome {
  int threw = 0;
  ErrorCode code = ErrorCode::kInternal;
  int culprit = -1;
  uint64_t sequence = 0;
  std::array<char, 32> operation{};
  std::array<char, 1024> message{};
};

template <size_t N>
void pack_text(const std::string& text, std::array<char, N>& packed) {
  std::copy_n(text.begin(), std::min(text.size(), N - 1), packed.begin());
}

std::vector<Outcome> gather_outcomes(const Outcome& own, int size) {
  PackedOutcome packed{.threw = own.threw ? 1 : 0,
                       .code = own.code,
                       .culprit = own.culprit,
                       .sequence = own.sequence};
  pack_text(own.operation, packed.operation);
  pack_text(own.message, packed.message);
  std::vector<PackedOutcome> all(static_cast<size_t>(size));
  MPI_Allgather(&packed, sizeof packed, MPI_BYTE, all.data(), sizeof packed, MPI_BYTE,
                MPI_COMM_WORLD);
  std::vector<Outcome> outcomes;
  outcomes.reserve(all.size());
  for (const PackedOutcome& one : all) {
    outcomes.push_back({.threw = one.threw != 0,
                        .code = one.code,
                        .culprit = one.culprit,
                        .sequence = one.sequence,
                        .operation = one.operation.data(),
                        .message = one.message.data()});
  }
  return outcomes;
}

}  // namespace

std::vector<int> group_sizes() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return {size};
}

std::vector<Outcome> run_group(int size, const std::function<void(Group&)>& body,
                               GroupOptions options) {
  // Several chunks for the larger blocks of the tests, and fewer requests than they post.
  const MpiOptions mpi{.chunk_bytes = 64 << 10, .max_in_flight = 8, .ranks_per_node = 0};
  auto group = std::make_unique<Group>(make_mpi_communicator(mpi), options);
  const Outcome own = outcome_of([&] {
    try {
      body(*group);
    } catch (const std::exception& error) {
      group->leave(std::string("it threw: ") + error.what());
      throw;
    }
    group->leave("it returned");
  });
  group.reset();
  return gather_outcomes(own, size);
}

void stall() {
  std::this_thread::sleep_for(3 * kShort);
}

}  // namespace crossdock::testing
