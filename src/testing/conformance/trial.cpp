#include "testing/conformance/trial.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/testing/comparator.hpp"
#include "testing/conformance/values.hpp"

namespace crossdock::conformance {
namespace {

using reference::Layout;
using reference::PerRank;
using reference::Receiver;
using reference::RowSource;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Memory filled with values that are NaN in every dtype, and not a valid expert id.
OwnedTensor poisoned(DType dtype, Shape shape) {
  OwnedTensor tensor = new_host_tensor(dtype, shape);
  const auto num_bytes = static_cast<size_t>(tensor.view.num_bytes());
  if (num_bytes > 0) std::memset(tensor.view.data, 0xff, num_bytes);
  return tensor;
}

// Makes the library take used memory from its pool instead of fresh zeros.
void poison_pool(BufferPool& pool) {
  std::vector<Buffer> held;
  for (int64_t size = 64; size <= 65536; size *= 2) {
    held.push_back(pool.take(size));
    std::memset(held.back().data(), 0xff, static_cast<size_t>(size));
  }
}

// One array per rank: make(rank).
template <typename Make>
PerRank for_ranks(const World& world, const Make& make) {
  PerRank values;
  for (size_t r = 0; r < world.ranks.size(); ++r) values.push_back(make(static_cast<int>(r)));
  return values;
}

// Multiples of 1/4, so that sums of products are exact.
std::vector<double> quarter_values(size_t count, uint64_t seed) {
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i) {
    values.push_back((static_cast<double>(hash_of(seed, i) % 15) - 7.0) / 4.0);
  }
  return values;
}

DType given_weight_dtype(const World& world) {
  return world.weight_dtype.value_or(world.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

Trial::Trial(PlacedDispatcher& dispatcher, const World& world, uint64_t seed, Findings& findings)
    : dispatcher_(dispatcher),
      world_(world),
      seed_(seed),
      findings_(findings),
      rank_(dispatcher.group().rank()),
      input_(world.ranks[static_cast<size_t>(rank_)]),
      layout_(reference::lay_out(world.config, world.ranks, world.slots)),
      weights_(
          for_ranks(world, [&](int r) { return world.ranks[static_cast<size_t>(r)].weights; })) {
  poison_pool(dispatcher.group().pool());
  const int64_t T = input_.T;
  const Shape slots{T, world.num_slots()};
  OwnedTensor mask;
  if (!input_.mask.empty()) {
    mask = reference::to_tensor(DType::kBool, {T}, {input_.mask.begin(), input_.mask.end()});
  }
  if (world.dense) {
    const int64_t E = world.config.num_experts;
    std::vector<double> map(static_cast<size_t>(T * E), 0.0);
    std::vector<double> weights(map.size(), kNan);
    for (size_t i = 0; i < input_.expert_ids.size(); ++i) {
      if (input_.expert_ids[i] < 0) continue;
      const auto token = static_cast<int64_t>(i) / world.num_slots();
      const auto entry = static_cast<size_t>(token * E + input_.expert_ids[i]);
      map[entry] = 1.0;
      weights[entry] = input_.weights[i];
    }
    const OwnedTensor map_tensor = reference::to_tensor(DType::kBool, {T, E}, map);
    const OwnedTensor weight_tensor =
        reference::to_tensor(given_weight_dtype(world), {T, E}, weights);
    plan_ = dispatcher.plan(DenseRouting{map_tensor.view, weight_tensor.view, mask.view});
  } else {
    const std::vector<double> ids(input_.expert_ids.begin(), input_.expert_ids.end());
    const OwnedTensor id_tensor =
        reference::to_tensor(world.wide_ids ? DType::kI64 : DType::kI32, slots, ids);
    const OwnedTensor weight_tensor =
        reference::to_tensor(given_weight_dtype(world), slots, input_.weights);
    plan_ = dispatcher.plan(Routing{id_tensor.view, weight_tensor.view, mask.view});
  }
  check_plan();
}

DType Trial::sum_dtype() const {
  return is_summable(world_.dtype) ? world_.dtype : DType::kBF16;
}

DType Trial::weight_dtype() const {
  return given_weight_dtype(world_) == DType::kF64 ? DType::kF64 : DType::kF32;
}

void Trial::find(const std::string& message) {
  findings_.push_back(concat("rank ", rank_, ": ", message));
}

void Trial::expect_bits(const std::string& what, ConstTensorView got,
                        const std::vector<double>& wanted) {
  if (got.num_elements() != static_cast<int64_t>(wanted.size())) {
    find(concat(what, " has shape ", got.shape.to_string(), ", must have ", wanted.size(),
                " elements"));
    return;
  }
  const std::vector<double> values = reference::to_values(got);
  bits_ = hash_values(values, bits_);
  const reference::Comparison difference = reference::compare(values, wanted);
  if (difference.num_different == 0) return;
  const auto first = static_cast<size_t>(difference.first);
  const int64_t width = got.shape.rank() > 1 ? got.shape[1] : 1;
  find(concat(what, ": ", difference.num_different, " values differ; first ", what, "[",
              difference.first / width, ", ", difference.first % width, "] is ", values[first],
              ", must be ", wanted[first]));
}

// The sums of this rank that the contract allows: with partial sums that round, those of each rank
// or of each node; a single group may skip them.
std::vector<std::vector<double>> Trial::possible_sums(const PerRank& rows,
                                                      const PerRank* weights) const {
  const auto me = static_cast<size_t>(rank_);
  const PartialSums sums = world_.config.partial_sums;
  const Topology& topology = dispatcher_.group().topology();
  std::vector<std::vector<double>> possible;
  const bool has_one_group =
      world_.ranks.size() == 1 ||
      (topology.num_nodes == 1 && dispatcher_.strategy().name() == "hierarchical");
  if (sums == PartialSums::kNone || world_.exact_sums || has_one_group) {
    possible.push_back(reference::combine_exact(layout_, width(), sum_dtype(), rows, weights)[me]);
  }
  if (sums == PartialSums::kNone || world_.exact_sums) return possible;
  std::vector<int> ranks(world_.ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  for (const std::vector<int>& groups : {ranks, topology.node_of_rank}) {
    const reference::PartialGroups partials{
        .sums = sums, .rows = sum_dtype(), .group_of_rank = groups};
    possible.push_back(reference::combine_partial(layout_, width(), partials, rows, weights)[me]);
  }
  return possible;
}

void Trial::expect_sums(const std::string& what, ConstTensorView got, const PerRank& rows,
                        const PerRank* weights) {
  const std::vector<std::vector<double>> possible = possible_sums(rows, weights);
  const uint64_t bits = bits_;
  if (possible.size() > 1 && got.num_elements() == std::ssize(possible.front())) {
    const std::vector<double> values = reference::to_values(got);
    for (const std::vector<double>& wanted : possible) {
      if (reference::compare(values, wanted).num_different == 0) return;
    }
  }
  expect_bits(what, got, possible.back());
  if (possible.size() > 1) bits_ = bits;
}

void Trial::check_plan() {
  const Receiver& receiver = layout_.receivers[static_cast<size_t>(rank_)];
  const Segments segments = plan_.segments();
  const auto E_local = static_cast<int64_t>(receiver.experts.size());
  if (plan_.num_rows() != layout_.num_rows(rank_)) {
    find(concat("the plan has ", plan_.num_rows(), " rows, must have ", layout_.num_rows(rank_)));
  }
  if (plan_.capacity_rows() < plan_.num_rows()) find("capacity_rows is less than num_rows");
  if (plan_.num_tokens() != input_.T) find("the plan has a wrong number of tokens");
  if (segments.num_segments != E_local || plan_.num_local_experts() != E_local) {
    find(concat("the plan has ", segments.num_segments, " segments, must have ", E_local));
    return;
  }
  const bool padded = world_.config.capacity && world_.config.capacity->pad_to_capacity;
  for (int64_t i = 0; i < E_local; ++i) {
    const auto e = static_cast<size_t>(i);
    // With pad_to_capacity, rows and pad rows alternate, so all of them count as the expert's.
    const bool same_count = padded ? segments.counts[i] >= receiver.rows_per_expert[e]
                                   : segments.counts[i] == receiver.rows_per_expert[e];
    if (segments.starts[i] != receiver.segment_starts[e] || !same_count) {
      find(concat("segment ", i, " begins at row ", segments.starts[i], " with ",
                  segments.counts[i], " rows; must begin at ", receiver.segment_starts[e], " with ",
                  receiver.rows_per_expert[e]));
    }
  }
  const std::vector<int64_t> dropped(plan_.dropped().begin(), plan_.dropped().end());
  if (dropped != layout_.dropped[static_cast<size_t>(rank_)]) find("other routes were dropped");
  std::vector<double> kept = weights_[static_cast<size_t>(rank_)];
  for (size_t i = 0; i < kept.size(); ++i) {
    if (!layout_.places[static_cast<size_t>(rank_)][i].is_kept()) kept[i] = 0.0;
  }
  expect_bits("plan.weights", plan_.weights(), kept);
}

// Rows must be the bytes that token_bits makes, and pad rows zero.
void Trial::expect_rows(const std::string& what, ConstTensorView got, uint64_t seed) {
  const std::vector<RowSource>& sources = layout_.receivers[static_cast<size_t>(rank_)].sources;
  const auto row_bytes = static_cast<size_t>(got.row_bytes());
  if (got.num_rows() != static_cast<int64_t>(sources.size())) {
    find(concat(what, " has ", got.num_rows(), " rows, must have ", sources.size()));
    return;
  }
  std::vector<std::vector<std::byte>> tokens;
  for (size_t r = 0; r < world_.ranks.size(); ++r) {
    tokens.push_back(token_bits(world_, static_cast<int>(r), got.row_bytes(), seed));
  }
  const std::vector<std::byte> zeros(row_bytes);
  for (size_t i = 0; i < sources.size(); ++i) {
    const RowSource& source = sources[i];
    const std::byte* wanted = source.rank < 0 ? zeros.data()
                                              : tokens[static_cast<size_t>(source.rank)].data() +
                                                    static_cast<size_t>(source.token) * row_bytes;
    if (std::memcmp(static_cast<const std::byte*>(got.data) + i * row_bytes, wanted, row_bytes) !=
        0) {
      find(concat(what, ": row ", i, " is not token ", source.token, " of rank ", source.rank,
                  " (-1: a pad row of zeros)"));
      return;
    }
  }
}

void Trial::dispatch() {
  if (world_.dtype == DType::kF8E4M3) {
    dispatch_with_scales(DType::kF32, 128);
    dispatch_with_scales(DType::kE8M0, 32);
  }
  const auto bits = [&](uint64_t seed) {
    return token_bits(world_, rank_, width() * size_of(world_.dtype), seed);
  };
  // Into the caller's memory, and into the library's, with weights.
  const std::vector<std::byte> first = bits(seed_);
  const OwnedTensor rows = poisoned(world_.dtype, {plan_.num_rows(), width()});
  const DispatchResult given = dispatcher_.dispatch(
      plan_, {.x = {first.data(), world_.dtype, {input_.T, width()}}, .rows = rows.view});
  if (given.rows.view.data != rows.view.data) find("rows are not in the caller's memory");
  expect_rows("rows", given.rows.view, seed_);

  const std::vector<std::byte> second = bits(seed_ + 1);
  const DispatchResult owned = dispatcher_.dispatch(
      plan_, {.x = {second.data(), world_.dtype, {input_.T, width()}}, .with_row_weights = true});
  expect_rows("rows in the library's memory", owned.rows.view, seed_ + 1);
  expect_bits("row_weights", owned.row_weights.view,
              reference::dispatch_routes(layout_, weights_)[static_cast<size_t>(rank_)]);
}

void Trial::dispatch_in_chunks() {
  const std::vector<std::byte> x =
      token_bits(world_, rank_, width() * size_of(world_.dtype), seed_ + 8);
  const Segments segments = plan_.segments();
  const OwnedTensor seen = poisoned(world_.dtype, {plan_.num_rows(), width()});
  const auto copy_chunk = [&](const DispatchResult& result, const DispatchChunk& chunk) {
    if (chunk.first_expert == chunk.last_expert) return;
    const int64_t first = segments.starts[chunk.first_expert] * seen.view.row_bytes();
    const int64_t last = segments.starts[chunk.last_expert] * seen.view.row_bytes();
    if (first == last) return;
    std::memcpy(static_cast<std::byte*>(seen.view.data) + first,
                static_cast<const std::byte*>(result.rows.view.data) + first,
                static_cast<size_t>(last - first));
  };
  DispatchArgs args{.x = {x.data(), world_.dtype, {input_.T, width()}},
                    .num_chunks = world_.num_chunks};
  DispatchResult result;
  if (world_.awaits_chunks && !PlacedDispatcher::is_copied(plan_)) {
    Dispatcher& dispatcher = dispatcher_.on_host();
    Pending<DispatchResult> pending = dispatcher.begin_dispatch(plan_, args);
    while (const auto chunk = dispatcher.next_chunk(pending)) copy_chunk(pending.result(), *chunk);
    result = dispatcher.finish(std::move(pending));
  } else {
    args.on_chunk = copy_chunk;
    result = dispatcher_.dispatch(plan_, args);
  }
  expect_rows("rows of a dispatch in chunks", result.rows.view, seed_ + 8);
  expect_rows("rows of chunks when they were announced", seen.view, seed_ + 8);
}

void Trial::dispatch_with_scales(DType scale_dtype, int64_t group_size) {
  const int64_t num_scales = (width() + group_size - 1) / group_size;
  const std::vector<std::byte> x = token_bits(world_, rank_, width(), seed_ + 2);
  const std::vector<std::byte> scales =
      token_bits(world_, rank_, num_scales * size_of(scale_dtype), seed_ + 3);
  const OwnedTensor row_scales = poisoned(scale_dtype, {plan_.num_rows(), num_scales});
  const DispatchResult result =
      dispatcher_.dispatch(plan_, {.x = {x.data(), world_.dtype, {input_.T, width()}},
                                   .scales = {scales.data(), scale_dtype, {input_.T, num_scales}},
                                   .row_scales = row_scales.view});
  expect_rows("fp8 rows", result.rows.view, seed_ + 2);
  expect_rows("row_scales", result.row_scales.view, seed_ + 3);
}

void Trial::combine() {
  const PerRank routes =
      for_ranks(world_, [&](int r) { return route_values(world_, r, seed_ + kCombineSeed); });
  const PerRank rows = rows_of_routes(layout_, width(), routes);
  const auto me = static_cast<size_t>(rank_);
  const Shape shape{plan_.num_rows(), width()};

  // From rows that the library allocated, and from other memory.
  const OwnedTensor own = reference::to_tensor(sum_dtype(), shape, rows[me]);
  const OwnedTensor leased = dispatcher_.allocate_rows(plan_, sum_dtype());
  if (own.view.num_bytes() > 0) {
    std::memcpy(leased.view.data, own.view.data, static_cast<size_t>(own.view.num_bytes()));
  }
  const OwnedTensor out = poisoned(sum_dtype(), {input_.T, width()});
  const OwnedTensor weighted = dispatcher_.combine(plan_, leased.view, out.view);
  if (weighted.view.data != out.view.data) find("out is not in the caller's memory");
  expect_sums("out", weighted.view, rows, &weights_);
  out_ = reference::to_values(weighted.view);

  const OwnedTensor unweighted = dispatcher_.combine_unweighted(plan_, own.view);
  expect_sums("out without weights", unweighted.view, rows);
}

void Trial::backward() {
  const auto me = static_cast<size_t>(rank_);
  const Shape rows_shape{plan_.num_rows(), width()};
  const PerRank grad_out =
      for_ranks(world_, [&](int r) { return token_values(world_, r, seed_ + 5); });
  const PerRank y =
      rows_of_routes(layout_, width(),
                     for_ranks(world_, [&](int r) { return route_values(world_, r, seed_ + 6); }));
  const OwnedTensor grad_tensor =
      reference::to_tensor(sum_dtype(), {input_.T, width()}, grad_out[me]);
  const OwnedTensor y_tensor = reference::to_tensor(sum_dtype(), rows_shape, y[me]);
  const CombineBackwardResult back =
      dispatcher_.combine_backward(plan_, grad_tensor.view, y_tensor.view);

  reference::CombineGradients wanted =
      reference::combine_backward(layout_, width(), grad_out, y, weights_);
  for (double& value : wanted.rows[me]) value = reference::round_to(sum_dtype(), value);
  expect_bits("grad_rows", back.grad_rows.view, wanted.rows[me]);
  expect_near_weights(back.grad_weights.view, wanted.weights[me], grad_out, y);

  const PerRank grad_rows =
      rows_of_routes(layout_, width(),
                     for_ranks(world_, [&](int r) { return route_values(world_, r, seed_ + 7); }));
  const OwnedTensor grad_rows_tensor = reference::to_tensor(sum_dtype(), rows_shape, grad_rows[me]);
  const OwnedTensor grad_x = poisoned(sum_dtype(), {input_.T, width()});
  const OwnedTensor result =
      dispatcher_.dispatch_backward(plan_, grad_rows_tensor.view, grad_x.view);
  if (result.view.data != grad_x.view.data) find("grad_x is not in the caller's memory");
  expect_sums("grad_x", result.view, grad_rows);

  PerRank numbers;  // one per row, different in all rows of all ranks
  for (int r = 0; r < layout_.num_ranks(); ++r) {
    numbers.emplace_back();
    for (int64_t i = 0; i < layout_.num_rows(r); ++i) {
      numbers.back().push_back(static_cast<double>(i * layout_.num_ranks() + r + 1));
    }
  }
  const OwnedTensor number_tensor =
      reference::to_tensor(weight_dtype(), {plan_.num_rows()}, numbers[me]);
  const OwnedTensor routes = dispatcher_.collect_routes(plan_, number_tensor.view);
  expect_bits("collect_routes", routes.view, reference::collect_routes(layout_, numbers)[me]);
}

// A dot product may sum in any order: its error is bounded by the sum of magnitudes.
void Trial::expect_near_weights(ConstTensorView got, const std::vector<double>& wanted,
                                const PerRank& grad_out, const PerRank& y) {
  const auto magnitude = [](PerRank values) {
    for (auto& rank : values) {
      for (double& value : rank) value = std::abs(value);
    }
    return values;
  };
  const std::vector<double> bound =
      reference::combine_backward(layout_, width(), magnitude(grad_out), magnitude(y), weights_)
          .weights[static_cast<size_t>(rank_)];
  reference::Comparator comparator;
  comparator.near(
      "grad_weights", reference::to_values(got), wanted,
      {.tolerance = static_cast<double>(width() + 4) * reference::epsilon_of(sum_dtype()),
       .scale = bound,
       .dtype = sum_dtype()});
  if (!comparator.passed()) find(comparator.failure());
}

void Trial::transpose() {
  const auto tokens = static_cast<size_t>(input_.T * width());
  const auto rows = static_cast<size_t>(plan_.num_rows() * width());
  const auto rank = static_cast<uint64_t>(rank_);
  const std::vector<double> x = quarter_values(tokens, hash_of(seed_, rank, 1));
  const std::vector<double> y = quarter_values(rows, hash_of(seed_, rank, 2));
  const OwnedTensor x_tensor = reference::to_tensor(sum_dtype(), {input_.T, width()}, x);
  const OwnedTensor y_tensor = reference::to_tensor(sum_dtype(), {plan_.num_rows(), width()}, y);
  const DispatchResult sent = dispatcher_.dispatch(plan_, {.x = x_tensor.view});
  const OwnedTensor back = dispatcher_.combine_unweighted(plan_, y_tensor.view);
  const std::vector<double> sides = {dot(reference::to_values(sent.rows.view), y),
                                     dot(x, reference::to_values(back.view))};
  const Agreement all = dispatcher_.group().agree(
      {.operation = "conformance", .body = std::as_bytes(std::span(sides))});
  double left = 0.0;
  double right = 0.0;
  for (int r = 0; r < dispatcher_.group().size(); ++r) {
    std::array<double, 2> theirs{};
    std::memcpy(theirs.data(), all.body(r).data(), sizeof(theirs));
    left += theirs[0];
    right += theirs[1];
  }
  if (left != right) find(concat("<dispatch(x), y> is ", left, ", <x, combine(y)> is ", right));
}

Findings judge(Group& group, const StrategyFactory& strategy, const World& world) {
  Findings findings;
  PlacedDispatcher dispatcher(group, world.config, strategy());
  Trial trial(dispatcher, world, world.seed, findings);
  trial.dispatch();
  trial.dispatch_in_chunks();
  trial.combine();
  trial.backward();
  if (world.exact_sums || world.name.ends_with("/plain")) trial.transpose();
  return findings;
}

}  // namespace crossdock::conformance
