// Dispatch in chunks on a GPU while the experts compute: same bits, same errors.
#include <gtest/gtest.h>

#include <string_view>

#include "layer/cuda/layer_on_gpu.hpp"
#include "layer/overlap_cases.hpp"

namespace crossdock {
namespace {

class CudaOverlap : public CudaTest {};

void expect_same_results(const LayerCase& layer_case, const std::vector<RankResult>& wanted,
                         const DeviceOptions& options, const std::string& name) {
  const std::vector<RankResult> got = run_layer_on_gpu(layer_case, options);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], 0.0), "")
        << name << ", " << layer_case.config.overlap_chunks << " chunks, " << options.max_sms
        << " and " << options.max_begun_sms << " SMs, rank " << rank << " of " << got.size();
  }
}

// SMs for the dispatch: unlimited, or a share that the experts leave free.
void expect_same_bits(LayerCase layer_case, const std::string& name) {
  const std::vector<RankResult> wanted = run_layer_on_gpu(layer_case);
  layer_case.config.overlap_chunks = 2;
  expect_same_results(layer_case, wanted, {}, name);
  layer_case.config.overlap_chunks = 3;
  expect_same_results(layer_case, wanted, {.max_sms = 5}, name);
  layer_case.config.overlap_chunks = 1000;
  expect_same_results(layer_case, wanted, {.max_begun_sms = 16}, name);
}

TEST_F(CudaOverlap, HasTheBitsOfALayerWithoutIt) {
  for (const int P : {1, 2, 4}) {
    for (NamedCase& named : list_overlap_cases(P)) {
      if (named.options.config.experts.dtype == DType::kF64) {
        named.options.config.experts.dtype = DType::kF32;
      }
      LayerCase layer_case = make_case(named.options);
      expect_same_bits(layer_case, named.name);
      layer_case.config.dispatch.max_rows = most_rows(layer_case);
      expect_same_bits(layer_case, named.name + " with max_rows");
    }
  }
}

TEST_F(CudaOverlap, HasTheBitsOfALayerWithoutItOnEightRanks) {
  expect_same_bits(spread(medium_case(DType::kBF16), {40, 0, 30, 1, 60, 0, 70, 10}), "8 ranks");
}

TEST_F(CudaOverlap, HasTheBitsOfALayerWithoutItWithEveryPart) {
  for (const bool recompute : {false, true}) {
    for (const bool overlap_shared : {false, true}) {
      LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
      layer_case.config.experts.recompute = recompute;
      layer_case.config.overlap_shared = overlap_shared;
      expect_same_bits(layer_case, recompute ? "recomputed" : "kept");
    }
  }
}

TEST_F(CudaOverlap, HasTheBitsOfALayerWithoutItWithEveryStrategy) {
  for (const std::string& strategy : strategy_names()) {
    LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
    layer_case.config.strategy = strategy;
    expect_same_bits(layer_case, strategy);
  }
}

TEST_F(CudaOverlap, HasTheBitsOfALayerWithoutItWithShardedExperts) {
  for (const bool recompute : {false, true}) {
    LayerCase layer_case = sharded_case(DType::kBF16, 2, {0, 60, 150, 1});
    layer_case.config.experts.recompute = recompute;
    expect_same_bits(layer_case, recompute ? "recomputed" : "kept");
  }
}

TEST_F(CudaOverlap, WorksWithoutAnyToken) {
  expect_same_bits(spread(medium_case(DType::kBF16), {211}), "all tokens");
  NamedCase named = list_overlap_cases(3).back();
  named.options.tokens_per_rank.assign(3, 0);
  expect_same_bits(make_case(named.options), "no token");
}

TEST_F(CudaOverlap, LeavesGradientsToBeDelayed) {
  LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
  const std::vector<RankResult> wanted = run_layer_on_gpu(layer_case);
  layer_case.config.overlap_chunks = 3;
  run_ranks(2, [&](Group& group) {
    LayerOnGpu gpu(group, layer_case);
    MoeForwardResult first = gpu.rank.forward();
    MoeForwardResult second = gpu.rank.forward();
    for (MoeForwardResult* forward : {&second, &first}) {
      const RankResult got = gpu.backward_with_delayed_dw(*forward);
      EXPECT_EQ(find_difference(got, wanted[static_cast<size_t>(group.rank())], 0.0), "");
    }
  });
}

TEST_F(CudaOverlap, IsRecordedChunkByChunk) {
  LayerCase layer_case = spread(medium_case(DType::kBF16), {100, 111});
  layer_case.config.overlap_chunks = 3;
  run_ranks(2, [&](Group& group) {
    LayerOnGpu(group, layer_case).run();
    int chunks = 0;
    int forward_parts = 0;
    int backward_parts = 0;
    for (const Event& event : group.recorder().events()) {
      const std::string_view operation = event.operation;
      chunks += operation == "dispatch" && std::string_view(event.phase) == "chunk" ? 1 : 0;
      forward_parts += operation == "experts" ? 1 : 0;
      backward_parts += operation == "experts_dx" ? 1 : 0;
    }
    EXPECT_EQ(chunks, 6) << "forward and backward";
    EXPECT_EQ(forward_parts, 3);
    EXPECT_EQ(backward_parts, 3);
  });
}

TEST_F(CudaOverlap, MustBeIdenticalOnEveryRank) {
  LayerCase layer_case = spread(medium_case(DType::kBF16), {60, 80, 71});
  run_ranks(3, [&](Group& group) {
    LayerCase own = layer_case;
    own.config.overlap_chunks = group.rank() == 1 ? 2 : 4;
    LayerOnGpu gpu(group, own);
    expect_refused(group, "overlap_chunks", [&] { (void)gpu.rank.forward(); });
    LayerOnGpu(group, layer_case).run();
  });
}

}  // namespace
}  // namespace crossdock
