// The data that the two exchanges move, for every communicator.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "comm/group_runner.hpp"

namespace crossdock::testing {
namespace {

/// Bytes from `source` to `target`: unequal, sometimes none.
using SizeOf = std::function<int64_t(int source, int target)>;

std::vector<int64_t> offsets_of(int size, const std::function<int64_t(int)>& block_bytes) {
  std::vector<int64_t> offsets = {0};
  for (int rank = 0; rank < size; ++rank) offsets.push_back(offsets.back() + block_bytes(rank));
  return offsets;
}

/// Byte i of the block from `source` to `target` in exchange `round`; adjacent bytes differ.
std::byte value_of(int source, int target, int64_t i, int round) {
  const uint64_t mixed = (static_cast<uint64_t>(i) * 8 + static_cast<uint64_t>(source)) * 8 +
                         static_cast<uint64_t>(target) + static_cast<uint64_t>(round) * 77;
  return static_cast<std::byte>((mixed * 0x9e3779b97f4a7c15u) >> 56);
}

SharedBytes shared(const Buffer& buffer) {
  return {buffer.data(), buffer.num_bytes(), buffer.owner()};
}

void expect_block(const Buffer& buffer, int64_t begin, int64_t end, int source, int target,
                  int round) {
  int64_t num_wrong = 0;
  for (int64_t i = begin; i < end; ++i) {
    num_wrong += buffer.data()[i] != value_of(source, target, i - begin, round);
  }
  EXPECT_EQ(num_wrong, 0) << "bytes from rank " << source << " to rank " << target << ", round "
                          << round;
}

void exchange_all_to_all(Group& group, const SizeOf& size_of, int round) {
  const int rank = group.rank();
  const auto send_offsets = offsets_of(group.size(), [&](int to) { return size_of(rank, to); });
  const auto recv_offsets = offsets_of(group.size(), [&](int from) { return size_of(from, rank); });
  const Buffer send(send_offsets.back());
  const Buffer recv(recv_offsets.back());
  for (int to = 0; to < group.size(); ++to) {
    const int64_t begin = send_offsets[static_cast<size_t>(to)];
    for (int64_t i = 0; i < size_of(rank, to); ++i) {
      send.data()[begin + i] = value_of(rank, to, i, round);
    }
  }
  group.all_to_all_v(shared(send), send_offsets, shared(recv), recv_offsets,
                     group.wait_context("exchange", static_cast<uint64_t>(round)));
  for (int from = 0; from < group.size(); ++from) {
    const auto f = static_cast<size_t>(from);
    expect_block(recv, recv_offsets[f], recv_offsets[f + 1], from, rank, round);
  }
}

void exchange_all_gather(Group& group, const std::function<int64_t(int)>& size_of, int round) {
  const int rank = group.rank();
  const auto offsets = offsets_of(group.size(), size_of);
  const Buffer send(size_of(rank));
  const Buffer recv(offsets.back());
  for (int64_t i = 0; i < send.num_bytes(); ++i) send.data()[i] = value_of(rank, 0, i, round);
  group.all_gather_v(shared(send), shared(recv), offsets,
                     group.wait_context("gather", static_cast<uint64_t>(round)));
  for (int from = 0; from < group.size(); ++from) {
    const auto f = static_cast<size_t>(from);
    expect_block(recv, offsets[f], offsets[f + 1], from, 0, round);
  }
}

TEST(AllToAll, BringsEachBlockToItsRank) {
  for (const int size : group_sizes()) {
    run_healthy_group(size, [](Group& group) {
      exchange_all_to_all(
          group, [](int from, int to) { return 1 + 3 * from + 7 * to; }, 0);
    });
  }
}

TEST(AllToAll, TakesAnySizes) {
  const std::vector<SizeOf> cases = {
      [](int, int) { return 0; },
      [](int from, int to) { return from == to ? 5000 : 0; },
      [](int from, int to) { return (from + to) % 3 == 0 ? 0 : 1 + 5000 * ((from * 5 + to) % 4); },
      [](int from, int) { return from == 0 ? 40000 : 0; },
      [](int, int to) { return to == 0 ? 40000 : 0; },
      [](int from, int to) { return 100000 + 1000 * from + to; },
  };
  for (const int size : group_sizes()) {
    run_healthy_group(size, [&](Group& group) {
      for (size_t i = 0; i < cases.size(); ++i) {
        exchange_all_to_all(group, cases[i], static_cast<int>(i));
      }
    });
  }
}

TEST(AllToAll, MovesLargeBlocks) {
  run_healthy_group(group_sizes().back(), [](Group& group) {
    exchange_all_to_all(
        group, [](int from, int to) { return (2 << 20) + 4096 * from + to; }, 0);
  });
}

TEST(AllGather, GivesEverybodyEveryBlock) {
  const std::vector<std::function<int64_t(int)>> cases = {
      [](int) { return 0; },
      [](int rank) { return 1 + 10 * rank; },
      [](int rank) { return rank % 2 == 0 ? 0 : 30000; },
      [](int rank) { return rank == 0 ? 1 << 20 : 3; },
  };
  for (const int size : group_sizes()) {
    run_healthy_group(size, [&](Group& group) {
      for (size_t i = 0; i < cases.size(); ++i) {
        exchange_all_gather(group, cases[i], static_cast<int>(i));
      }
    });
  }
}

TEST(Exchanges, FollowEachOtherInAnyMixture) {
  for (const int size : group_sizes()) {
    run_healthy_group(size, [](Group& group) {
      for (int round = 0; round < 60; ++round) {
        const int64_t scale = round % 7 == 0 ? 9000 : 40;
        exchange_all_to_all(
            group, [&](int from, int to) { return scale * ((from + 2 * to + round) % 3); }, round);
        exchange_all_gather(
            group, [&](int rank) { return scale * ((rank + round) % 3); }, round);
      }
    });
  }
}

TEST(Exchanges, CountWhatLeavesTheRank) {
  const int size = group_sizes().back();
  run_healthy_group(size, [&](Group& group) {
    const Traffic before = group.communicator().traffic();
    exchange_all_to_all(
        group, [](int, int) { return 1000; }, 0);
    exchange_all_gather(
        group, [](int) { return 10; }, 1);
    const Traffic after = group.communicator().traffic();
    const auto& nodes = group.topology().node_of_rank;
    const auto num_near =
        std::count(nodes.begin(), nodes.end(), nodes[static_cast<size_t>(group.rank())]);
    EXPECT_EQ(after.bytes_within_node - before.bytes_within_node, 1010 * (num_near - 1));
    EXPECT_EQ(after.bytes_between_nodes - before.bytes_between_nodes, 1010 * (size - num_near));
  });
}

// Every rank sends 10 bytes to every rank; `expected` is the size a rank expects from another.
std::vector<Outcome> exchange_expecting(int size, const SizeOf& expected) {
  return run_group(
      size,
      [&](Group& group) {
        const auto send_offsets = offsets_of(size, [](int) { return 10; });
        const auto recv_offsets =
            offsets_of(size, [&](int from) { return expected(from, group.rank()); });
        const Buffer send(send_offsets.back());
        const Buffer recv(recv_offsets.back());
        std::fill_n(send.data(), send.num_bytes(), std::byte{1});
        group.all_to_all_v(shared(send), send_offsets, shared(recv), recv_offsets,
                           group.wait_context("exchange", 1));
      },
      ample_deadlines());
}

TEST(Exchanges, OfOtherSizesThanExpectedAreAnError) {
  for (const int size : group_sizes()) {
    for (const Outcome& outcome : exchange_expecting(size, [](int from, int to) {  // from itself
           return from == to ? 20 : 10;
         })) {
      EXPECT_TRUE(outcome.threw);
      EXPECT_EQ(outcome.code, ErrorCode::kInternal) << outcome.message;
    }
    if (size == 1) continue;
    const auto outcomes = exchange_expecting(size, [](int from, int to) {  // from rank 0
      return from == 0 && to == 1 ? 20 : 10;
    });
    EXPECT_TRUE(outcomes[1].threw);
    EXPECT_EQ(outcomes[1].culprit, 0) << outcomes[1].message;
    EXPECT_NE(outcomes[1].message.find("10 bytes"), std::string::npos) << outcomes[1].message;
  }
}

TEST(Exchanges, GoOnAtOnceWhenThePeersLeaveAfterwards) {
  // The first ranks have left before the last ones have read their data.
  for (const int size : group_sizes()) {
    for (const int64_t block_bytes : {10, 20000}) {
      run_healthy_group(size, [&](Group& group) {
        exchange_all_to_all(
            group, [&](int, int) { return block_bytes; }, 0);
      });
    }
  }
}

TEST(Subgroup, ExchangesAmongItsMembersOnly) {
  for (const int size : group_sizes()) {
    run_healthy_group(size, [&](Group& group) {
      std::vector<int> members;  // ranks of the same parity
      for (int rank = group.rank() % 2; rank < size; rank += 2) members.push_back(rank);
      for (int round = 0; round < 2; ++round) {  // the same members twice: two different groups
        const auto half = group.subgroup(members);
        EXPECT_EQ(half->size(), static_cast<int>(members.size()));
        EXPECT_EQ(half->rank(), group.rank() / 2);
        EXPECT_EQ(half->topology().num_nodes, group.topology().subset(members).num_nodes);
        exchange_all_to_all(
            *half, [](int from, int to) { return 10 + from + 20 * to; }, round);
        exchange_all_to_all(
            group, [](int from, int to) { return 10 + from + 20 * to; }, round);
      }
    });
  }
}

TEST(Subgroup, TwoOfTheSameMembersMayBeMadeBeforeEitherIsUsed) {
  const int size = group_sizes().back();
  std::vector<int> everybody(static_cast<size_t>(size));
  std::iota(everybody.begin(), everybody.end(), 0);
  run_healthy_group(size, [&](Group& group) {
    if (group.rank() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto first = group.subgroup(everybody);
    const auto second = group.subgroup(everybody);
    for (Group* one : {second.get(), first.get()}) {
      exchange_all_to_all(
          *one, [](int from, int to) { return 10 + from + 20 * to; }, 0);
    }
  });
}

TEST(Subgroup, RejectsMembersThatMakeNoGroup) {
  if (group_sizes().back() < 2) GTEST_SKIP() << "needs two ranks";
  run_healthy_group(group_sizes().back(), [](Group& group) {
    const int rank = group.rank();
    const auto message_of = [&](std::vector<int> members) {
      return outcome_of([&] { group.subgroup(members); }).message;
    };
    EXPECT_EQ(message_of({}), "a subgroup must have at least one member");
    EXPECT_NE(message_of({rank, group.size()}).find("members must be ranks from 0 to"),
              std::string::npos);
    EXPECT_EQ(message_of({rank, rank}), "members of a subgroup must be ascending");
    EXPECT_NE(message_of({(rank + 1) % group.size()}).find("must be a member of the subgroup"),
              std::string::npos);
  });
}

TEST(Group, MayBeLeftAtOnceByAnyRank) {
  for (int round = 0; round < 20; ++round) run_healthy_group(group_sizes().back(), [](Group&) {});
}

TEST(Group, MayMoveBetweenThreads) {
  run_healthy_group(group_sizes().back(), [](Group& group) {
    for (int round = 0; round < 3; ++round) {
      std::jthread([&] {
        exchange_all_to_all(
            group, [](int from, int to) { return 1 + from + to; }, round);
      });
    }
  });
}

TEST(Group, TwoInOneProcessDoNotMeet) {
  const int size = group_sizes().back();
  std::vector<int> everybody(static_cast<size_t>(size));
  std::iota(everybody.begin(), everybody.end(), 0);
  run_healthy_group(size, [&](Group& first) {
    const auto second = first.subgroup(everybody);
    for (int round = 0; round < 4; ++round) {
      // Both groups are in an exchange at the same time, each on its own thread.
      std::jthread other([&] {
        exchange_all_to_all(
            *second, [](int from, int to) { return 300 * (from + to); }, round);
      });
      exchange_all_to_all(
          first, [](int from, int to) { return 200 * (from + to); }, round + 50);
    }
  });
}

}  // namespace
}  // namespace crossdock::testing
