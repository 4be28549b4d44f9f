#include "comm/cuda/gpu_reach.hpp"

#include <gtest/gtest.h>

namespace crossdock::cuda {
namespace {

GpuId gpu(char number) {
  return {number};
}

TEST(GpuReach, RanksOnOneGpuReachEachOther) {
  const GpuReach ranks[] = {{.gpu = gpu(1), .unreachable = {gpu(2)}},
                            {.gpu = gpu(1), .unreachable = {gpu(2)}}};
  EXPECT_TRUE(reach_each_other(ranks, std::array{0, 0}));
}

TEST(GpuReach, OneUnreachableGpuOfANodeIsEnough) {
  const GpuReach ranks[] = {
      {.gpu = gpu(1)}, {.gpu = gpu(2)}, {.gpu = gpu(3), .unreachable = {gpu(1)}}};
  EXPECT_FALSE(reach_each_other(ranks, std::array{0, 0, 0}));
  EXPECT_FALSE(reach_each_other(ranks, std::array{0, 1, 0}));
}

TEST(GpuReach, GpusOfOtherNodesNeedNotBeReached) {
  const GpuReach ranks[] = {{.gpu = gpu(1), .unreachable = {gpu(3)}},
                            {.gpu = gpu(2)},
                            {.gpu = gpu(3), .unreachable = {gpu(1), gpu(2)}}};
  EXPECT_TRUE(reach_each_other(ranks, std::array{0, 0, 1}));
}

TEST(GpuReach, AGpuThatNoRankUsesDoesNotMatter) {
  const GpuReach ranks[] = {{.gpu = gpu(1), .unreachable = {gpu(4)}}, {.gpu = gpu(2)}};
  EXPECT_TRUE(reach_each_other(ranks, std::array{0, 0}));
}

TEST(GpuReach, RanksOfOneNodeMayShareAGpu) {
  const GpuReach ranks[] = {{.gpu = gpu(1)}, {.gpu = gpu(2)}, {.gpu = gpu(1)}};
  EXPECT_TRUE(share_gpus(ranks, std::array{0, 0, 0}));
  EXPECT_FALSE(share_gpus(ranks, std::array{0, 0, 1}));  // the same address on another node
  EXPECT_FALSE(share_gpus(std::span(ranks, 2), std::array{0, 0}));
}

TEST(GpuReach, OneThatReachesNobodyMayBeAlone) {
  const GpuReach ranks[] = {{.gpu = gpu(1), .reaches_nobody = true}, {.gpu = gpu(1)}};
  EXPECT_TRUE(reach_each_other(std::span(ranks, 1), std::array{0}));
  EXPECT_FALSE(reach_each_other(ranks, std::array{0, 0}));
}

}  // namespace
}  // namespace crossdock::cuda
