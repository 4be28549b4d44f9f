// The short run of the suite: every strategy, on one rank and on three, on one and two nodes.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>

#include "crossdock/testing/tensor_place.hpp"
#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::conformance {
namespace {

class QuickRun : public testing::TestWithParam<std::string> {};

TEST_P(QuickRun, GivesTheReferencesResults) {
  for (const Ranks ranks : {Ranks{1}, Ranks{3}, Ranks{3, 2}}) {
    SCOPED_TRACE(ranks.size);
    expect_no_failures(failures_on_threads(
        ranks, [] { return make_strategy(GetParam()); }, quick_checks()));
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, QuickRun, testing::ValuesIn(strategy_names()),
                         [](const auto& info) { return info.param; });

// Copies as for a GPU, but in host memory.
TEST(OnDevice, TensorsAreCopiedForEveryCall) {
  std::atomic<int> num_copies = 0;
  const auto copy = [&](const ConstTensorView& tensor) {
    ++num_copies;
    const Buffer buffer(tensor.num_bytes());
    if (tensor.num_bytes() > 0) {
      std::memcpy(buffer.data(), tensor.data, static_cast<size_t>(tensor.num_bytes()));
    }
    return OwnedTensor{.view = buffer.view(tensor.dtype, tensor.shape), .owner = buffer.owner()};
  };
  const auto strategy = [&] {
    return on_device(make_strategy("direct"), [&](Group& /*group*/) {
      return TensorPlace{.to_device = copy, .to_host = copy};
    });
  };
  expect_no_failures(failures_on_threads({3}, strategy, quick_checks()));
  EXPECT_GT(num_copies, 1000);
}

}  // namespace
}  // namespace crossdock::conformance
