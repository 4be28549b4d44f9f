// Training runs on meshes of processes, with MPI or sockets, compared with one rank.
#include <gtest/gtest.h>

#include "support/process_communicator.hpp"
#include "training/training_cases.hpp"

namespace crossdock {
namespace {

TEST(TrainingProcesses, EveryMeshEqualsOneRank) {
  Group world(testing::make_process_communicator());
  for (const TrainingCase& each : cases_of_four_ranks()) {
    EXPECT_EQ(difference_from_one_rank(train::train(world, each.config), each.config), "")
        << each.name;
  }
}

TEST(TrainingProcesses, SinglePrecisionEqualsOneRank) {
  Group world(testing::make_process_communicator());
  const train::TrainConfig config{
      .mesh = {.world = 4, .tp = 2, .etp = 2, .ep = 2}, .dtype = DType::kF32, .steps = 10};
  EXPECT_EQ(difference_from_one_rank(train::train(world, config), config), "");
}

}  // namespace
}  // namespace crossdock
