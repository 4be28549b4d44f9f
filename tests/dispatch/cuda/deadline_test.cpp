// The host does not wait forever for a GPU whose work does not end, neither in calls nor in
// destructors.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/step.hpp"
#include "dispatch/lone_communicator.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaDeadline = CudaTest;

/// A rank whose dispatcher is destroyed before its stream. Everything is set up by a first step.
struct HeldRank {
  Group& group;
  RankStream stream;
  DeviceTensors tensors;
  Gate gate;
  std::optional<Dispatcher> dispatcher;

  HeldRank(Group& group_in, const DispatchCase& the_case, const std::string& strategy,
           void* nccl_comm)
      : group(group_in),
        stream(group),
        tensors(tensors_of(the_case.config, the_case.ranks[0], DType::kF32), stream) {
    dispatcher.emplace(group, the_case.config, strategy);
    dispatcher->set_device_options({.stream = stream.view(), .nccl_comm = nccl_comm});
    const QueuedStep first(*dispatcher, tensors);
    first.wait(stream);
  }
  ~HeldRank() {
    gate.open();
    cudaStreamSynchronize(stream.get());
  }
  HeldRank(const HeldRank&) = delete;
  HeldRank& operator=(const HeldRank&) = delete;

  Plan plan() { return dispatcher->plan(tensors.routing()); }
};

void run_held(const std::string& strategy, void* nccl_comm,
              const std::function<void(HeldRank& rank)>& body) {
  SCOPED_TRACE(strategy);
  const DispatchCase the_case = random_case({.num_experts = 5, .top_k = 2, .width = 24}, {33}, 80);
  ThreadOptions options;
  options.group.arrival_deadline = std::chrono::seconds(1);
  options.group.progress_deadline = std::chrono::seconds(2);
  run_ranks(
      1,
      [&](Group& group) {
        HeldRank rank(group, the_case, strategy, nccl_comm);
        body(rank);
      },
      options);
}

// Destroys the dispatcher although its stream is blocked.
void expect_quick_end(HeldRank& rank) {
  rank.dispatcher.reset();
  EXPECT_TRUE(rank.gate.is_closed()) << "the destructor has waited for the stream";
  EXPECT_TRUE(rank.group.is_poisoned());
}

const char* const kStrategies[] = {"direct", "alltoall"};

TEST_F(CudaDeadline, EndsAPlanWhoseStreamIsHeldUp) {
  for (const char* strategy : kStrategies) {
    run_held(strategy, nullptr, [](HeldRank& rank) {
      rank.gate.hold(rank.stream.get());
      const std::optional<Error> error = error_of([&] { rank.plan(); });
      ASSERT_TRUE(error.has_value());
      EXPECT_TRUE(rank.gate.is_closed());
      EXPECT_EQ(error->code(), ErrorCode::kTimeout);
      EXPECT_THAT(error->what(), HasSubstr("s for its GPU stream"));
      EXPECT_EQ(message_of([&] { rank.plan(); }), error->what());
      expect_quick_end(rank);
    });
  }
}

TEST_F(CudaDeadline, EndsADestructorWhoseStreamIsHeldUp) {
  for (const char* strategy : kStrategies) {
    run_held(strategy, nullptr, [](HeldRank& rank) {
      const Plan plan = rank.plan();
      rank.gate.hold(rank.stream.get());
      const DispatchResult moved = rank.dispatcher->dispatch(plan, {.x = rank.tensors.x.view});
      expect_quick_end(rank);
      // The kernels still find their memory.
      rank.gate.open();
      rank.stream.synchronize();
    });
  }
}

TEST_F(CudaDeadline, EndsTheWaitOfTheFirstBegunCall) {
  run_held("direct", nullptr, [](HeldRank& rank) {
    const Plan plan = rank.plan();
    rank.gate.hold(rank.stream.get());
    const std::optional<Error> error = error_of([&] {
      static_cast<void>(rank.dispatcher->begin_dispatch(plan, {.x = rank.tensors.x.view}));
    });
    ASSERT_TRUE(error.has_value());
    EXPECT_TRUE(rank.gate.is_closed());
    EXPECT_EQ(error->code(), ErrorCode::kTimeout);
    expect_quick_end(rank);
  });
}

#if CROSSDOCK_HAS_NCCL

/// An exchange of the communicator in another stream, which is blocked: NCCL runs the exchanges of
/// a communicator in order, so the next one in the rank's stream waits inside NCCL, as if for a
/// peer that never sends.
class WithheldExchange {
 public:
  WithheldExchange(const HeldRank& rank, ncclComm_t comm)
      : memory_(device_tensor(DType::kU8, {2}, stream_)) {
    auto* bytes = static_cast<std::byte*>(memory_.view.data);
    stream_.synchronize();
    rank.gate.hold(stream_.get());
    const cuda::NcclLibrary& nccl = cuda::nccl_library();
    nccl_ok(nccl.group_start());
    nccl_ok(nccl.send(bytes, 1, ncclUint8, 0, comm, stream_.get()));
    nccl_ok(nccl.recv(bytes + 1, 1, ncclUint8, 0, comm, stream_.get()));
    nccl_ok(nccl.group_end());
  }

 private:
  RankStream stream_;
  OwnedTensor memory_;
};

// Calls check repeatedly, as a training loop would. Returns its error, if it throws one in time.
std::optional<Error> check_until_error(HeldRank& rank) {
  while (rank.gate.is_closed()) {
    if (std::optional<Error> error = error_of([&] { rank.dispatcher->check(); })) return error;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return std::nullopt;
}

void expect_late_dispatch(const std::optional<Error>& error) {
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kTimeout);
  EXPECT_THAT(error->what(), HasSubstr("NCCL did not finish dispatch"));
  EXPECT_STREQ(error->context().operation, "dispatch");
}

const char* const kNcclStrategies[] = {"alltoall", "allgather"};

// Runs body after a dispatch whose exchange does not end.
void run_withheld(const std::function<void(HeldRank& rank)>& body) {
  const LoneCommunicator comm;
  for (const char* strategy : kNcclStrategies) {
    run_held(strategy, comm.get(), [&](HeldRank& rank) {
      const Plan plan = rank.plan();
      std::optional<WithheldExchange> withheld(std::in_place, rank, comm.get());
      const DispatchResult moved = rank.dispatcher->dispatch(plan, {.x = rank.tensors.x.view});
      body(rank);
      expect_quick_end(rank);
      rank.gate.open();
      withheld.reset();
      rank.stream.synchronize();
    });
    // The communicator is unaffected.
    ncclResult_t state = ncclSuccess;
    nccl_ok(cuda::nccl_library().comm_get_async_error(comm.get(), &state));
    EXPECT_EQ(state, ncclSuccess);
  }
}

TEST_F(CudaDeadline, CheckReportsAnNcclExchangeThatDoesNotEnd) {
  run_withheld([](HeldRank& rank) {
    expect_late_dispatch(check_until_error(rank));
    EXPECT_TRUE(rank.group.is_poisoned());
  });
}

TEST_F(CudaDeadline, ThePlanBehindAnNcclExchangeThatDoesNotEndFails) {
  run_withheld([](HeldRank& rank) {
    expect_late_dispatch(error_of([&] { rank.plan(); }));
    EXPECT_TRUE(rank.gate.is_closed());
  });
}

TEST_F(CudaDeadline, ADestructorLeavesAnNcclExchangeThatDoesNotEnd) {
  run_withheld([](HeldRank& /*rank*/) {});
}

#endif

}  // namespace
}  // namespace crossdock
