// Rows through NCCL, which needs a GPU for every rank: with one GPU, one rank sends to itself, the
// checks of a communicator are tested, and several ranks use a stand-in.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "dispatch/cuda/packed_step.hpp"
#include "dispatch/lone_communicator.hpp"

#if CROSSDOCK_HAS_NCCL
#include "comm/attachment.hpp"
#include "comm/nccl/library.hpp"
#include "dispatch/cuda/nccl_transport.hpp"
#include "support/fake_nccl.hpp"
#endif

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaNccl = CudaTest;

DispatchCase case_of(const std::vector<int64_t>& tokens_per_rank) {
  return random_case({.num_experts = 5, .top_k = 2, .width = 24}, tokens_per_rank, 60);
}

const char* const kStrategies[] = {"alltoall", "allgather"};

#if CROSSDOCK_HAS_NCCL

TEST_F(CudaNccl, BringsTheRowsOfOneRankHome) {
  const LoneCommunicator comm;
  for (const char* strategy : kStrategies) {
    const GpuSetting setting{
        .dtype = DType::kBF16, .options = {.nccl_comm = comm.get()}, .strategy = strategy};
    run_on_gpu(case_of({33}), setting, [&](GpuRank& rank, const StepBytes& wanted) {
      for (int step = 0; step < 2; ++step) {
        const QueuedStep queued(rank.dispatcher, rank.tensors);
        expect_same(queued.wait(rank.stream), wanted);
      }
      rank.dispatcher.check();
    });
  }
}

TEST_F(CudaNccl, ACommunicatorOfOtherRanksIsRefused) {
  const LoneCommunicator comm;
  for (const char* strategy : kStrategies) {
    const GpuSetting setting{.options = {.nccl_comm = comm.get()}, .strategy = strategy};
    run_on_gpu(case_of({9, 7}), setting, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
      EXPECT_THAT(message_of([&] { rank.plan(); }),
                  HasSubstr("the NCCL communicator must have the group's ranks: it has rank 0 of "
                            "1, the group rank 0 of 2"));
      rank.group.check();
    });
  }
}

const char* const kPackingStrategies[] = {"alltoall", "allgather", "direct", "hierarchical"};

// Ranks that let the library make a communicator with this NCCL.
PackedSetting own_communicator(const cuda::NcclLibrary& library, const DispatchCase& the_case,
                               const std::string& strategy) {
  PackedSetting setting{.the_case = the_case,
                        .options = short_deadlines(),
                        .strategy = strategy,
                        .make_transport = [&library](cuda::CudaRank& rank) {
                          return std::make_unique<cuda::NcclTransport>(rank, library);
                        }};
  setting.options.ranks_per_node = 2;
  return setting;
}

std::atomic<int> num_communicators = 0;  // made with counting_nccl and not ended

// The machine's NCCL.
const cuda::NcclLibrary& counting_nccl() {
  static const cuda::NcclLibrary kLibrary = [] {
    cuda::NcclLibrary library = cuda::nccl_library();
    library.comm_init_rank_config = [](ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                       ncclConfig_t* config) {
      ++num_communicators;
      return cuda::nccl_library().comm_init_rank_config(comm, size, id, rank, config);
    };
    library.comm_destroy = [](ncclComm_t comm) {
      const ncclResult_t status = cuda::nccl_library().comm_destroy(comm);
      --num_communicators;
      return status;
    };
    library.comm_abort = [](ncclComm_t comm) {
      const ncclResult_t status = cuda::nccl_library().comm_abort(comm);
      --num_communicators;
      return status;
    };
    return library;
  }();
  return kLibrary;
}

// NCCL waits for the GPU to free memory; this must not happen while the next test runs there.
void expect_end_of_communicators() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (num_communicators > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(num_communicators, 0);
}

TEST_F(CudaNccl, OneRankMakesACommunicatorOfItsOwn) {
  for (const char* strategy : kStrategies) {
    expect_bits_of_the_cpu(own_communicator(counting_nccl(), case_of({33}), strategy));
  }
  expect_end_of_communicators();
}

TEST_F(CudaNccl, DispatchersOfOneRankShareTheCommunicator) {
  const DispatchCase the_case = case_of({33});
  const PackedSetting setting = own_communicator(counting_nccl(), the_case, "alltoall");
  run_ranks(
      1,
      [&](Group& group) {
        const RankStream stream(group);
        const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[0], DType::kF32),
                                    stream);
        const auto first = make_packed_path(group, setting);
        const auto second = make_packed_path(group, setting);
        std::set<const cuda::NcclCommunicator*> made;
        for (Path* path : {first.get(), second.get()}) {
          path->set_options({.stream = stream.view()});
          const Plan plan = path->plan(tensors.routing());
          made.insert(comm::nccl_communicator_of(group).lock().get());
        }
        EXPECT_EQ(made.size(), 1U);
        EXPECT_NE(*made.begin(), nullptr);
      },
      setting.options);
  expect_end_of_communicators();
}

TEST_F(CudaNccl, SeveralRanksBringTheirRowsHome) {
  const test::FakeNccl nccl;
  DispatchCase the_case = case_of({33, 0, 17, 40, 8});
  for (const PartialSums sums : {PartialSums::kNone, PartialSums::kF32}) {
    the_case.config.partial_sums = sums;
    for (const char* strategy : kPackingStrategies) {
      expect_bits_of_the_cpu(own_communicator(nccl.library(), the_case, strategy));
    }
  }
  const test::FakeNccl::Counts counts = nccl.await_ends();
  EXPECT_EQ(counts.destroyed, 2 * 4 * 5);
  EXPECT_EQ(counts.aborted, 0);
}

TEST_F(CudaNccl, ACommunicatorOfTheLibrarysOwnIsAbortedAfterAFailure) {
  test::FakeNccl nccl;
  nccl.set_faults({.fails_exchanges = true});
  const DispatchCase the_case = case_of({33, 9});
  const PackedSetting setting = own_communicator(nccl.library(), the_case, "alltoall");
  run_ranks(
      2,
      [&](Group& group) {
        const PackedRank rank(group, setting);
        const Plan plan = rank.path->plan(rank.tensors.routing());
        EXPECT_THAT(
            message_of([&] { rank.path->dispatch(plan, {.x = rank.tensors.x.view}, nullptr); }),
            HasSubstr("ncclGroupEnd: an error of the stand-in"));
        EXPECT_TRUE(group.is_poisoned());
      },
      setting.options);
  EXPECT_EQ(nccl.await_ends(), (test::FakeNccl::Counts{.made = 2, .aborted = 2}));
}

TEST_F(CudaNccl, RanksThatCannotBeConnectedRefuseThePlan) {
  test::FakeNccl nccl;
  nccl.set_faults({.fails_later = 1});
  const DispatchCase the_case = case_of({33, 9});
  const PackedSetting setting = own_communicator(nccl.library(), the_case, "alltoall");
  run_ranks(
      2,
      [&](Group& group) {
        const PackedRank rank(group, setting);
        EXPECT_THAT(message_of([&] { rank.path->plan(rank.tensors.routing()); }),
                    HasSubstr("rank 1: NCCL cannot connect the ranks"));
        group.check();
        group.agree({.operation = "meet"});
        if (group.rank() == 0) nccl.set_faults({});
        group.agree({.operation = "meet"});
        const Plan plan = rank.path->plan(rank.tensors.routing());  // tries again
        EXPECT_TRUE(plan.valid());
      },
      setting.options);
}

#else

TEST_F(CudaNccl, IsRefusedWhereTheBuildHasNone) {
  int anything = 0;
  for (const char* strategy : kStrategies) {
    const GpuSetting setting{.options = {.nccl_comm = &anything}, .strategy = strategy};
    run_on_gpu(case_of({9, 7}), setting, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
      EXPECT_THAT(message_of([&] { rank.plan(); }), HasSubstr("this build has no NCCL"));
      rank.group.check();
    });
  }
}

#endif

}  // namespace
}  // namespace crossdock
