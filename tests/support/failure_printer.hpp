#pragma once

#include <gtest/gtest.h>

#include <cstdio>

namespace crossdock::testing {

/// Prints only failures, with the rank.
class FailurePrinter : public ::testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}

  void OnTestStart(const ::testing::TestInfo& test) override { test_ = &test; }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s.%s: %s:%d: %s\n", rank_,
                 test_ ? test_->test_suite_name() : "", test_ ? test_->name() : "",
                 result.file_name() ? result.file_name() : "", result.line_number(),
                 result.summary());
  }

 private:
  int rank_;
  const ::testing::TestInfo* test_ = nullptr;
};

/// This process prints only failures, with its rank. REQUIRES: InitGoogleTest has been called.
inline void print_only_failures(int rank) {
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailurePrinter(rank));
}

/// For programs that run every test in every process: rank 0 prints as usual, the others only their
/// failures. REQUIRES: InitGoogleTest has been called.
inline void print_as_rank(int rank) {
  if (rank > 0) print_only_failures(rank);
}

}  // namespace crossdock::testing
