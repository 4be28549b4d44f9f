#include "crossdock/tensor.hpp"

#include <gtest/gtest.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock {
namespace {

TEST(Tensor, KnowsItsBytesAndRowsAlsoWhenEmpty) {
  const TensorView empty(nullptr, DType::kBF16, {0, 7});
  EXPECT_TRUE(empty.given());
  EXPECT_EQ(empty.num_bytes(), 0);
  EXPECT_EQ(empty.num_rows(), 0);
  EXPECT_EQ(empty.row_bytes(), 14);
  EXPECT_FALSE(TensorView().given());
}

TEST(Tensor, TypedPointerGivesTheDtypeAndReadsBackAsIt) {
  std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const TensorView view(values.data(), {2, 3});
  EXPECT_EQ(view.dtype, DType::kF32);
  view.as<float>()[5] = 60;
  EXPECT_EQ(values[5], 60);
  const ConstTensorView constant = view;
  EXPECT_EQ(constant.as<float>()[5], 60);
  EXPECT_THROW(constant.as<double>(), Error);
}

TEST(Tensor, ShapesCompareAndPrint) {
  EXPECT_EQ(Shape({2, 3}), Shape({2, 3}));
  EXPECT_NE(Shape({2, 3}), Shape({3, 2}));
  EXPECT_EQ(Shape({2, 3}).to_string(), "[2, 3]");
  EXPECT_THROW(Shape({2, -3}), Error);
}

TEST(Tensor, SizesBeyond31BitsDoNotWrap) {
  const TensorView huge(nullptr, DType::kF32, {int64_t{1} << 20, int64_t{1} << 20});
  EXPECT_EQ(huge.num_bytes(), int64_t{1} << 42);
}

TEST(Tensor, SizesThatCannotBeCountedAreRefused) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  EXPECT_THROW(Shape({kHuge, 4}).num_elements(), Error);
  EXPECT_THROW(TensorView(nullptr, DType::kF32, {kHuge}).num_bytes(), Error);
  EXPECT_THROW(TensorView(nullptr, DType::kF32, {0, kHuge}).row_bytes(), Error);
  EXPECT_EQ(Shape({kHuge, kHuge, 0}).num_elements(), 0);
  EXPECT_EQ(TensorView(nullptr, DType::kU8, {2, kHuge}).row_bytes(), kHuge);
}

TEST(Segments, NumRowsIsTheEndOfTheLastSegmentAndZeroWithoutExperts) {
  const std::vector<int64_t> starts = {0, 8, 8, 24};
  const std::vector<int64_t> counts = {5, 0, 11};
  EXPECT_EQ((Segments{starts.data(), counts.data(), 3, {}}.num_rows()), 24);
  EXPECT_EQ(Segments{}.num_rows(), 0);
}

template <typename Tensor>
concept ShowsElements = requires(Tensor&& tensor) {
  std::forward<Tensor>(tensor).view.template as<float>();
};

template <typename Memory>
concept ShowsMemory = requires(Memory&& memory) {
  std::forward<Memory>(memory).view(DType::kF32, Shape{});
  std::forward<Memory>(memory).bytes();
};

// As in `TensorView rows = dispatcher.dispatch(plan, args).rows.view;`.
template <typename View, typename Tensor>
concept TakesViewOf = requires(Tensor&& tensor, View view) {
  View(std::forward<Tensor>(tensor).view);
  view = std::forward<Tensor>(tensor).view;
};

TEST(OwnedTensor, ShowsItsViewWhileItIsKept) {
  static_assert(TakesViewOf<TensorView, OwnedTensor&> &&
                TakesViewOf<TensorView, const OwnedTensor&>);
  static_assert(TakesViewOf<ConstTensorView, const OwnedTensor&>);
  static_assert(std::is_convertible_v<const OwnedView&, ConstTensorView>);
  static_assert(ShowsElements<OwnedTensor&> && ShowsMemory<Buffer&>);

  std::vector<float> values = {1, 2};
  OwnedTensor tensor{.view = TensorView(values.data(), {2}), .owner = nullptr};
  const OwnedTensor moved = std::move(tensor);
  const TensorView view = moved.view;
  EXPECT_EQ(view.data, values.data());
  EXPECT_EQ(moved.view.as<float>()[1], 2);
}

TEST(OwnedTensor, GivesNoViewOutOfATemporary) {
  static_assert(!std::is_convertible_v<OwnedView, TensorView>);
  static_assert(!std::is_convertible_v<OwnedView, ConstTensorView>);
  static_assert(!std::is_convertible_v<const OwnedView, ConstTensorView>);
  static_assert(!std::is_assignable_v<TensorView&, OwnedView>);
  static_assert(!std::is_assignable_v<ConstTensorView&, const OwnedView>);
  static_assert(!TakesViewOf<TensorView, OwnedTensor> &&
                !TakesViewOf<TensorView, const OwnedTensor>);
  static_assert(!TakesViewOf<ConstTensorView, OwnedTensor>);
  static_assert(!TakesViewOf<OwnedView, OwnedTensor>, "auto view = f().view");
  static_assert(!ShowsElements<OwnedTensor> && !ShowsMemory<Buffer>);
  static_assert(std::is_nothrow_move_constructible_v<OwnedTensor>);
  static_assert(std::is_nothrow_move_assignable_v<OwnedTensor>);
}

}  // namespace
}  // namespace crossdock
