#include <gtest/gtest.h>

#include "crossdock/testing/reference.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock::ops {
namespace {

TEST(Add, AddsInFp32AndRoundsOnce) {
  ThreadPool pool(2);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<double> sum;
    std::vector<double> term;
    std::vector<double> wanted;
    for (int i = 0; i < 40000; ++i) {  // more than a chunk
      sum.push_back(reference::round_to(dtype, 1.0 + i * 0.37));
      term.push_back(reference::round_to(dtype, 3.0 - i * 0.11));
      const double exact = dtype == DType::kF64
                               ? sum.back() + term.back()
                               : static_cast<double>(static_cast<float>(sum.back()) +
                                                     static_cast<float>(term.back()));
      wanted.push_back(reference::round_to(dtype, exact));
    }
    const OwnedTensor a = reference::to_tensor(dtype, {400, 100}, sum);
    const OwnedTensor b = reference::to_tensor(dtype, {400, 100}, term);
    add({.term = b.view, .sum = a.view}, pool);
    EXPECT_EQ(reference::compare(reference::to_values(a.view), wanted).num_different, 0)
        << name_of(dtype);
  }
}

TEST(Add, OfNothingIsNothing) {
  ThreadPool pool(1);
  add({.term = ConstTensorView(nullptr, DType::kF32, {0, 5}),
       .sum = TensorView(nullptr, DType::kF32, {0, 5})},
      pool);
}

}  // namespace
}  // namespace crossdock::ops
