// A dispatch in chunks of whole local experts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "crossdock/extend/forwarding_strategy.hpp"
#include "dispatch/random_case.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> bytes_of(const TensorView& tensor, int64_t first_row, int64_t last_row) {
  const auto* data = static_cast<const std::byte*>(tensor.data);
  return {data + first_row * tensor.row_bytes(), data + last_row * tensor.row_bytes()};
}

DispatchConfig config_of(int64_t num_experts, int64_t alignment) {
  DispatchConfig config;
  config.num_experts = num_experts;
  config.top_k = 3;
  config.width = 40;
  config.alignment = alignment;
  return config;
}

struct Setting {
  std::string strategy;
  ThreadOptions threads;
  DispatchCase input;
  bool own_memory = false;  // rows are in the caller's memory
  DType dtype = DType::kF32;
};

// The bytes that the last dispatch recorded for its chunks add up to those of the whole dispatch.
void expect_bytes_of_all_chunks(const EventRecorder& recorder) {
  const auto is = [](const Event& event, std::string_view phase) {
    return std::string_view(event.operation) == "dispatch" && event.phase == phase;
  };
  const std::vector<Event> events = recorder.events();
  Event last;
  for (const Event& event : events) {
    if (is(event, "") && event.sequence > last.sequence) last = event;
  }
  int64_t bytes_of_chunks = 0;
  for (const Event& event : events) {
    if (is(event, "chunk") && event.sequence == last.sequence) bytes_of_chunks += event.bytes;
  }
  EXPECT_EQ(bytes_of_chunks, last.bytes);
}

// When on_chunk is called, the rows, scales and weights of the chunk equal those of a dispatch in
// one piece; chunks arrive in order and cover all experts.
void expect_rows_of_every_chunk(const Setting& setting, int64_t num_chunks) {
  const auto P = static_cast<int>(setting.input.ranks.size());
  std::vector<int> calls(static_cast<size_t>(P), 0);
  run_ranks(
      P,
      [&](Group& group) {
        const auto& config = setting.input.config;
        Dispatcher dispatcher(group, config, setting.strategy);
        const RankTensors tensors =
            tensors_of(config, setting.input.ranks[static_cast<size_t>(group.rank())], DType::kF32);
        const bool is_fp8 = setting.dtype == DType::kF8E4M3;
        const int64_t T = tensors.x.view.num_rows();
        const std::vector<float> scales(static_cast<size_t>(T),
                                        0.5f + static_cast<float>(group.rank()));
        const Plan plan = dispatcher.plan(tensors.routing());
        DispatchArgs args{.x = tensors.x.view, .with_row_weights = true};
        if (is_fp8) {  // any bits will do
          args.x = {tensors.x.view.data, DType::kF8E4M3, {T, config.width}};
          args.scales = ConstTensorView(scales.data(), {T, 1});
        }
        const DispatchResult whole = dispatcher.dispatch(plan, args);

        std::vector<float> rows(static_cast<size_t>(plan.num_rows() * config.width), -1.0f);
        if (setting.own_memory) {
          args.rows = TensorView(rows.data(), args.x.dtype, {plan.num_rows(), config.width});
        }
        int64_t next_expert = 0;
        args.num_chunks = num_chunks;
        args.on_chunk = [&](const DispatchResult& result, const DispatchChunk& chunk) {
          EXPECT_EQ(chunk.first_expert, next_expert);
          next_expert = chunk.last_expert;
          ++calls[static_cast<size_t>(group.rank())];
          if (plan.num_local_experts() == 0) return;
          const int64_t first = plan.segments().starts[chunk.first_expert];
          const int64_t last = plan.segments().starts[chunk.last_expert];
          EXPECT_EQ(bytes_of(result.rows.view, first, last),
                    bytes_of(whole.rows.view, first, last));
          EXPECT_EQ(bytes_of(result.row_weights.view, 0, plan.num_rows()),
                    bytes_of(whole.row_weights.view, 0, plan.num_rows()));
          if (!is_fp8) return;
          EXPECT_EQ(bytes_of(result.row_scales.view, first, last),
                    bytes_of(whole.row_scales.view, first, last));
        };
        const DispatchResult result = dispatcher.dispatch(plan, args);
        EXPECT_EQ(next_expert, plan.num_local_experts());
        if (num_chunks > 1 && config.num_experts > group.size()) {
          expect_bytes_of_all_chunks(group.recorder());
        }
        EXPECT_EQ(bytes_of(result.rows.view, 0, plan.num_rows()),
                  bytes_of(whole.rows.view, 0, plan.num_rows()));
      },
      setting.threads);
  const int64_t most = (setting.input.config.num_experts + P - 1) / P;
  for (const int count : calls) EXPECT_EQ(count, std::min(num_chunks, most));
}

TEST(DispatchChunks, HaveTheirRowsWhenTheyAreAnnounced) {
  for (const std::string& strategy : strategy_names()) {
    for (const int ranks_per_node : {0, 2}) {
      for (const int64_t num_experts : {3, 13}) {
        for (const bool own_memory : {false, true}) {
          Setting setting{.strategy = strategy,
                          .threads = short_deadlines(),
                          .input = random_case(config_of(num_experts, own_memory ? 8 : 1),
                                               {19, 0, 40, 7, 23}, 5),
                          .own_memory = own_memory};
          setting.threads.ranks_per_node = ranks_per_node;
          SCOPED_TRACE(strategy + ", " + std::to_string(num_experts) + " experts, " +
                       std::to_string(ranks_per_node) + " per node" +
                       (own_memory ? ", own memory" : ""));
          for (const int64_t num_chunks : {1, 2, 3, 50}) {
            expect_rows_of_every_chunk(setting, num_chunks);
          }
          setting.dtype = DType::kF8E4M3;
          expect_rows_of_every_chunk(setting, 2);
        }
      }
    }
  }
}

// A strategy without support for chunks.
class Plain : public ForwardingStrategy {
 public:
  Plain() : ForwardingStrategy(make_strategy("alltoall")) {}
  void scatter_chunks(const StrategyCall& strategy_call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    // What a strategy inherits. NOLINTNEXTLINE(bugprone-parent-virtual-call)
    Strategy::scatter_chunks(strategy_call, parts, chunks, arrived);
  }
};

TEST(DispatchChunks, OfAStrategyThatKnowsOfNoneAllComeAtTheEnd) {
  const DispatchCase input = random_case(config_of(8, 1), {5, 9}, 3);
  run_ranks(2, [&](Group& group) {
    Dispatcher dispatcher(group, input.config, std::make_unique<Plain>());
    const RankTensors tensors =
        tensors_of(input.config, input.ranks[static_cast<size_t>(group.rank())], DType::kF32);
    const Plan plan = dispatcher.plan(tensors.routing());
    int64_t calls = 0;
    dispatcher.dispatch(
        plan, {.x = tensors.x.view,
               .num_chunks = 3,
               .on_chunk = [&](const DispatchResult&, const DispatchChunk&) { ++calls; }});
    EXPECT_EQ(calls, 3);
  });
}

TEST(DispatchChunks, MustBeAlikeOnAllRanksAndAtLeastOne) {
  const DispatchCase input = random_case(config_of(8, 1), {5, 9}, 3);
  run_ranks(2, [&](Group& group) {
    Dispatcher dispatcher(group, input.config, "direct");
    const RankTensors tensors =
        tensors_of(input.config, input.ranks[static_cast<size_t>(group.rank())], DType::kF32);
    const Plan plan = dispatcher.plan(tensors.routing());
    EXPECT_THAT(message_of([&] {
                  dispatcher.dispatch(plan, {.x = tensors.x.view, .num_chunks = 1 + group.rank()});
                }),
                HasSubstr("num_chunks"));
    EXPECT_THAT(message_of([&] {
                  dispatcher.dispatch(plan, {.x = tensors.x.view, .num_chunks = -group.rank()});
                }),
                HasSubstr("num_chunks must be at least 1"));
    dispatcher.dispatch(plan, {.x = tensors.x.view, .num_chunks = 2});
  });
}

TEST(DispatchChunks, AnExceptionOfOnChunkIsTheSameErrorEverywhere) {
  const DispatchCase input = random_case(config_of(9, 1), {5, 9, 4}, 3);
  for (const std::string& strategy : strategy_names()) {
    run_ranks(
        3,
        [&](Group& group) {
          Dispatcher dispatcher(group, input.config, strategy);
          const RankTensors tensors =
              tensors_of(input.config, input.ranks[static_cast<size_t>(group.rank())], DType::kF32);
          const Plan plan = dispatcher.plan(tensors.routing());
          const auto on_chunk = [&](const DispatchResult&, const DispatchChunk& chunk) {
            if (group.rank() == 1 && chunk.first_expert == 1) throw std::runtime_error("a fault");
          };
          const std::string message = message_of([&] {
            const DispatchResult sent = dispatcher.dispatch(
                plan, {.x = tensors.x.view, .num_chunks = 3, .on_chunk = on_chunk});
            static_cast<void>(dispatcher.combine(plan, sent.rows.view));
          });
          EXPECT_THAT(message, HasSubstr("a fault")) << strategy << ", rank " << group.rank();
          EXPECT_TRUE(group.is_poisoned());
        },
        short_deadlines());
  }
}

// Peers have received everything by then, but still learn of it in the same call.
TEST(DispatchChunks, AnExceptionAfterTheLastExchangeIsTheSameErrorEverywhere) {
  const DispatchCase input = random_case(config_of(9, 1), {5, 9, 4}, 3);
  for (const std::string& strategy : strategy_names()) {
    for (const int64_t num_chunks : {1, 3}) {
      SCOPED_TRACE(strategy + ", " + std::to_string(num_chunks) + " chunks");
      run_ranks(
          3,
          [&](Group& group) {
            Dispatcher dispatcher(group, input.config, strategy);
            const RankTensors tensors = tensors_of(
                input.config, input.ranks[static_cast<size_t>(group.rank())], DType::kF32);
            const Plan plan = dispatcher.plan(tensors.routing());
            const auto on_chunk = [&](const DispatchResult&, const DispatchChunk& chunk) {
              const bool is_last = chunk.last_expert == plan.num_local_experts();
              if (group.rank() == 1 && is_last) throw std::runtime_error("a fault");
            };
            try {
              dispatcher.dispatch(
                  plan, {.x = tensors.x.view, .num_chunks = num_chunks, .on_chunk = on_chunk});
              ADD_FAILURE() << "rank " << group.rank() << " got no error";
            } catch (const Error& error) {
              EXPECT_THAT(error.what(), HasSubstr("a fault"));
              EXPECT_EQ(error.context().culprit, 1);
              EXPECT_STREQ(error.context().operation, "dispatch");
            }
            EXPECT_TRUE(group.is_poisoned());
          },
          short_deadlines());
    }
  }
}

TEST(DispatchChunks, AreWatchedOnAllRanksOrOnNone) {
  const DispatchCase input = random_case(config_of(9, 1), {5, 9, 4}, 3);
  run_ranks(
      3,
      [&](Group& group) {
        Dispatcher dispatcher(group, input.config, "alltoall");
        const RankTensors tensors =
            tensors_of(input.config, input.ranks[static_cast<size_t>(group.rank())], DType::kF32);
        const Plan plan = dispatcher.plan(tensors.routing());
        DispatchArgs args{.x = tensors.x.view};
        if (group.rank() == 2) args.on_chunk = [](const DispatchResult&, const DispatchChunk&) {};
        EXPECT_THAT(message_of([&] { dispatcher.dispatch(plan, args); }),
                    HasSubstr("rank 2 has on_chunk=1 where rank 0 has on_chunk=0"));
        EXPECT_FALSE(group.is_poisoned());
      },
      short_deadlines());
}

}  // namespace
}  // namespace crossdock
