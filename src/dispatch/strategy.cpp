#include "crossdock/extend/strategy.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/extend/strategy_model.hpp"
#include "dispatch/host/wire.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/list.hpp"
#include "ops/copy_rows.hpp"

namespace crossdock {

void Strategy::scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                              std::span<const ExpertChunk> chunks,
                              const std::function<void(size_t)>& arrived) {
  scatter(call, parts);
  for (size_t i = 0; i < chunks.size(); ++i) arrived(i);
}

void Strategy::scatter_routes(const StrategyCall& call, ConstTensorView routes, TensorView rows) {
  const PlanData& plan = call.plan.data();
  const int64_t element_bytes = size_of(routes.dtype);
  const Buffer packed = call.group.pool().take_scratch(plan.num_sent() * element_bytes);
  ops::gather_rows({.x = static_cast<const std::byte*>(routes.data),
                    .index = plan.sent_routes.data(),
                    .rows = packed.data(),
                    .num_rows = plan.num_sent(),
                    .row_bytes = element_bytes});
  const Buffer arrived = exchange_rows(call, {.send = packed,
                                              .send_offsets = plan.send_offsets,
                                              .recv_offsets = plan.recv_offsets,
                                              .row_bytes = element_bytes});
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : plan.recv_blocks) {
    blocks.push_back({.from = block.arrival, .to = block.row, .count = block.count});
  }
  ops::copy_blocks({.from = arrived.data(),
                    .to = static_cast<std::byte*>(rows.data),
                    .blocks = blocks,
                    .row_bytes = element_bytes});
}

void Strategy::gather_routes(const StrategyCall& call, ConstTensorView rows, TensorView routes) {
  const PlanData& plan = call.plan.data();
  const int64_t element_bytes = size_of(rows.dtype);
  const Buffer packed = call.group.pool().take_scratch(plan.num_received() * element_bytes);
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : plan.recv_blocks) {
    blocks.push_back({.from = block.row, .to = block.arrival, .count = block.count});
  }
  ops::copy_blocks({.from = static_cast<const std::byte*>(rows.data),
                    .to = packed.data(),
                    .blocks = blocks,
                    .row_bytes = element_bytes});
  const Buffer arrived = exchange_rows(call, {.send = packed,
                                              .send_offsets = plan.recv_offsets,
                                              .recv_offsets = plan.send_offsets,
                                              .row_bytes = element_bytes});
  ops::scatter_rows({.x = arrived.data(),
                     .index = plan.sent_routes.data(),
                     .rows = static_cast<std::byte*>(routes.data),
                     .num_rows = plan.num_sent(),
                     .row_bytes = element_bytes});
}

OwnedTensor Strategy::allocate_rows(const StrategyCall& call, DType dtype, Shape shape) {
  return call.group.pool().take(dtype, shape);
}

const StrategyModel& Strategy::model() const {
  static const StrategyModel kModel;
  return kModel;
}

namespace {

std::string joined(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
  return text;
}

}  // namespace

void StrategyList::add(StrategyFactory make) {
  std::shared_ptr<const Strategy> sample = make();
  CROSSDOCK_CHECK(sample != nullptr, "a factory must make a strategy, got none");
  const std::string_view name = sample->name();
  CROSSDOCK_CHECK(
      !name.empty() && name != "auto" && name.find_first_of(",;=") == name.npos,
      "the name of a strategy must not be empty or \"auto\", or contain any of \",;=\"; "
      "got \"",
      name, "\"");
  const bool is_taken = std::any_of(samples_.begin(), samples_.end(),
                                    [&](const auto& other) { return other->name() == name; });
  CROSSDOCK_CHECK(!is_taken, "the list already has a strategy \"", name, "\"");
  samples_.push_back(std::move(sample));
  factories_.push_back(std::move(make));
}

std::unique_ptr<Strategy> StrategyList::make(std::string_view name) const {
  for (size_t i = 0; i < samples_.size(); ++i) {
    if (samples_[i]->name() == name) return factories_[i]();
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat("strategy must be one of ", joined(names()),
                     " (or auto, for a dispatcher); got \"", name, "\""));
}

std::vector<std::string> StrategyList::names() const {
  std::vector<std::string> names;
  for (const auto& sample : samples_) names.emplace_back(sample->name());
  return names;
}

StrategyList built_in_strategies() {
  StrategyList list;
#define CROSSDOCK_ADD_STRATEGY(name) list.add(make_##name);
  CROSSDOCK_STRATEGIES(CROSSDOCK_ADD_STRATEGY)
#undef CROSSDOCK_ADD_STRATEGY
  return list;
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names = built_in_strategies().names();
  std::sort(names.begin(), names.end());
  return names;
}

std::unique_ptr<Strategy> make_strategy(std::string_view name) {
  return built_in_strategies().make(name);
}

namespace {

constexpr double kOriginBytes = 24;  // token, row and weight of a route

}  // namespace

LinkFlow StrategyModel::flow(Movement movement, const RouteSums& sums,
                             const Topology& /*topology*/) const {
  if (is_scatter(movement)) return sums.routes;
  return movement == Movement::kCombine ? sums.routes.reversed() : sums.ranks.reversed();
}

double StrategyModel::memory_traffic(Movement movement, const StepSizes& n,
                                     const StrategyJob& job) const {
  const RowBytes& bytes = job.row_bytes;
  if (is_scatter(movement)) {  // pack, send; receive, unpack
    return bytes.of(movement) *
           (n.tokens + n.kept + 2 * (n.sent - n.kept) + 3 * (n.received - n.kept));
  }
  if (movement == Movement::kCombine) {  // pack, send; receive, sum
    return bytes.results * (3 * (n.received - n.kept) + 2 * (n.sent - n.kept) + n.kept + n.tokens);
  }
  return bytes.results * (n.received + n.tokens) +
         bytes.partial * (2 * n.sums_received + 2 * n.sums_sent);
}

MessageModel StrategyModel::messages(Movement movement, double /*row_bytes*/,
                                     const StrategyJob& job) const {
  return {.rounds = 1,
          .rows_per_token = movement == Movement::kPartialSums ? job.spread.reaches_rank
                                                               : job.spread.routes_to_rank};
}

// Mirrors exchange_rank_sums.
void StrategyModel::trace_plan(const StepSizes& n, const StrategyJob& job,
                               MemoryTrace& trace) const {
  if (job.config.partial_sums == PartialSums::kNone) return;
  trace.keep_in_pool(n.received * kWeightBytes);
  trace.exchange(n.sent * kOriginBytes, n.received * kOriginBytes);
  trace.keep_in_plan((n.received + 2 * n.sums_received + n.sums_sent + n.tokens) * kIndexBytes);
}

void StrategyModel::trace_rows(Movement movement, double row_bytes, const StepSizes& n,
                               const StrategyJob& /*job*/, MemoryTrace& trace) const {
  const double leaving = (n.sent - n.kept) * row_bytes;
  const double arriving = (n.received - n.kept) * row_bytes;
  if (is_scatter(movement)) return trace.exchange(leaving, arriving);
  if (movement == Movement::kCombine) return trace.exchange(arriving, leaving);
  trace.exchange(n.sums_received * row_bytes, n.sums_sent * row_bytes);
}

Error no_cuda_error() {
  return {ErrorCode::kUnsupported, concat("this build has no CUDA (", cuda_missing_reason(),
                                          "); configure with CROSSDOCK_WITH_CUDA=ON")};
}

std::unique_ptr<Path> Strategy::make_device_path(const PathContext& /*context*/,
                                                 Device /*device*/) const {
  if (!cuda_is_built()) throw no_cuda_error();
  throw Error(ErrorCode::kUnsupported,
              concat("strategy \"", name(), "\" is not supported on GPUs"));
}

std::unique_ptr<Path> ForwardingStrategy::make_device_path(const PathContext& context,
                                                           Device device) const {
  return inner_->make_device_path(context, device);
}

}  // namespace crossdock
