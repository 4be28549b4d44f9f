// Dispatch, combine and both backwards through the C API give the values of the reference.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

constexpr int kRanks = 3;

// Experts return their rows: y = rows.
reference::LayerOutput expected(const DispatchConfig& config) {
  reference::LayerInput input{.config = config};
  for (int rank = 0; rank < kRanks; ++rank) input.ranks.push_back(Case(rank).reference_input());
  return reference::run_layer(input);
}

const DispatchConfig kConfig{.num_experts = Case::E, .top_k = Case::K, .width = Case::D};

TEST(CApi, DispatchCombineAndBackwardHaveTheReferencesValues) {
  const reference::LayerOutput wanted = expected(kConfig);
  run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
    const auto r = static_cast<size_t>(rank);
    const Case input(rank);
    const Planned planned(group, input);

    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    args.with_row_weights = 1;
    auto sent = made<crossdock_dispatch_result>();
    ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
    EXPECT_EQ(doubles(sent.rows.tensor), wanted.rows[r]);

    crossdock_output out{};
    ASSERT_OK(crossdock_combine(planned.dispatcher, planned.plan, &sent.rows.tensor, &out));
    EXPECT_EQ(doubles(out.tensor), wanted.out[r]);

    auto back_args = made<crossdock_combine_backward_args>();
    back_args.grad_out = tensor(input.grad_out, input.T, Case::D);
    back_args.y = sent.rows.tensor;
    auto back = made<crossdock_combine_backward_result>();
    ASSERT_OK(crossdock_combine_backward(planned.dispatcher, planned.plan, &back_args, &back));
    EXPECT_EQ(doubles(back.grad_rows.tensor), wanted.grad_y[r]);
    EXPECT_EQ(doubles(back.grad_weights.tensor), wanted.grad_weights[r]);

    crossdock_output grad_x{};
    ASSERT_OK(crossdock_dispatch_backward(planned.dispatcher, planned.plan, &back.grad_rows.tensor,
                                          &grad_x));
    EXPECT_EQ(doubles(grad_x.tensor), wanted.grad_x[r]);

    crossdock_output routes{};  // the weights return to their slots
    ASSERT_OK(crossdock_collect_routes(planned.dispatcher, planned.plan, &sent.row_weights.tensor,
                                       &routes));
    EXPECT_EQ(doubles(routes.tensor), doubles(planned.info.weights));

    for (crossdock_output* output : {&sent.rows, &sent.row_weights, &out, &back.grad_rows,
                                     &back.grad_weights, &grad_x, &routes}) {
      EXPECT_OK(crossdock_output_release(output, nullptr));
      EXPECT_EQ(output->owner, nullptr);
    }
  });
}

TEST(CApi, BegunCallsHaveTheSameValues) {
  const reference::LayerOutput wanted = expected(kConfig);
  run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
    const Case input(rank);
    const Planned planned(group, input);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    crossdock_pending* pending = nullptr;
    args.num_chunks = 2;
    ASSERT_OK(crossdock_begin_dispatch(planned.dispatcher, planned.plan, &args, nullptr, &pending));
    auto sent = made<crossdock_dispatch_result>();
    int64_t first = 0;
    int64_t last = 0;
    ASSERT_OK(crossdock_next_chunk(planned.dispatcher, pending, &sent, &first, &last));
    EXPECT_EQ(first, 0);
    EXPECT_EQ(last, planned.info.num_local_experts) << "on the CPU a begun call is complete";
    EXPECT_EQ(doubles(sent.rows.tensor), wanted.rows[static_cast<size_t>(rank)]);
    EXPECT_EQ(sent.rows.owner, nullptr);
    ASSERT_OK(crossdock_next_chunk(planned.dispatcher, pending, &sent, &first, &last));
    EXPECT_EQ(first, -1);
    EXPECT_EQ(last, -1);
    EXPECT_NE(crossdock_next_chunk(planned.dispatcher, pending, nullptr, &first, &last),
              CROSSDOCK_OK);
    ASSERT_OK(crossdock_finish_dispatch(planned.dispatcher, pending, &sent));
    EXPECT_EQ(doubles(sent.rows.tensor), wanted.rows[static_cast<size_t>(rank)]);

    ASSERT_OK(crossdock_begin_combine(planned.dispatcher, planned.plan, &sent.rows.tensor, nullptr,
                                      &pending));
    crossdock_output out{};
    ASSERT_OK(crossdock_finish_combine(planned.dispatcher, pending, &out));
    EXPECT_EQ(doubles(out.tensor), wanted.out[static_cast<size_t>(rank)]);
    EXPECT_OK(crossdock_output_release(&out, nullptr));
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
  });
}

struct Chunks {
  int64_t next_expert = 0;
  crossdock_status answer = CROSSDOCK_OK;
};

crossdock_status on_chunk(void* context, const crossdock_dispatch_result* result,
                          int64_t first_expert, int64_t last_expert) {
  auto& chunks = *static_cast<Chunks*>(context);
  EXPECT_EQ(first_expert, chunks.next_expert);
  EXPECT_EQ(result->rows.tensor.num_dims, 2);
  EXPECT_EQ(result->rows.owner, nullptr);
  chunks.next_expert = last_expert;
  if (chunks.answer != CROSSDOCK_OK) crossdock_set_callback_error("enough");
  return chunks.answer;
}

TEST(CApi, ChunksArriveInExpertOrder) {
  run_c_ranks(kRanks, [](crossdock_group* group, int rank) {
    const Case input(rank);
    const Planned planned(group, input);
    Chunks chunks;
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    args.num_chunks = 2;
    args.on_chunk = on_chunk;
    args.on_chunk_context = &chunks;
    auto sent = made<crossdock_dispatch_result>();
    ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
    EXPECT_EQ(chunks.next_expert, planned.info.num_local_experts);
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));

    chunks = {.answer = rank == 1 ? CROSSDOCK_INTERNAL : CROSSDOCK_OK};
    EXPECT_NE(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent), CROSSDOCK_OK);
    EXPECT_NE(std::string(crossdock_last_error()).find("enough"), std::string::npos)
        << crossdock_last_error();
  });
}

TEST(CApi, ADenseMapGivesTheSameRowsAsItsSlots) {
  run_c_ranks(kRanks, [](crossdock_group* group, int rank) {
    const Case input(rank);
    std::vector<uint8_t> map(static_cast<size_t>(input.T * Case::E), 0);
    std::vector<float> weights(map.size(), 9.0F);  // ignored outside the map
    for (int64_t t = 0; t < input.T; ++t) {
      for (int64_t k = 0; k < Case::K; ++k) {
        const auto i = static_cast<size_t>(t * Case::K + k);
        if (input.expert_ids[i] < 0) continue;
        const auto place = static_cast<size_t>(t * Case::E + input.expert_ids[i]);
        map[place] = 1;
        weights[place] = input.weights[i];
      }
    }
    auto routing = made<crossdock_routing>();
    routing.map = crossdock_tensor_2d(map.data(), CROSSDOCK_BOOL, input.T, Case::E);
    routing.weights = tensor(weights, input.T, Case::E);
    const Planned by_slot(group, input);
    crossdock_plan* plan = nullptr;
    ASSERT_OK(crossdock_plan_create(by_slot.dispatcher, &routing, &plan));
    auto info = made<crossdock_plan_info>();
    ASSERT_OK(crossdock_plan_describe(plan, &info));
    ASSERT_EQ(info.num_local_experts, by_slot.info.num_local_experts);
    for (int64_t e = 0; e < info.num_local_experts; ++e) {
      EXPECT_EQ(info.segment_counts[e], by_slot.info.segment_counts[e]);
    }
    crossdock_plan_destroy(plan);
  });
}

TEST(CApi, APlanIsDescribedByTheCallThatMakesIt) {
  run_c_ranks(kRanks, [](crossdock_group* group, int rank) {
    const Case input(rank);
    auto config = Case::config();
    config.alignment = 8;  // gives experts pad rows
    const Planned planned(group, input, config);
    const crossdock_routing routing = input.routing();
    auto info = made<crossdock_plan_info>();
    std::vector<int64_t> rows_per_expert(Case::E, -1);
    crossdock_plan* plan = nullptr;
    ASSERT_OK(crossdock_plan_create_described(planned.dispatcher, &routing, &info,
                                              rows_per_expert.data(), &plan));
    EXPECT_EQ(info.num_tokens, input.T);
    EXPECT_EQ(info.capacity_rows, planned.info.capacity_rows);
    ASSERT_EQ(info.num_local_experts, planned.info.num_local_experts);
    for (int64_t e = 0; e < info.num_local_experts; ++e) {
      EXPECT_EQ(info.segment_counts[e], planned.info.segment_counts[e]);
      EXPECT_EQ(rows_per_expert[static_cast<size_t>(e)],
                info.segment_starts[e + 1] - info.segment_starts[e]);
      EXPECT_EQ(rows_per_expert[static_cast<size_t>(e)] % 8, 0);
    }
    for (int64_t e = info.num_local_experts; e < Case::E; ++e) {
      EXPECT_EQ(rows_per_expert[static_cast<size_t>(e)], -1);
    }
    crossdock_plan_destroy(plan);
  });
}

TEST(CApi, APlanWithoutAPlaceForItsDescriptionIsRefusedOnEveryRank) {
  run_c_ranks(kRanks, [](crossdock_group* group, int rank) {
    const Case input(rank);
    const Planned planned(group, input);
    const crossdock_routing routing = input.routing();
    auto info = made<crossdock_plan_info>();
    crossdock_plan* plan = nullptr;
    EXPECT_EQ(crossdock_plan_create_described(planned.dispatcher, &routing,
                                              rank == 0 ? nullptr : &info, nullptr, &plan),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_NE(std::string(crossdock_last_error()).find("crossdock_plan_info must not be NULL"),
              std::string::npos)
        << crossdock_last_error();
    EXPECT_EQ(plan, nullptr);
  });
}

// Every token goes to all experts: combine adds its weighted row E times.
TEST(CApi, ADenseMapMayHaveMoreBitsThanTopK) {
  for (const int64_t bound : {int64_t{0}, Case::E}) {
    run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
      const Case input(rank);
      auto config = Case::config();
      config.max_routes_per_token = bound;
      const Planned by_slot(group, input, config);
      const std::vector<uint8_t> map(static_cast<size_t>(input.T * Case::E), 1);
      const std::vector<float> weights(map.size(), 0.25F);
      auto routing = made<crossdock_routing>();
      routing.map = crossdock_tensor_2d(map.data(), CROSSDOCK_BOOL, input.T, Case::E);
      routing.weights = tensor(weights, input.T, Case::E);
      crossdock_plan* plan = nullptr;
      ASSERT_OK(crossdock_plan_create(by_slot.dispatcher, &routing, &plan));
      auto info = made<crossdock_plan_info>();
      ASSERT_OK(crossdock_plan_describe(plan, &info));
      EXPECT_EQ(info.weights.shape[1], Case::E);
      auto args = made<crossdock_dispatch_args>();
      args.x = tensor(input.x, input.T, Case::D);
      auto sent = made<crossdock_dispatch_result>();
      ASSERT_OK(crossdock_dispatch(by_slot.dispatcher, plan, &args, &sent));
      crossdock_output out = {};
      ASSERT_OK(crossdock_combine(by_slot.dispatcher, plan, &sent.rows.tensor, &out));
      std::vector<double> wanted = doubles(input.x);
      for (double& value : wanted) value *= 0.25 * Case::E;
      EXPECT_EQ(doubles(out.tensor), wanted);
      EXPECT_OK(crossdock_output_release(&out, nullptr));
      EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
      crossdock_plan_destroy(plan);
    });
  }
}

TEST(CApi, EmptyExpertsKeepOneAlignmentUnitOfPadRows) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    auto config = Case::config();
    config.keep_empty_segments = 1;
    config.alignment = 8;
    const Case input(0);  // two tokens, three routes, to experts 0, 2 and 1
    const Planned planned(group, input, config);
    ASSERT_EQ(planned.info.num_local_experts, Case::E);
    EXPECT_EQ(planned.info.capacity_rows, 8 * Case::E);
    EXPECT_EQ(planned.info.segment_counts[4], 0);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    auto sent = made<crossdock_dispatch_result>();
    ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
    const std::vector<double> rows = doubles(sent.rows.tensor);
    const std::vector<double> last(rows.end() - 8 * Case::D, rows.end());
    EXPECT_EQ(last, std::vector<double>(static_cast<size_t>(8 * Case::D), 0.0));
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
  });
}

TEST(CApi, WeightsThatAreNotFiniteAreRefusedUnlessTheyPropagate) {
  run_c_ranks(2, [](crossdock_group* group, int rank) {
    Case input(2);  // the same tokens on both ranks
    if (rank == 1) input.weights[0] = std::numeric_limits<float>::infinity();
    const crossdock_routing routing = input.routing();
    for (const int32_t nonfinite : {CROSSDOCK_NONFINITE_REJECT, CROSSDOCK_NONFINITE_PROPAGATE}) {
      auto config = Case::config();
      config.nonfinite = nonfinite;
      crossdock_dispatcher* dispatcher = nullptr;
      ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
      crossdock_plan* plan = nullptr;
      const bool is_refused = nonfinite == CROSSDOCK_NONFINITE_REJECT;
      EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan),
                is_refused ? CROSSDOCK_INVALID_ARGUMENT : CROSSDOCK_OK)
          << crossdock_last_error();
      if (!is_refused && rank == 1) {
        auto info = made<crossdock_plan_info>();
        EXPECT_OK(crossdock_plan_describe(plan, &info));
        EXPECT_EQ(doubles(info.weights)[0], std::numeric_limits<double>::infinity());
      }
      crossdock_plan_destroy(plan);
      crossdock_dispatcher_destroy(dispatcher);
    }
  });
}

TEST(CApi, RanksMustAgreeOnTheTypeOfPartialSums) {
  run_c_ranks(2, [](crossdock_group* group, int rank) {
    const Case input(rank);
    const crossdock_routing routing = input.routing();
    auto config = Case::config();
    const auto plan_with = [&](int32_t partial_sums) {
      config.partial_sums = partial_sums;
      crossdock_dispatcher* dispatcher = nullptr;
      EXPECT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
      crossdock_plan* plan = nullptr;
      const crossdock_status status = crossdock_plan_create(dispatcher, &routing, &plan);
      crossdock_plan_destroy(plan);
      crossdock_dispatcher_destroy(dispatcher);
      return status;
    };
    for (const int32_t sums : {CROSSDOCK_PARTIAL_SUMS_FP32, CROSSDOCK_PARTIAL_SUMS_ROWS}) {
      EXPECT_EQ(plan_with(sums), CROSSDOCK_OK);
    }
    EXPECT_EQ(plan_with(rank == 1 ? CROSSDOCK_PARTIAL_SUMS_ROWS : CROSSDOCK_PARTIAL_SUMS_FP32),
              CROSSDOCK_MISMATCH);
    EXPECT_NE(std::string(crossdock_last_error()).find("rank 1 has partial_sums=rows"),
              std::string::npos)
        << crossdock_last_error();
  });
}

TEST(CApi, WeightsMayBeBf16) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    const Case input(0);
    const Planned planned(group, input);
    std::vector<uint16_t> bits;
    for (const float weight : input.weights) bits.push_back(to_bf16(weight).bits);
    crossdock_routing routing = input.routing();
    routing.weights = crossdock_tensor_2d(bits.data(), CROSSDOCK_BF16, input.T, Case::K);
    crossdock_plan* plan = nullptr;
    ASSERT_OK(crossdock_plan_create(planned.dispatcher, &routing, &plan));
    auto info = made<crossdock_plan_info>();
    ASSERT_OK(crossdock_plan_describe(plan, &info));
    EXPECT_EQ(doubles(info.weights), doubles(planned.info.weights));
    crossdock_plan_destroy(plan);
  });
}

}  // namespace
}  // namespace crossdock::capi_test
