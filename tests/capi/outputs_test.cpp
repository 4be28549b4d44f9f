// The caller can provide every output, which then has the same values as one of the library's.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

constexpr int kRanks = 3;
constexpr int64_t D = Case::D;
constexpr int64_t K = Case::K;

struct Memory {
  explicit Memory(int64_t num_values) : values(static_cast<size_t>(num_values) + 1, -7.0F) {}
  crossdock_output output(int64_t rows, int64_t columns) const {
    return {.tensor = tensor(values, rows, columns), .owner = nullptr};
  }
  std::vector<float> values;
};

void expect_same(const crossdock_output& given, crossdock_output& provided) {
  EXPECT_EQ(given.owner, nullptr);
  EXPECT_EQ(doubles(given.tensor), doubles(provided.tensor));
  EXPECT_OK(crossdock_output_release(&provided, nullptr));
}

TEST(COutputs, OfEveryCallCanBeGiven) {
  for (const char* strategy : {"direct", "hierarchical", "alltoall", "allgather"}) {
    SCOPED_TRACE(strategy);
    run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
      auto config = Case::config();
      config.strategy = strategy;
      config.alignment = 8;
      const Case input(rank);
      const Planned planned(group, input, config);
      const int64_t R = planned.info.capacity_rows;

      auto args = made<crossdock_dispatch_args>();
      args.x = tensor(input.x, input.T, D);
      args.with_row_weights = 1;
      auto provided = made<crossdock_dispatch_result>();
      ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &provided));
      const Memory rows(R * D);
      const Memory row_weights(R);
      auto given = made<crossdock_dispatch_result>();
      given.rows = rows.output(R, D);
      given.row_weights.tensor = crossdock_tensor_1d(row_weights.values.data(), CROSSDOCK_F32, R);
      ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &given));
      expect_same(given.rows, provided.rows);
      expect_same(given.row_weights, provided.row_weights);

      auto back_args = made<crossdock_combine_backward_args>();
      back_args.grad_out = tensor(input.grad_out, input.T, D);
      back_args.y = given.rows.tensor;
      auto back = made<crossdock_combine_backward_result>();
      ASSERT_OK(crossdock_combine_backward(planned.dispatcher, planned.plan, &back_args, &back));
      const Memory grad_rows(R * D);
      const Memory grad_weights(input.T * K);
      auto given_back = made<crossdock_combine_backward_result>();
      given_back.grad_rows = grad_rows.output(R, D);
      given_back.grad_weights = grad_weights.output(input.T, K);
      ASSERT_OK(
          crossdock_combine_backward(planned.dispatcher, planned.plan, &back_args, &given_back));
      expect_same(given_back.grad_rows, back.grad_rows);
      expect_same(given_back.grad_weights, back.grad_weights);

      crossdock_output routes{};
      ASSERT_OK(crossdock_collect_routes(planned.dispatcher, planned.plan,
                                         &given.row_weights.tensor, &routes));
      const Memory collected(input.T * K);
      crossdock_output given_routes = collected.output(input.T, K);
      ASSERT_OK(crossdock_collect_routes(planned.dispatcher, planned.plan,
                                         &given.row_weights.tensor, &given_routes));
      expect_same(given_routes, routes);
    });
  }
}

TEST(COutputs, AGivenOutputOfAnotherShapeIsTheSameErrorOnEveryRank) {
  run_c_ranks(kRanks, [](crossdock_group* group, int rank) {
    const Case input(rank);
    const Planned planned(group, input);
    auto args = made<crossdock_combine_backward_args>();
    args.grad_out = tensor(input.grad_out, input.T, D);
    const Memory y(planned.info.capacity_rows * D);
    args.y = tensor(y.values, planned.info.capacity_rows, D);
    auto back = made<crossdock_combine_backward_result>();
    const Memory wrong(3);
    if (rank == 2) back.grad_weights = wrong.output(1, 3);
    EXPECT_EQ(crossdock_combine_backward(planned.dispatcher, planned.plan, &args, &back),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_NE(std::string(crossdock_last_error()).find("rank 2: grad_weights must be"),
              std::string::npos)
        << crossdock_last_error();
    EXPECT_EQ(back.grad_rows.owner, nullptr);
    EXPECT_OK(crossdock_group_check(group));
  });
}

TEST(COutputs, AnOutputThatStillHasAnOwnerIsRefused) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    const Planned planned(group, Case(0));
    crossdock_output rows{};
    ASSERT_OK(crossdock_allocate_rows(planned.dispatcher, planned.plan, CROSSDOCK_F32, &rows));
    EXPECT_EQ(crossdock_allocate_rows(planned.dispatcher, planned.plan, CROSSDOCK_F32, &rows),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(),
                 "rows: owner must be NULL before the call; release the previous result first");
    EXPECT_OK(crossdock_output_release(&rows, nullptr));
    EXPECT_OK(crossdock_output_release(&rows, nullptr));  // does nothing
  });
}

// The layout that DLPack documents.
struct DLManagedTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

TEST(COutputs, MemoryCanBeSharedThroughDLPack) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    const Planned planned(group, Case(0));
    const int64_t R = planned.info.capacity_rows;
    crossdock_output rows{};
    ASSERT_OK(crossdock_allocate_rows(planned.dispatcher, planned.plan, CROSSDOCK_F32, &rows));
    void* data = rows.tensor.data;
    void* made_tensor = nullptr;
    ASSERT_OK(crossdock_output_to_dlpack(&rows, nullptr, &made_tensor));
    auto* shared = static_cast<DLManagedTensor*>(made_tensor);
    EXPECT_EQ(shared->data, data);
    EXPECT_EQ(shared->device_type, 1);
    ASSERT_EQ(shared->ndim, 2);
    EXPECT_EQ(shared->shape[0], R);
    EXPECT_EQ(shared->shape[1], D);
    EXPECT_EQ(shared->strides, nullptr);
    EXPECT_EQ(shared->code, 2);
    EXPECT_EQ(shared->bits, 32);
    EXPECT_EQ(shared->lanes, 1);
    EXPECT_EQ(shared->byte_offset, 0U);

    // The memory is not reused while a tensor shares it.
    EXPECT_OK(crossdock_output_release(&rows, nullptr));
    crossdock_output others{};
    ASSERT_OK(crossdock_allocate_rows(planned.dispatcher, planned.plan, CROSSDOCK_F32, &others));
    EXPECT_NE(others.tensor.data, data);
    static_cast<float*>(shared->data)[R * D - 1] = 1.0F;
    shared->deleter(shared);
    EXPECT_OK(crossdock_output_release(&others, nullptr));
  });
}

TEST(COutputs, AnEmptyResultCanBeSharedThroughDLPack) {
  const crossdock_output output{.tensor = crossdock_tensor_2d(nullptr, CROSSDOCK_BF16, 0, 4),
                                .owner = nullptr};
  void* made_tensor = nullptr;
  ASSERT_OK(crossdock_output_to_dlpack(&output, nullptr, &made_tensor));
  auto* shared = static_cast<DLManagedTensor*>(made_tensor);
  EXPECT_EQ(shared->shape[0], 0);
  EXPECT_EQ(shared->code, 4);
  EXPECT_EQ(shared->bits, 16);
  shared->deleter(shared);
}

TEST(COutputs, MemoryOfTheCallerCannotBeSharedThroughDLPack) {
  const Memory own(4);
  const crossdock_output output = own.output(1, 4);
  void* shared = nullptr;
  EXPECT_EQ(crossdock_output_to_dlpack(&output, nullptr, &shared), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(), "output.owner must not be NULL");
  EXPECT_EQ(shared, nullptr);
}

TEST(COutputs, MemoryOfOthersIsDescribedThroughDLPack) {
  std::array<float, 12> values{};
  std::array<int64_t, 2> shape{3, 4}, strides{4, 1};
  DLManagedTensor given{};
  given.data = values.data();
  given.device_type = 1;
  given.ndim = 2;
  given.code = 2;
  given.bits = 32;
  given.lanes = 1;
  given.shape = shape.data();
  given.byte_offset = 4;
  crossdock_tensor tensor{};
  for (int64_t* of : {static_cast<int64_t*>(nullptr), strides.data()}) {
    given.strides = of;
    ASSERT_OK(crossdock_tensor_from_dlpack(&given, &tensor));
    EXPECT_EQ(tensor.data, &values[1]);
    EXPECT_EQ(tensor.num_dims, 2);
    EXPECT_EQ(tensor.shape[1], 4);
    EXPECT_EQ(tensor.dtype, CROSSDOCK_F32);
    EXPECT_EQ(tensor.device_kind, CROSSDOCK_CPU);
  }
  strides = {1, 3};
  EXPECT_EQ(crossdock_tensor_from_dlpack(&given, &tensor), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(),
               "tensors must be contiguous, got shape (3, 4) with strides (1, 3)");
  given.strides = nullptr;
  given.bits = 8;
  EXPECT_EQ(crossdock_tensor_from_dlpack(&given, &tensor), CROSSDOCK_INVALID_ARGUMENT);
  given.bits = 32;
  given.device_type = 7;
  EXPECT_EQ(crossdock_tensor_from_dlpack(&given, &tensor), CROSSDOCK_INVALID_ARGUMENT);
  given.device_type = 2;
  given.device_id = 3;
  ASSERT_OK(crossdock_tensor_from_dlpack(&given, &tensor));
  EXPECT_EQ(tensor.device_kind, CROSSDOCK_CUDA);
  EXPECT_EQ(tensor.device_index, 3);
  given.ndim = 0;
  EXPECT_EQ(crossdock_tensor_from_dlpack(&given, &tensor), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(crossdock_tensor_from_dlpack(nullptr, &tensor), CROSSDOCK_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace crossdock::capi_test
