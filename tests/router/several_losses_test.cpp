// Several auxiliary losses at once: batch, sequence and global batch.
#include <gtest/gtest.h>

#include <array>

#include "router/router_case.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

constexpr std::array kScopes = {BalanceScope::kBatch, BalanceScope::kSequence,
                                BalanceScope::kGlobalBatch};
constexpr std::array kCoeffs = {0.3, 0.7, 0.11};
constexpr int64_t kTokens = 10;

reference::RouterInput several_input(Score score, DType dtype) {
  RouterConfig config{.num_experts = 4, .top_k = 2, .width = 3, .dtype = dtype, .score = score};
  config.aux_loss_coeffs = {
      .batch = kCoeffs[0], .sequence = kCoeffs[1], .global_batch = kCoeffs[2]};
  auto input = make_router_input(config, kTokens);
  input.sequence_ids = {0, 0, 0, 2, 2, 2, 2, 3, 3, 3};
  input.num_sequences = 4;  // sequence 1 has no token
  input.mask.assign(kTokens, 0);
  input.mask[4] = 1;
  return input;
}

// The counts of all three losses; the global batch has an earlier micro-batch.
struct Counts {
  RouterStatistics batch;
  RouterStatistics sequence;
  RouterStatistics global_batch;

  explicit Counts(const RouterOutput& several) : sequence(several.statistics) {
    batch = {.num_sequences = 1, .routes_per_expert = sequence.load(), .num_tokens = {kTokens - 1}};
    global_batch = batch;
    global_batch.add({.num_sequences = 1, .routes_per_expert = {5, 0, 7, 2}, .num_tokens = {7}});
  }
  const RouterStatistics& of(BalanceScope scope) const {
    return scope == BalanceScope::kBatch      ? batch
           : scope == BalanceScope::kSequence ? sequence
                                              : global_batch;
  }
  LossCounts all() const {
    return {.statistics = &global_batch,
            .total_tokens = kTokens - 1,
            .batch = &batch,
            .sequence = &sequence};
  }
};

TEST(SeveralLosses, AreThoseOfEachAlone) {
  for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      const auto input = several_input(score, dtype);
      const RouterRun run(input);
      const RouterOutput output = run.route();
      const Counts counts(output);
      const RouterLosses got = run.router().losses(output, counts.all());
      const std::vector<double> none(static_cast<size_t>(kTokens * 2), 0.0);
      const auto got_grads = run.backward(output, none, counts.all());
      double sum = 0.0;
      std::vector<double> grads(got_grads.logits.size(), 0.0);
      for (size_t i = 0; i < kScopes.size(); ++i) {
        auto alone = input;
        alone.config.aux_loss_coeffs = {};
        alone.config.aux_loss_coeff = kCoeffs[i];
        alone.config.aux_loss_scope = kScopes[i];
        const RouterRun single(alone);
        const RouterOutput single_output = single.route();
        const LossCounts single_counts{.statistics = &counts.of(kScopes[i]),
                                       .total_tokens = kTokens - 1};
        const RouterLosses wanted = single.router().losses(single_output, single_counts);
        EXPECT_EQ(got.aux_terms.of(kScopes[i]), wanted.aux) << i;
        EXPECT_EQ(wanted.aux_terms.of(kScopes[i]), wanted.aux) << i;
        EXPECT_GT(wanted.aux, 0.0);
        sum += wanted.aux;
        const auto single_grads = single.backward(single_output, none, single_counts);
        for (size_t j = 0; j < grads.size(); ++j) grads[j] += single_grads.logits[j];
      }
      EXPECT_NEAR(got.aux, sum, 1e-14);
      const double tolerance = dtype == DType::kF64 ? 1e-15 : 1e-7;
      for (size_t j = 0; j < grads.size(); ++j)
        ASSERT_NEAR(got_grads.logits[j], grads[j], tolerance);
    }
  }
}

TEST(SeveralLosses, AddTheSingleCoefficientToThatOfItsScope) {
  auto input = several_input(Score::kSoftmax, DType::kF64);
  const RouterRun run(input);
  const RouterOutput output = run.route();
  const RouterLosses before = run.router().losses(output);
  EXPECT_NEAR(before.aux_terms.batch / kCoeffs[0], before.aux_terms.global_batch / kCoeffs[2],
              1e-15);
  input.config.aux_loss_scope = BalanceScope::kSequence;
  input.config.aux_loss_coeff = kCoeffs[1];
  const RouterRun doubled(input);
  const RouterLosses after = doubled.router().losses(doubled.route());
  EXPECT_EQ(after.aux_terms.sequence, 2 * before.aux_terms.sequence);
  EXPECT_EQ(after.aux_terms.batch, before.aux_terms.batch);
}

TEST(SeveralLosses, NeedCountsThatFit) {
  const RouterRun run(several_input(Score::kSoftmax, DType::kF64));
  const RouterOutput output = run.route();
  const Counts counts(output);
  const LossCounts wrong{.statistics = &counts.batch};  // also for the sequences
  EXPECT_NE(message_of([&] {
              (void)run.router().losses(output, wrong);
            }).find("the summed statistics must have the same 4 sequences"),
            std::string::npos);
}

}  // namespace
}  // namespace crossdock
