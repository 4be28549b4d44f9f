// Many launches with changing segments. Persistent kernels whose warps wait for each other may hang
// or mix up tiles so rarely that only thousands of launches show it. Every kernel runs over
// segments with tiles in which one or both warpgroups have no rows, and with long inner dimensions.

#include <gtest/gtest.h>

#include <numeric>

#include "ops/cuda/product_case.hpp"

namespace crossdock::ops {
namespace {

constexpr int kLaunches = 10'000;  // of each kernel
constexpr int kSegmentSets = 40;
constexpr int64_t kCapacity = 2048;
constexpr int64_t kExperts = 24;

// Ragged, with empty experts; the last tile of most experts has few rows.
std::vector<int64_t> stress_counts(unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<int64_t> counts(kExperts, 0);
  int64_t left = kCapacity;
  for (int64_t& count : counts) {
    const auto tiles = static_cast<int64_t>(generator() % 3);
    const auto rest = static_cast<int64_t>(generator() % 70);
    count = generator() % 4 == 0 ? 0 : std::min(left, 128 * tiles + 1 + rest);
    left -= count;
  }
  return counts;
}

struct SegmentSet {
  OwnedTensor starts;
  OwnedTensor counts;
  std::vector<std::byte> expected;  // what the first launch wrote
};

class CudaProductStress : public CudaTest {
 protected:
  // Calls launch(products, segments), which writes `out`, with the segment sets in turn. The first
  // result of each set is compared with the plain kernels, some later ones with the first.
  template <typename Launch>
  static void stress(const OwnedTensor& out, const Launch& launch, DeviceProducts& gpu,
                     GroupedProducts& plain) {
    std::vector<SegmentSet> sets = make_sets(gpu);
    for (SegmentSet& set : sets) {
      launch(gpu.products, segments_of(set));
      set.expected = to_host(out.view, gpu.stream);
      launch(plain, segments_of(set));
      ASSERT_EQ(set.expected, to_host(out.view, gpu.stream));
    }
    for (int i = 0; i < kLaunches; ++i) {
      const SegmentSet& set = sets[static_cast<size_t>(i * 7) % sets.size()];
      launch(gpu.products, segments_of(set));
      if (i % 97 == 0 || i == kLaunches - 1) {
        ASSERT_EQ(set.expected, to_host(out.view, gpu.stream)) << "launch " << i;
      }
    }
  }

 private:
  static std::vector<SegmentSet> make_sets(const DeviceProducts& gpu) {
    std::vector<SegmentSet> sets;
    for (unsigned seed = 0; seed < kSegmentSets; ++seed) {
      const std::vector<int64_t> counts = stress_counts(seed);
      std::vector<int64_t> starts(1, 0);
      for (const int64_t count : counts) starts.push_back(starts.back() + count);
      sets.push_back({to_device(ConstTensorView(starts.data(), {kExperts + 1}), gpu.stream),
                      to_device(ConstTensorView(counts.data(), {kExperts}), gpu.stream),
                      {}});
      gpu.stream.synchronize();
    }
    return sets;
  }
  static Segments segments_of(const SegmentSet& set) {
    return {static_cast<const int64_t*>(set.starts.view.data),
            static_cast<const int64_t*>(set.counts.view.data), kExperts, kGpu};
  }
};

// Whole numbers, without unused rows: the segment sets determine which rows count.
ProductCase stress_case() {
  std::vector<int64_t> counts(kExperts, 0);
  counts[0] = kCapacity;
  return ProductCase({.counts = counts, .N = 528, .K = 1032});
}

// Products whose results are rounded, or sums in fp32.
class ResultStress : public CudaProductStress, public ::testing::WithParamInterface<DType> {};

INSTANTIATE_TEST_SUITE_P(All, ResultStress, ::testing::Values(DType::kBF16, DType::kF32),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(ResultStress, ForwardNeitherHangsNorChanges) {
  const ProductCase test = stress_case();
  DeviceProducts gpu(test, ProductKernels::kFastest);
  GroupedProducts plain(kGpu, 0, ProductKernels::kPlain);
  const OwnedTensor out = gpu.make(GetParam(), {kCapacity, 528});
  stress(
      out,
      [&](GroupedProducts& products, const Segments& segments) {
        products.forward({.x = gpu.x.view, .w = gpu.w.view, .segments = segments, .out = out.view},
                         gpu.stream.view());
      },
      gpu, plain);
}

TEST_F(CudaProductStress, SwigluNeitherHangsNorChanges) {
  const ProductCase test = stress_case();
  DeviceProducts gpu(test, ProductKernels::kFastest);
  GroupedProducts plain(kGpu, 0, ProductKernels::kPlain);
  const OwnedTensor out = gpu.make(DType::kBF16, {kCapacity, 264});
  const OwnedTensor hidden = gpu.make(DType::kBF16, {kCapacity, 528});
  // The exponentials of the two kernels may differ in the last bit, but not the hidden rows.
  stress(
      hidden,
      [&](GroupedProducts& products, const Segments& segments) {
        cuda_ok(cudaMemsetAsync(hidden.view.data, 0, static_cast<size_t>(hidden.view.num_bytes()),
                                gpu.stream.get()));
        products.forward({.x = gpu.x.view,
                          .w = gpu.w.view,
                          .segments = segments,
                          .out = out.view,
                          .hidden = hidden.view,
                          .epilogue = ProductEpilogue::kSwigluKeepHidden},
                         gpu.stream.view());
      },
      gpu, plain);
}

TEST_P(ResultStress, DxNeitherHangsNorChanges) {
  const ProductCase test = stress_case();
  DeviceProducts gpu(test, ProductKernels::kFastest);
  GroupedProducts plain(kGpu, 0, ProductKernels::kPlain);
  const OwnedTensor out = gpu.make(GetParam(), {kCapacity, 1032});
  stress(
      out,
      [&](GroupedProducts& products, const Segments& segments) {
        products.dx({.grad = gpu.grad.view, .w = gpu.w.view, .segments = segments, .out = out.view},
                    gpu.stream.view());
      },
      gpu, plain);
}

TEST_P(ResultStress, DwNeitherHangsNorChanges) {
  const ProductCase test = stress_case();
  DeviceProducts gpu(test, ProductKernels::kFastest);
  GroupedProducts plain(kGpu, 0, ProductKernels::kPlain);
  const OwnedTensor out = gpu.make(GetParam(), gpu.w.view.shape);
  stress(
      out,
      [&](GroupedProducts& products, const Segments& segments) {
        products.dw({.grad = gpu.grad.view, .x = gpu.x.view, .segments = segments, .out = out.view},
                    gpu.stream.view());
      },
      gpu, plain);
}

}  // namespace
}  // namespace crossdock::ops
