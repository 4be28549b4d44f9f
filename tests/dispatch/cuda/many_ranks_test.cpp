// More ranks than can reach each other's GPU memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "comm/cuda/peer_signals.cuh"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/channel_ranks.hpp"
#include "dispatch/cuda/packed_step.hpp"
#include "dispatch/lone_communicator.hpp"

namespace crossdock {
namespace {

using cuda::ChannelRanks;
using cuda::Waits;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kManyRanks = 80;
static_assert(kManyRanks > cuda::kMaxPeers);

TEST(CudaChannelRanks, AreThoseThatKernelsWaitFor) {
  const Topology topology = Topology::uniform(10, 4);  // 0..3, 4..7, 8..9
  const ChannelRanks all(topology, 5, Waits::kForAll);
  EXPECT_EQ(all.size(), 10);
  EXPECT_EQ(all.slot_of(9), 9);
  const ChannelRanks node(topology, 9, Waits::kForNode);
  EXPECT_EQ(node.size(), 2);
  EXPECT_EQ(node.slot_of(8), 0);
  EXPECT_EQ(node.slot_of(9), 1);
  EXPECT_EQ(node.slot_of(3), -1);
  EXPECT_EQ(node.rank_at(0), 8);
  const ChannelRanks alone(topology, 6, Waits::kNone);
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.slot_of(6), 0);
  EXPECT_EQ(alone.slot_of(5), -1);
}

// The refusal of rank 0, or "" if there is none.
std::string refusal(const std::string& strategy, const Topology& topology, Waits waits) {
  constexpr int kLimit = 3;
  const ChannelRanks ranks(topology, 0, waits);
  const cuda::ChannelUse use{
      .strategy = strategy,
      .waits = waits,
      .uses_rows_in_place = strategy == "direct" || strategy == "hierarchical"};
  const std::optional<Error> error =
      error_of([&] { cuda::check_channel_size(use, topology, ranks, kLimit); });
  return error ? error->what() : "";
}

TEST(CudaChannelRanks, AreLimitedOnlyWhereKernelsWaitForThem) {
  const Topology one_node = Topology::uniform(4, 4);
  const Topology nodes_of_two = Topology::uniform(4, 2);
  for (const char* strategy : {"alltoall", "allgather"}) {
    EXPECT_EQ(refusal(strategy, one_node, Waits::kNone), "");
    EXPECT_EQ(refusal(strategy, Topology::uniform(3, 3), Waits::kForAll), "");
  }
  for (const char* strategy : {"direct", "hierarchical"}) {
    EXPECT_EQ(refusal(strategy, nodes_of_two, Waits::kForNode), "");
    EXPECT_EQ(refusal(strategy, Topology::uniform(3, 3), Waits::kForAll), "");
  }
}

TEST(CudaChannelRanks, TooManyAreRefusedWithAnAlternativeThatWorks) {
  const Topology one_node = Topology::uniform(4, 4);
  const Topology nodes_of_two = Topology::uniform(4, 2);
  const Topology nodes_of_three = Topology::uniform(6, 3);
  EXPECT_EQ(refusal("direct", one_node, Waits::kForAll),
            "direct: at most 3 ranks can reach each other's GPU memory, got 4; use alltoall or "
            "allgather with an NCCL communicator (DeviceOptions::nccl_comm)");
  EXPECT_THAT(refusal("alltoall", one_node, Waits::kForAll),
              AllOf(HasSubstr("; give an NCCL communicator"), Not(HasSubstr("use alltoall"))));
  EXPECT_THAT(refusal("hierarchical", nodes_of_two, Waits::kForAll),
              HasSubstr("; give an NCCL communicator"));
  EXPECT_THAT(refusal("hierarchical", nodes_of_three, Waits::kForAll),
              HasSubstr("; use alltoall or allgather with an NCCL communicator"));
  // Rows from other nodes take the last slot.
  EXPECT_THAT(refusal("hierarchical", nodes_of_three, Waits::kForNode),
              AllOf(HasSubstr("at most 2 ranks"), HasSubstr("; use alltoall or allgather, which")));
}

using CudaManyRanks = CudaTest;

DispatchCase case_of(int num_ranks) {
  const std::vector<int64_t> tokens_per_rank(static_cast<size_t>(num_ranks), 6);
  return random_case({.num_experts = 2 * num_ranks, .top_k = 3, .width = 24}, tokens_per_rank, 70);
}

ThreadOptions nodes_of(int ranks_per_node) {
  ThreadOptions options = short_deadlines();
  options.ranks_per_node = ranks_per_node;
  options.group.arrival_deadline = options.group.progress_deadline = std::chrono::seconds(120);
  return options;
}

/// Replaces NCCL, for any number of ranks on one GPU: exchanges through host memory and the group,
/// and waits for peers there.
class HostTransport final : public cuda::RowTransport {
 public:
  explicit HostTransport(cuda::CudaRank& rank) : rank_(rank) {}

  void run(const cuda::GpuCall& call, size_t /*first_entry*/,
           std::span<const cuda::RowTransfer> transfers) override {
    cuda_ok(cudaStreamSynchronize(rank_.stream()));
    for (const cuda::RowTransfer& transfer : transfers) exchange(call.agreed(), transfer);
    cuda_ok(cudaStreamSynchronize(rank_.stream()));
  }

 private:
  void exchange(const cuda::AgreedCall& agreed, const cuda::RowTransfer& transfer) {
    std::vector<int64_t> send_offsets{0};
    std::vector<int64_t> recv_offsets{0};
    for (const cuda::RowTraffic::Part& part : transfer.traffic.parts) {
      send_offsets.push_back(send_offsets.back() + part.send_count * transfer.row_bytes);
      recv_offsets.push_back(recv_offsets.back() + part.recv_count * transfer.row_bytes);
    }
    const Buffer sent(send_offsets.back());
    const Buffer received(recv_offsets.back());
    for (size_t p = 0; p + 1 < send_offsets.size(); ++p) {
      const cuda::RowTraffic::Part& part = transfer.traffic.parts[p];
      copy(sent.data() + send_offsets[p], transfer.send + part.send_begin * transfer.row_bytes,
           part.send_count * transfer.row_bytes);
    }
    cuda_ok(cudaStreamSynchronize(rank_.stream()));
    const auto shared = [](const Buffer& buffer) {
      return SharedBytes{buffer.data(), buffer.num_bytes(), buffer.owner()};
    };
    rank_.group().all_to_all_v(shared(sent), send_offsets, shared(received), recv_offsets,
                               rank_.group().wait_context("exchange", agreed.sequence));
    for (size_t p = 0; p + 1 < recv_offsets.size(); ++p) {
      const cuda::RowTraffic::Part& part = transfer.traffic.parts[p];
      copy(transfer.recv + part.recv_begin * transfer.row_bytes, received.data() + recv_offsets[p],
           part.recv_count * transfer.row_bytes);
    }
    cuda_ok(cudaStreamSynchronize(rank_.stream()));
  }

  void copy(void* to, const void* from, int64_t num_bytes) const {
    if (num_bytes == 0) return;
    cuda_ok(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault,
                            rank_.stream()));
  }

  cuda::CudaRank& rank_;
};

// With a transport that replaces NCCL.
void expect_bits_through_the_host(int num_ranks, int ranks_per_node, const std::string& strategy,
                                  PartialSums sums = PartialSums::kNone) {
  DispatchCase the_case = case_of(num_ranks);
  the_case.config.partial_sums = sums;
  expect_bits_of_the_cpu({.the_case = the_case,
                          .options = nodes_of(ranks_per_node),
                          .strategy = strategy,
                          .make_transport = [](cuda::CudaRank& rank) {
                            return std::make_unique<HostTransport>(rank);
                          }});
}

// Slots of the second node's ranks differ from their indices. Must be the first of these tests:
// kernels wait for other ranks here, and streams of other tests would share their hardware queues.
TEST_F(CudaManyRanks, AFewRelayTokensWithinTheirNodesOnly) {
  for (const char* strategy : {"direct", "hierarchical"}) {
    expect_bits_through_the_host(5, 3, strategy);
    expect_bits_through_the_host(6, 2, strategy);
    expect_bits_through_the_host(5, 3, strategy, PartialSums::kF32);
  }
}

TEST_F(CudaManyRanks, ExchangeThroughATransportThatWaitsItself) {
  for (const char* strategy : {"alltoall", "allgather"}) {
    expect_bits_through_the_host(kManyRanks, 0, strategy);
    expect_bits_through_the_host(kManyRanks, 0, strategy, PartialSums::kF32);
  }
}

// Nodes of one rank: kernels of ranks that wait for each other need a hardware queue each, and the
// GPU has fewer queues than there are ranks.
TEST_F(CudaManyRanks, RelayTokensBetweenNodes) {
  for (const char* strategy : {"direct", "hierarchical"}) {
    expect_bits_through_the_host(kManyRanks, 1, strategy);
    expect_bits_through_the_host(kManyRanks, 1, strategy, PartialSums::kF32);
  }
}

TEST_F(CudaManyRanks, DirectSaysWhatWorksInstead) {
  const DispatchCase the_case = case_of(kManyRanks);
  run_ranks(
      kManyRanks,
      [&](Group& group) {
        GpuRank rank(group, the_case, {});
        EXPECT_THAT(message_of([&] { rank.plan(); }),
                    HasSubstr("direct: at most 72 ranks can reach each other's GPU memory, got 80; "
                              "use alltoall or allgather with an NCCL communicator"));
        group.check();
      },
      nodes_of(0));
}

#if CROSSDOCK_HAS_NCCL

// NCCL needs a GPU for every rank, so this communicator has one rank and is refused: at the very
// end, when everything else has been made.
TEST_F(CudaManyRanks, StrategiesThatUseNcclNeedNoChannelOfAllRanks) {
  const LoneCommunicator comm;
  const DispatchCase the_case = case_of(kManyRanks);
  for (const char* strategy : {"alltoall", "allgather", "direct", "hierarchical"}) {
    const GpuSetting setting{.options = {.nccl_comm = comm.get()}, .strategy = strategy};
    run_ranks(
        kManyRanks,
        [&](Group& group) {
          GpuRank rank(group, the_case, setting);
          EXPECT_THAT(message_of([&] { rank.plan(); }),
                      HasSubstr("the NCCL communicator must have the group's ranks"))
              << strategy;
          group.check();
        },
        nodes_of(kManyRanks / 2));
  }
}

#endif

}  // namespace
}  // namespace crossdock
