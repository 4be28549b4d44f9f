// The MPI communicator releases the MPI resources it takes. This file intercepts its calls.
#include <gtest/gtest.h>
#include <mpi.h>

#include <atomic>
#include <memory>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"

namespace {

std::atomic<int> num_open = 0;  // communicators made and not freed

int count(int result) {
  if (result == MPI_SUCCESS) ++num_open;
  return result;
}

}  // namespace

extern "C" int MPI_Comm_dup(MPI_Comm communicator, MPI_Comm* copy) {
  return count(PMPI_Comm_dup(communicator, copy));
}

extern "C" int MPI_Comm_create_group(MPI_Comm communicator, MPI_Group group, int tag,
                                     MPI_Comm* part) {
  return count(PMPI_Comm_create_group(communicator, group, tag, part));
}

extern "C" int MPI_Comm_split_type(MPI_Comm communicator, int type, int key, MPI_Info info,
                                   MPI_Comm* part) {
  return count(PMPI_Comm_split_type(communicator, type, key, info, part));
}

extern "C" int MPI_Comm_free(MPI_Comm* communicator) {
  --num_open;
  return PMPI_Comm_free(communicator);
}

namespace crossdock {
namespace {

// A group has two communicators. Those of the last few groups may still be open: a rank frees them
// when it makes others and knows that all peers have left.
constexpr int kFew = 2 * 4;
constexpr int kMany = 100;

int gather_ranks(Group& group) {
  const int own = group.rank();
  const Agreement all =
      group.agree({.operation = "meet", .body = std::as_bytes(std::span(&own, 1))});
  int sum = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    sum += *reinterpret_cast<const int*>(all.body(rank).data());
  }
  return sum;
}

TEST(MpiLifetime, CommunicatorsOfGroupsThatHaveEndedAreFreed) {
  const int before = num_open;
  for (int i = 0; i < kMany; ++i) {
    Group group(make_mpi_communicator());
    EXPECT_EQ(gather_ranks(group),
              group.size() * (group.size() - 1) / 2);  // and nothing from other groups
    if (i % 3 == 0) group.leave("it is done");
  }
  EXPECT_LE(num_open, before + kFew);
}

TEST(MpiLifetime, SubgroupsAreFreedToo) {
  Group world(make_mpi_communicator());
  std::vector<int> members;  // with this rank's parity
  for (int rank = world.rank() % 2; rank < world.size(); rank += 2) members.push_back(rank);
  const int before = num_open;
  for (int i = 0; i < kMany; ++i) {
    const std::unique_ptr<Group> part = world.subgroup(members);
    EXPECT_EQ(part->size(), std::ssize(members));
    gather_ranks(*part);
  }
  EXPECT_LE(num_open, before + kFew);
  world.agree({.operation = "end"});
}

TEST(MpiLifetime, CommunicatorsOfAFailedGroupAreLeftAsTheyAre) {
  const int before = num_open;
  constexpr int kFailed = 5;
  for (int i = 0; i < kFailed; ++i) {
    Group group(make_mpi_communicator());
    if (group.rank() == group.size() - 1) {
      group.fail(Error(ErrorCode::kInternal, "a fault"));
    } else {
      EXPECT_THROW(gather_ranks(group), Error);
    }
  }
  EXPECT_GE(num_open,
            before + 2 * kFailed - kFew);  // the previous test's may have been freed
  Group(make_mpi_communicator()).agree({.operation = "meet"});
}

}  // namespace
}  // namespace crossdock
