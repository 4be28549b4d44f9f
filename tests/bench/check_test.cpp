#include "bench/check.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "crossdock/error.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::bench {
namespace {

// A mover whose results can be changed before they are checked.
class MovedRanks {
 public:
  MovedRanks() : workload_({.ranks = 2, .tokens = 5, .width = 6, .top_k = 2, .experts = 4}) {}

  // Whether the check of any rank fails after `tamper`.
  bool is_refused(const std::function<void(Mover&)>& tamper) const {
    const auto thrown = try_ranks(2, [&](Group& group) {
      std::vector<float> x(size_t{5} * 6);
      for (int64_t t = 0; t < 5; ++t) workload_.token(group.rank(), t, &x[size_t(t) * 6]);
      const auto mover = make_library_mover(
          {.workload = workload_, .group = group, .x = {x.data(), {5, 6}}, .grad_out = {}},
          "alltoall");
      mover->plan();
      fill_expert_outputs(workload_, group.rank(), mover->y());
      mover->dispatch();
      mover->combine();
      tamper(*mover);
      check_move(workload_, group.rank(), *mover);
    });
    return thrown[0] || thrown[1];
  }

 private:
  Workload workload_;
};

std::byte* bytes_of(const ConstTensorView& view) {
  return static_cast<std::byte*>(const_cast<void*>(view.data));
}

TEST(CheckMove, AcceptsWhatTheLibraryGives) {
  EXPECT_FALSE(MovedRanks().is_refused([](Mover&) {}));
}

TEST(CheckMove, SeesTwoRowsThatChangedPlaces) {
  EXPECT_TRUE(MovedRanks().is_refused([](Mover& mover) {
    std::byte* rows = bytes_of(mover.rows());
    std::swap_ranges(rows, rows + mover.rows().row_bytes(), rows + mover.rows().row_bytes());
  }));
}

TEST(CheckMove, SeesOneWrongBitOfARow) {
  EXPECT_TRUE(
      MovedRanks().is_refused([](Mover& mover) { *bytes_of(mover.rows()) ^= std::byte{1}; }));
}

TEST(CheckMove, SeesOneWrongBitOfASum) {
  EXPECT_TRUE(
      MovedRanks().is_refused([](Mover& mover) { *bytes_of(mover.out()) ^= std::byte{1}; }));
}

}  // namespace
}  // namespace crossdock::bench
