// Group::all_reduce and Group::reduce_scatter: the bits of the sums, and what happens if ranks
// disagree, for every communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "comm/group_runner.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

/// Values whose sum depends on the order: large ones cancel, small ones are lost in between.
float value_of(int rank, int64_t i) {
  const float scale = rank % 3 == 0 ? 1e6f : rank % 3 == 1 ? -1e6f : 1.0f;
  return scale * (1.0f + 0.37f * static_cast<float>((i * 7 + rank * 13) % 101));
}

template <typename T>
T typed_value(int rank, int64_t i) {
  if constexpr (std::is_same_v<T, double>) return value_of(rank, i) / 3.0;
  if constexpr (std::is_same_v<T, int64_t>) return (int64_t{1} << 60) + rank * 1000 + i;
  if constexpr (std::is_same_v<T, float>) return value_of(rank, i);
  if constexpr (std::is_same_v<T, BF16>) return to_bf16(value_of(rank, i));
  if constexpr (std::is_same_v<T, F16>) return to_f16(value_of(rank, i) / 1e4f);
}

template <typename T>
std::vector<T> values_of(int rank, int64_t count) {
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(typed_value<T>(rank, i));
  return values;
}

/// One element of the sum, in rank order.
template <typename T>
T expected_sum(int num_ranks, int64_t i) {
  if constexpr (std::is_same_v<T, double>) {
    double sum = typed_value<T>(0, i);
    for (int rank = 1; rank < num_ranks; ++rank) sum += typed_value<T>(rank, i);
    return sum;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    uint64_t sum = 0;  // beyond 2^63 sums wrap around
    for (int rank = 0; rank < num_ranks; ++rank) {
      sum += static_cast<uint64_t>(typed_value<T>(rank, i));
    }
    return static_cast<int64_t>(sum);
  } else {
    float sum = to_float(typed_value<T>(0, i));
    for (int rank = 1; rank < num_ranks; ++rank) sum += to_float(typed_value<T>(rank, i));
    return from_float<T>(sum);
  }
}

template <typename T>
bool has_sums(std::span<const T> values, int num_ranks, int64_t first = 0) {
  using Bits = std::array<std::byte, sizeof(T)>;
  for (int64_t i = 0; i < std::ssize(values); ++i) {
    const T wanted = expected_sum<T>(num_ranks, first + i);
    if (std::bit_cast<Bits>(values[static_cast<size_t>(i)]) != std::bit_cast<Bits>(wanted)) {
      return false;
    }
  }
  return true;
}

template <typename T>
void expect_all_reduced(Group& group, int64_t count) {
  std::vector<T> values = values_of<T>(group.rank(), count);
  group.all_reduce(TensorView(values.data(), {count}));
  EXPECT_TRUE(has_sums<T>(values, group.size())) << count << " elements";
}

/// Rank r's part of a reduce_scatter: unequal, some empty.
int64_t part_of(int rank) {
  return rank % 3 == 1 ? 0 : 5 + 700 * rank;
}

template <typename T>
void expect_reduce_scattered(Group& group) {
  int64_t first = 0;
  int64_t total = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank < group.rank()) first += part_of(rank);
    total += part_of(rank);
  }
  const std::vector<T> input = values_of<T>(group.rank(), total);
  std::vector<T> out(static_cast<size_t>(part_of(group.rank())));
  group.reduce_scatter(ConstTensorView(input.data(), {total}),
                       TensorView(out.data(), {std::ssize(out)}));
  EXPECT_TRUE(has_sums<T>(out, group.size(), first));
  const std::vector<T> before = values_of<T>(group.rank(), total);
  EXPECT_EQ(std::memcmp(input.data(), before.data(), input.size() * sizeof(T)), 0);
}

void expect_all_sums(Group& group) {
  for (const int64_t count : {0, 1, 5, 1000}) {
    expect_all_reduced<double>(group, count);
    expect_all_reduced<float>(group, count);
    expect_all_reduced<BF16>(group, count);
    expect_all_reduced<F16>(group, count);
    expect_all_reduced<int64_t>(group, count);
  }
  expect_reduce_scattered<double>(group);
  expect_reduce_scattered<BF16>(group);
}

TEST(Sums, AddInRankOrderWithTheSameBitsEverywhere) {
  for (const int size : group_sizes()) run_healthy_group(size, expect_all_sums);
}

/// Runs the body with this many bytes of staging memory.
void run_with_staging(int64_t bytes, const std::function<void(Group&)>& body) {
  GroupOptions options = ample_deadlines();
  options.staging_bytes = bytes;
  for (const Outcome& outcome : run_group(group_sizes().back(), body, options)) {
    EXPECT_FALSE(outcome.threw) << outcome.message;
  }
}

TEST(Sums, DoNotDependOnTheStagingMemory) {
  run_with_staging(1, [](Group& group) { expect_all_reduced<float>(group, 100); });
  run_with_staging(1000, [](Group& group) { expect_reduce_scattered<BF16>(group); });
}

TEST(Sums, HoldNoMoreThanTheStagingMemory) {
  run_with_staging(64 << 10, [](Group& group) {
    expect_all_reduced<double>(group, (1 << 20) / 8 + 3);
    EXPECT_LE(group.memory().pool_bytes, 512 << 10);
  });
}

TEST(Sums, TakeSeveralTensorsOfDifferentDtypes) {
  run_healthy_group(group_sizes().back(), [](Group& group) {
    auto wide = values_of<double>(group.rank(), 7);
    auto narrow = values_of<BF16>(group.rank(), 30);
    auto first = values_of<float>(group.rank(), 12);
    std::vector<float> none;
    auto second = values_of<float>(group.rank(), 3);
    const std::vector<TensorView> tensors = {
        TensorView(first.data(), {3, 4}), TensorView(wide.data(), {7}),
        TensorView(none.data(), {0, 5}), TensorView(narrow.data(), {2, 3, 5}),
        TensorView(second.data(), {3})};
    group.all_reduce(tensors);
    EXPECT_TRUE(has_sums<double>(wide, group.size()));
    EXPECT_TRUE(has_sums<BF16>(narrow, group.size()));
    EXPECT_TRUE(has_sums<float>(first, group.size()));
    EXPECT_TRUE(has_sums<float>(second, group.size()));
    group.all_reduce(std::span<const TensorView>());
  });
}

/// Every rank ends in the same error; the values are unchanged and the group stays usable.
void expect_refused(const std::function<void(Group&, std::vector<float>&)>& call, ErrorCode code,
                    const std::string& text) {
  for (const int size : group_sizes()) {
    if (size < 2) continue;
    const auto outcomes = run_group(
        size,
        [&](Group& group) {
          const Outcome outcome = outcome_of([&] {
            std::vector<float> values = values_of<float>(group.rank(), 12);
            const std::vector<float> before = values;
            try {
              call(group, values);
            } catch (const Error&) {
              EXPECT_EQ(values, before);
              throw;
            }
          });
          EXPECT_FALSE(group.is_poisoned());
          expect_all_reduced<float>(group, 9);
          if (outcome.threw)
            throw Error(outcome.code, outcome.message, {.culprit = outcome.culprit});
        },
        ample_deadlines());
    for (const Outcome& outcome : outcomes) {
      EXPECT_TRUE(outcome.threw);
      EXPECT_EQ(outcome.code, code) << outcome.message;
      EXPECT_EQ(outcome.message, outcomes[0].message);
      EXPECT_THAT(outcome.message, HasSubstr(text));
    }
  }
}

int last_rank(const Group& group) {
  return group.size() - 1;
}

TEST(Sums, RefuseAnotherSizeOnOneRank) {
  expect_refused(
      [](Group& group, std::vector<float>& values) {
        const int64_t count = group.rank() == last_rank(group) ? 11 : 12;
        group.all_reduce(TensorView(values.data(), {count}));
      },
      ErrorCode::kMismatch, "has tensor 0=[11] fp32 where rank 0 has tensor 0=[12] fp32");
}

TEST(Sums, RefuseAnotherDtypeOnOneRank) {
  expect_refused(
      [](Group& group, std::vector<float>& values) {
        const DType dtype = group.rank() == last_rank(group) ? DType::kBF16 : DType::kF32;
        group.reduce_scatter(ConstTensorView(values.data(), dtype, {4}),
                             TensorView(values.data() + 8, dtype, {group.rank() == 0 ? 4 : 0}));
      },
      ErrorCode::kMismatch, "has input=[4] bf16 where rank 0 has input=[4] fp32");
}

TEST(Sums, RefuseAnotherNumberOfTensorsOnOneRank) {
  expect_refused(
      [](Group& group, std::vector<float>& values) {
        const std::vector<TensorView> tensors = {TensorView(values.data(), {4}),
                                                 TensorView(values.data() + 4, {4})};
        const size_t count = group.rank() == last_rank(group) ? 1 : 2;
        group.all_reduce(std::span(tensors).first(count));
      },
      ErrorCode::kMismatch, "has no tensor 1 where rank 0 has tensor 1=[4] fp32");
}

TEST(Sums, RefuseWhatOneRankCannotSum) {
  const auto with = [](const std::function<TensorView(std::vector<float>&)>& bad) {
    return [=](Group& group, std::vector<float>& values) {
      group.all_reduce(group.rank() == last_rank(group) ? bad(values)
                                                        : TensorView(values.data(), {12}));
    };
  };
  expect_refused(
      with([](std::vector<float>& values) { return TensorView(values.data(), DType::kI32, {12}); }),
      ErrorCode::kInvalidArgument, "the tensor must be fp64, fp32, bf16, fp16 or int64, got int32");
  expect_refused(with([](std::vector<float>& values) {
                   return TensorView(values.data(), {12}, {DeviceKind::kCuda, 0});
                 }),
                 ErrorCode::kInvalidArgument, "the tensor must be in host memory");
  expect_refused(
      with([](std::vector<float>&) { return TensorView(static_cast<float*>(nullptr), {12}); }),
      ErrorCode::kInvalidArgument, "must have memory, got a null pointer");
  expect_refused(
      [](Group& group, std::vector<float>& values) {
        const int64_t first = group.rank() == last_rank(group) ? 3 : 4;
        const std::vector<TensorView> tensors = {TensorView(values.data() + first, {4}),
                                                 TensorView(values.data(), {4})};
        group.all_reduce(tensors);
      },
      ErrorCode::kInvalidArgument, "tensor 0 overlaps tensor 1");
}

TEST(Sums, RefusePartsThatDoNotCoverTheInput) {
  for (const int64_t first_part : {11, 13}) {
    expect_refused(
        [&](Group& group, std::vector<float>& values) {
          std::vector<float> out(13);
          group.reduce_scatter(ConstTensorView(values.data(), {12}),
                               TensorView(out.data(), {group.rank() == 0 ? first_part : 0}));
        },
        ErrorCode::kInvalidArgument,
        "must have the 12 elements of the input; by rank they have " + std::to_string(first_part));
  }
}

TEST(Sums, NameARankThatLeft) {
  for (const int size : group_sizes()) {
    if (size < 2) continue;
    const auto outcomes = run_group(
        size,
        [](Group& group) {
          if (group.rank() == 1) throw std::runtime_error("no more");
          std::vector<float> values(100);
          group.all_reduce(TensorView(values.data(), {100}));
        },
        ample_deadlines());
    for (int rank = 0; rank < size; ++rank) {
      const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_TRUE(outcome.threw);
      if (rank == 1) continue;
      EXPECT_EQ(outcome.code, ErrorCode::kPeerFailed) << outcome.message;
      EXPECT_EQ(outcome.culprit, 1);
      EXPECT_EQ(outcome.operation, "all_reduce");
    }
  }
}

}  // namespace
}  // namespace crossdock::testing
