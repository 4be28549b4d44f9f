#pragma once

#include <cstdint>

#include "cli/eval/dispatch_case.hpp"
#include "crossdock/testing/random_worlds.hpp"

namespace crossdock::cli {

/// Consecutive cases with numbers that share `number / kCasesPerBlock` use one group.
constexpr int64_t kCasesPerBlock = 32;

/// The group of a block of cases.
struct BlockShape {
  int num_ranks = 1;
  int ranks_per_node = 0;  // 0: as the communicator reports
};

/// Depends on nothing but its arguments.
BlockShape shape_of_block(uint64_t seed, int64_t number, int most_ranks);

/// Case `number` of a run; depends on nothing but its arguments. On a GPU, layers have only options
/// that are supported there. New kinds of cases are added here.
testing::RandomCase make_random_case(uint64_t seed, int64_t number, int most_ranks,
                                     bool on_gpu = false);

/// As a random case; the fields that say how it runs are used by the caller.
testing::RandomCase random_case_of(const conformance::World& world, int ranks_per_node);

}  // namespace crossdock::cli
