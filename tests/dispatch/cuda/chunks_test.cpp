// A begun dispatch in chunks of whole local experts.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

using CudaChunks = CudaTest;

DispatchConfig small_config() {
  return {.num_experts = 11, .top_k = 3, .width = 40};
}

std::vector<int64_t> starts_of(const Plan& plan, const RankStream& stream) {
  const int64_t count = plan.num_local_experts() + 1;
  const ConstTensorView starts(plan.segments().starts, DType::kI64, {count},
                               plan.segments().device);
  const std::vector<std::byte> bytes = to_host(starts, stream);
  std::vector<int64_t> values(static_cast<size_t>(count));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Rows [begin, end) of a tensor that has been copied to the host.
std::vector<std::byte> rows_of(const std::vector<std::byte>& all, int64_t row_bytes, int64_t begin,
                               int64_t end) {
  return {all.begin() + begin * row_bytes, all.begin() + end * row_bytes};
}

// Every chunk has its rows and weights once the stream has passed it; chunks arrive in order and
// cover all experts. Returns their number.
int expect_chunks(GpuRank& rank, const Plan& plan, Pending<DispatchResult>& pending,
                  const StepBytes& wanted) {
  const std::vector<int64_t> starts = starts_of(plan, rank.stream);
  const int64_t R = plan.num_rows();
  int64_t next_expert = 0;
  int count = 0;
  while (const std::optional<DispatchChunk> chunk = rank.dispatcher.next_chunk(pending)) {
    ++count;
    EXPECT_EQ(chunk->first_expert, next_expert);
    next_expert = chunk->last_expert;
    const int64_t begin = starts[static_cast<size_t>(chunk->first_expert)];
    const int64_t end = starts[static_cast<size_t>(chunk->last_expert)];
    const DispatchResult& moved = pending.result();
    const auto expect_rows = [&](const TensorView& got, const std::vector<std::byte>& all) {
      EXPECT_EQ(rows_of(to_host(got, R, rank.stream), got.row_bytes(), begin, end),
                rows_of(all, got.row_bytes(), begin, end));
    };
    expect_rows(moved.rows.view, wanted.rows);
    expect_rows(moved.row_weights.view, wanted.row_weights);
  }
  EXPECT_EQ(next_expert, plan.num_local_experts());
  return count;
}

int64_t most_local_experts(const Plan& plan) {
  const PlanData& data = plan.data();
  int64_t most = 1;
  for (int rank = 0; rank < data.P; ++rank) {
    const auto r = static_cast<size_t>(rank);
    most = std::max<int64_t>(most, data.owner_offsets[r + 1] - data.owner_offsets[r]);
  }
  return most;
}

void expect_all_chunks(const DispatchCase& the_case, const GpuSetting& setting) {
  run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& wanted) {
    for (const int64_t num_chunks : {1, 2, 3, 50}) {
      const Plan plan = rank.plan();
      Pending<DispatchResult> pending = rank.dispatcher.begin_dispatch(
          plan, {.x = rank.tensors.x.view, .with_row_weights = true, .num_chunks = num_chunks});
      const bool is_split = setting.strategy == "direct" || setting.strategy == "hierarchical";
      EXPECT_EQ(expect_chunks(rank, plan, pending, wanted),
                is_split ? std::min(num_chunks, most_local_experts(plan)) : 1)
          << num_chunks << " chunks";
      const DispatchResult moved = rank.dispatcher.finish(std::move(pending));
      EXPECT_EQ(to_host(moved.rows.view, plan.num_rows(), rank.stream), wanted.rows);
    }
    rank.dispatcher.check();
  });
}

// With max_sms 6 a scatter has one block per SM and waits for its peers itself; with 40 the SMs of
// all ranks do not fit.
TEST_F(CudaChunks, HaveTheirRowsWhenTheStreamHasComePastThem) {
  for (const std::vector<int64_t>& tokens :
       std::vector<std::vector<int64_t>>{{300}, {50, 30}, {50, 0, 30, 7}}) {
    for (const int max_sms : {0, 6, 40}) {
      DispatchConfig config = small_config();
      config.max_rows = max_sms == 6 ? std::optional<int64_t>(2000) : std::nullopt;
      expect_all_chunks(random_case(config, tokens, 5), {.options = {.max_sms = max_sms}});
    }
  }
}

// A single chunk is sent with one copy per rank, several with one copy per route.
TEST_F(CudaChunks, HaveTheirRowsWithOneCopyPerRank) {
  DispatchConfig config = small_config();
  config.copies = Copies::kPerRank;
  for (const int max_sms : {0, 6}) {
    expect_all_chunks(random_case(config, {50, 30, 7}, 5), {.options = {.max_sms = max_sms}});
  }
}

TEST_F(CudaChunks, HaveTheirRowsWithPadRowsDropsAndAnyPlacement) {
  DispatchConfig aligned = small_config();
  aligned.alignment = 16;
  aligned.keep_empty_segments = true;
  DispatchConfig padded = small_config();
  padded.capacity = Capacity{.factor = 0.5, .pad_to_capacity = true, .max_tokens = 64};
  DispatchConfig by_weight = small_config();  // the host makes the plan
  by_weight.capacity = Capacity{.factor = 0.5, .policy = DropPolicy::kWeight};
  DispatchConfig placed = small_config();  // rank 0 has no expert, rank 1 the odd ones
  for (int32_t e = 0; e < 11; ++e) placed.placement.push_back(1 + (e + 1) % 2);
  for (const DispatchConfig& config : {aligned, padded, by_weight, placed}) {
    expect_all_chunks(random_case(config, {50, 0, 61}, 6),
                      {.dtype = DType::kBF16, .options = {.max_sms = 8}});
  }
}

TEST_F(CudaChunks, AreOneWhereRowsArePacked) {
  expect_all_chunks(random_case(small_config(), {20, 30}, 7), {.strategy = "alltoall"});
  expect_all_chunks(random_case(small_config(), {20, 0, 9}, 8), {.strategy = "allgather"});
}

// Rows that peers cannot reach are copied once, after the last chunk.
TEST_F(CudaChunks, MayLandInTheMemoryOfTheCaller) {
  const DispatchCase the_case = random_case(small_config(), {50, 30}, 9);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const Plan plan = rank.plan();
    const OwnedTensor rows =
        device_tensor(DType::kF32, {plan.num_rows(), the_case.config.width}, rank.stream);
    Pending<DispatchResult> pending = rank.dispatcher.begin_dispatch(
        plan,
        {.x = rank.tensors.x.view, .rows = rows.view, .with_row_weights = true, .num_chunks = 4});
    EXPECT_EQ(expect_chunks(rank, plan, pending, wanted), 4);
    rank.dispatcher.finish(std::move(pending));
  });
}

// One graph of plan and chunks, replayed with other tokens.
TEST_F(CudaChunks, CanBeCaptured) {
  DispatchConfig config = small_config();
  config.max_rows = 600;
  const DispatchCase the_case = random_case(config, {50, 30}, 10);
  for (const int max_sms : {0, 8}) {
    run_on_gpu(the_case, {.options = {.max_sms = max_sms}},
               [&](GpuRank& rank, const StepBytes& wanted) {
                 const DispatchArgs args{.x = rank.tensors.x.view, .num_chunks = 3};
                 const auto step = [&] {
                   Plan plan = rank.plan();
                   Pending<DispatchResult> pending = rank.dispatcher.begin_dispatch(plan, args);
                   while (rank.dispatcher.next_chunk(pending)) {
                   }
                   const DispatchResult moved = rank.dispatcher.finish(std::move(pending));
                   return std::pair(plan, moved);
                 };
                 static_cast<void>(step());  // sets up
                 rank.stream.synchronize();
                 std::optional<std::pair<Plan, DispatchResult>> made;
                 const CapturedGraph graph(rank, [&] { made = step(); });
                 for (int i = 0; i < 5; ++i) {
                   graph.launch();
                   rank.stream.synchronize();
                   const auto& [plan, moved] = *made;
                   EXPECT_EQ(to_host(moved.rows.view, plan.num_rows(), rank.stream), wanted.rows);
                   cuda_ok(cudaMemsetAsync(moved.rows.view.data, 0xff,
                                           static_cast<size_t>(moved.rows.view.num_bytes()),
                                           rank.stream.get()));
                   rank.stream.synchronize();
                   rank.group.agree({.operation = "replayed"});
                 }
                 rank.dispatcher.check();
               });
  }
}

TEST_F(CudaChunks, MustBeBegunOnAllRanksAndTakenWithNextChunk) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 11);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const Plan plan = rank.plan();
    DispatchArgs args{.x = rank.tensors.x.view, .num_chunks = 2};
    const auto begin = [&] { rank.dispatcher.finish(rank.dispatcher.begin_dispatch(plan, args)); };
    EXPECT_THAT(message_of([&] {
                  if (rank.group.rank() == 0) {
                    rank.dispatcher.dispatch(plan, args);
                  } else {
                    begin();
                  }
                }),
                HasSubstr("begun=1"));
    args.num_chunks = 2 + rank.group.rank();
    EXPECT_THAT(message_of(begin), HasSubstr("num_chunks=3"));
    args.num_chunks = 2;
    args.on_chunk = [](const DispatchResult&, const DispatchChunk&) {};
    EXPECT_THAT(message_of(begin), HasSubstr("call next_chunk instead"));
    const QueuedStep queued(rank.dispatcher, rank.tensors);
    expect_same(queued.wait(rank.stream), wanted);
  });
}

// The kernel alone: rows of other chunks keep their values.
class ScatterOfChunk : public CudaTest {
 protected:
  static constexpr int kRanks = 2;
  static constexpr int64_t kTokens = 37;
  static constexpr int32_t kSlots = 3;
  static constexpr int64_t kRowBytes = 48;
  static constexpr int64_t kRows = 60;

  // Token t sends slot k to row (3 t + k) / 2 of rank (3 t + k) % 2.
  static cuda::RouteTarget target_of(int64_t route) {
    return {static_cast<int32_t>(route % kRanks), static_cast<int32_t>(route / kRanks)};
  }

  static OwnedTensor bytes_on_device(const void* data, size_t num_bytes, const RankStream& stream) {
    return to_device(ConstTensorView(data, DType::kU8, {static_cast<int64_t>(num_bytes)}), stream);
  }
};

TEST_F(ScatterOfChunk, LeavesOtherRowsAlone) {
  const RankStream stream;
  std::vector<cuda::RouteTarget> targets;
  for (int64_t i = 0; i < kTokens * kSlots; ++i) targets.push_back(target_of(i));
  std::vector<uint8_t> tokens(kTokens * kRowBytes);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint8_t>(i / kRowBytes + 1);
  // Experts 0 and 1 of rank 0 begin at rows 0 and 20, experts 2 and 3 of rank 1 at rows 0 and 31.
  const std::vector<int32_t> starts{0, 20, 0, 31};
  const cuda::SignalState state{};
  const cuda::FaultBoard faults{};
  const OwnedTensor targets_there = bytes_on_device(targets.data(), targets.size() * 8, stream);
  const OwnedTensor tokens_there = bytes_on_device(tokens.data(), tokens.size(), stream);
  const OwnedTensor starts_there = bytes_on_device(starts.data(), starts.size() * 4, stream);
  const OwnedTensor state_there = bytes_on_device(&state, sizeof(state), stream);
  const OwnedTensor faults_there = bytes_on_device(&faults, sizeof(faults), stream);
  cuda::load_scatter_chunk();
  for (const bool takes_whole_sms : {false, true}) {
    OwnedTensor rows[kRanks];
    cuda::ScatterChunkArgs chunk{};
    cuda::ScatterArgs& args = chunk.scatter;
    args.targets = static_cast<const cuda::RouteTarget*>(targets_there.view.data);
    args.T = kTokens;
    args.K = kSlots;
    args.num_parts = 1;
    args.parts[0].tokens = static_cast<const std::byte*>(tokens_there.view.data);
    args.parts[0].row_bytes = kRowBytes;
    for (int rank = 0; rank < kRanks; ++rank) {
      rows[rank] = device_tensor(DType::kU8, {kRows, kRowBytes}, stream);  // 0xff everywhere
      args.parts[0].rows.known[rank] = static_cast<std::byte*>(rows[rank].view.data);
    }
    chunk.rows.segment_starts = static_cast<const int32_t*>(starts_there.view.data);
    chunk.rows.first[0] = 1;  // rows 20 and up
    chunk.rows.end[0] = -1;
    chunk.rows.first[1] = 2;  // rows below 31
    chunk.rows.end[1] = 3;
    args.signals.state = static_cast<cuda::SignalState*>(state_there.view.data);
    args.signals.faults = static_cast<cuda::FaultBoard*>(faults_there.view.data);
    chunk.takes_whole_sms = takes_whole_sms;
    cuda::launch_scatter_chunk(chunk, 2, stream.get());
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<std::byte> wanted(kRows * kRowBytes, std::byte{0xff});
      for (int64_t route = 0; route < kTokens * kSlots; ++route) {
        const cuda::RouteTarget target = target_of(route);
        const bool is_sent = rank == 0 ? target.row >= 20 : target.row < 31;
        if (target.rank != rank || !is_sent) continue;
        std::fill_n(wanted.begin() + target.row * kRowBytes, kRowBytes,
                    static_cast<std::byte>(route / kSlots + 1));
      }
      EXPECT_EQ(to_host(rows[rank].view, stream), wanted)
          << "rank " << rank << (takes_whole_sms ? ", whole SMs" : "");
    }
  }
}

}  // namespace
}  // namespace crossdock
