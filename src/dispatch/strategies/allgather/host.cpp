#include <numeric>
#include <vector>

#include "core/stream_copy.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/wire.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/allgather/allgather.hpp"
#include "dispatch/strategies/list.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

struct AllgatherState {
  std::vector<int64_t> arrival_tokens;  // [received] token of each, numbered as on its source
  RankSums sums;                        // with partial_sums only
};

// The tokens of all ranks, [sum of tokens_per_rank, row_bytes].
Buffer gather_tokens(const StrategyCall& call, const std::vector<int64_t>& offsets,
                     const RowPart& part) {
  Group& group = call.group;
  const int64_t send_bytes = call.plan.data().T * part.row_bytes;
  const Buffer send = group.pool().take_scratch(send_bytes);
  copy_bytes(send.data(), part.tokens, send_bytes, stores_for(send_bytes));
  finish_stores();
  const std::vector<int64_t> recv_offsets = byte_offsets(offsets, part.row_bytes);
  Buffer recv = group.pool().take_scratch(recv_offsets.back());
  group.all_gather_v(shared_bytes(send), shared_bytes(recv), recv_offsets,
                     group.wait_context(call.operation, call.sequence));
  return recv;
}

size_t source_of(const RowBlock& block) {
  return static_cast<size_t>(block.source);
}

// Tells every rank the tokens of its arrivals. Collective.
std::vector<int64_t> exchange_arrival_tokens(const StrategyCall& call) {
  const PlanData& plan = call.plan.data();
  constexpr auto kBytes = static_cast<int64_t>(sizeof(int64_t));
  const Buffer packed = call.group.pool().take_scratch(plan.num_sent() * kBytes);
  auto* tokens = reinterpret_cast<int64_t*>(packed.data());
  for (const int64_t route : plan.sent_routes) *tokens++ = route / plan.K;
  const Buffer arrived = exchange_rows(call, {.send = packed,
                                              .send_offsets = plan.send_offsets,
                                              .recv_offsets = plan.recv_offsets,
                                              .row_bytes = kBytes});
  const auto* first = reinterpret_cast<const int64_t*>(arrived.data());
  return {first, first + plan.num_received()};
}

// Copies tokens of a block's source to the block's rows.
void place(const StrategyCall& call, const RowBlock& block, const std::byte* tokens,
           const RowPart& part) {
  const auto& state = call.plan.strategy_state<AllgatherState>();
  const int64_t all_bytes = call.plan.data().num_received() * part.row_bytes;
  ops::gather_rows({.x = tokens,
                    .index = state.arrival_tokens.data() + block.arrival,
                    .rows = part.rows + block.row * part.row_bytes,
                    .num_rows = block.count,
                    .row_bytes = part.row_bytes,
                    .stores = stores_for(all_bytes)});
}

// Every token goes to every rank.
class AllgatherModel final : public StrategyModel {
 public:
  LinkFlow flow(Movement movement, const RouteSums& sums, const Topology& topology) const override {
    if (movement == Movement::kCombine) return StrategyModel::flow(movement, sums, topology);
    const LinkFlow flow = flow_of_tokens(sums, topology);
    return is_scatter(movement) ? flow : flow.reversed();
  }

  double memory_traffic(Movement movement, const StepSizes& n,
                        const StrategyJob& job) const override {
    const RowBytes& bytes = job.row_bytes;
    if (is_scatter(movement)) {  // copy, send; receive; gather
      return bytes.of(movement) * (3 * n.tokens + n.all_tokens + 2 * n.received);
    }
    if (movement == Movement::kCombine) return StrategyModel::memory_traffic(movement, n, job);
    return bytes.results * (n.received + n.tokens) + bytes.partial * (4 * n.all_tokens);
  }

  MessageModel messages(Movement movement, double row_bytes,
                        const StrategyJob& job) const override {
    if (movement == Movement::kCombine) return StrategyModel::messages(movement, row_bytes, job);
    return {.rows_per_token = std::vector<double>(job.topology.node_of_rank.size(), 1.0)};
  }

  void trace_plan(const StepSizes& n, const StrategyJob& job, MemoryTrace& trace) const override {
    trace.exchange(n.sent * kIndexBytes, n.received * kIndexBytes);  // exchange_arrival_tokens
    trace.keep_in_plan(n.received * kIndexBytes);
    StrategyModel::trace_plan(n, job, trace);
  }

  void trace_rows(Movement movement, double row_bytes, const StepSizes& n, const StrategyJob& job,
                  MemoryTrace& trace) const override {
    if (is_scatter(movement)) return trace.exchange(n.tokens * row_bytes, n.all_tokens * row_bytes);
    if (movement == Movement::kCombine) {
      return StrategyModel::trace_rows(movement, row_bytes, n, job, trace);
    }
    trace.exchange(n.all_tokens * row_bytes, n.all_tokens * row_bytes);
  }

 private:
  static LinkFlow flow_of_tokens(const RouteSums& sums, const Topology& topology) {
    const size_t P = sums.tokens.size();
    std::vector<double> node_tokens(static_cast<size_t>(topology.num_nodes), 0.0);
    std::vector<double> node_sizes(node_tokens.size(), 0.0);
    for (size_t rank = 0; rank < P; ++rank) {
      node_tokens[static_cast<size_t>(topology.node_of_rank[rank])] += sums.tokens[rank];
      node_sizes[static_cast<size_t>(topology.node_of_rank[rank])] += 1.0;
    }
    const double all = std::accumulate(node_tokens.begin(), node_tokens.end(), 0.0);
    LinkFlow flow(P);
    for (size_t rank = 0; rank < P; ++rank) {
      const auto node = static_cast<size_t>(topology.node_of_rank[rank]);
      flow.kept[rank] = sums.tokens[rank];
      flow.sent_within[rank] = sums.tokens[rank] * (node_sizes[node] - 1.0);
      flow.sent_between[rank] = sums.tokens[rank] * (static_cast<double>(P) - node_sizes[node]);
      flow.received_within[rank] = node_tokens[node] - sums.tokens[rank];
      flow.received_between[rank] = all - node_tokens[node];
    }
    return flow;
  }
};

class Allgather final : public Strategy {
 public:
  std::string_view name() const override { return "allgather"; }

  std::unique_ptr<Path> make_device_path(const PathContext& context, Device device) const override {
    if constexpr (CROSSDOCK_HAS_CUDA) return make_allgather_device_path(context, device);
    throw no_cuda_error();
  }

  std::shared_ptr<const void> prepare(const StrategyCall& call) override {
    auto state = std::make_shared<AllgatherState>();
    state->arrival_tokens = exchange_arrival_tokens(call);
    if (call.plan.data().config->partial_sums != PartialSums::kNone) {
      state->sums = exchange_rank_sums(call);
    }
    return state;
  }

  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    const std::vector<int64_t> offsets = token_offsets(call.plan.data());
    for (const RowPart& part : parts) {
      const Buffer tokens = gather_tokens(call, offsets, part);
      for (const RowBlock& block : call.plan.data().recv_blocks) {
        place(call, block, tokens.data() + offsets[source_of(block)] * part.row_bytes, part);
      }
    }
  }

  // Every rank needs every token for any of its experts, so all tokens are exchanged once; only
  // copying them to their rows is done chunk by chunk.
  void scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    const PlanData& plan = call.plan.data();
    const std::vector<int64_t> offsets = token_offsets(plan);
    std::vector<Buffer> tokens;
    for (const RowPart& part : parts) tokens.push_back(gather_tokens(call, offsets, part));
    for (size_t i = 0; i < chunks.size(); ++i) {
      for (const RowBlock& block : plan.recv_blocks) {
        if (!chunks[i].holds(plan.rank, block.row)) continue;
        for (size_t p = 0; p < parts.size(); ++p) {
          place(call, block, tokens[p].data() + offsets[source_of(block)] * parts[p].row_bytes,
                parts[p]);
        }
      }
      arrived(i);
    }
  }

  void gather_sum(const StrategyCall& call, const GatherSumArgs& args) override {
    return_and_sum(call, args);
  }

  // A reduce-scatter: the partial row of every token from every rank, added in rank order.
  void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) override {
    const PlanData& plan = call.plan.data();
    const auto& sums = call.plan.strategy_state<AllgatherState>().sums;
    const int64_t row_bytes = partial_row_bytes(call, args);
    std::vector<int64_t> recv_offsets;
    for (int rank = 0; rank <= plan.P; ++rank) recv_offsets.push_back(rank * plan.T);
    Buffer partials = sum_at_experts_dense(call, sums, args);
    const Buffer arrived = exchange_rows(call, {.send = partials,
                                                .send_offsets = token_offsets(plan),
                                                .recv_offsets = recv_offsets,
                                                .row_bytes = row_bytes});
    partials = {};
    std::vector<const std::byte*> rows;
    rows.reserve(static_cast<size_t>(plan.T * plan.P));
    for (int64_t t = 0; t < plan.T; ++t) {
      for (int rank = 0; rank < plan.P; ++rank) {
        rows.push_back(arrived.data() + (rank * plan.T + t) * row_bytes);
      }
    }
    ops::sum_rows({.rows = rows.data(),
                   .K = plan.P,
                   .out = static_cast<std::byte*>(args.out.data),
                   .N = plan.T,
                   .D = args.out.shape[1],
                   .row_dtype = partial_dtype(call, args),
                   .out_dtype = args.out.dtype},
                  *call.group.threads());
  }

  const StrategyModel& model() const override {
    static const AllgatherModel kModel;
    return kModel;
  }
};

}  // namespace

std::vector<int64_t> token_offsets(const PlanData& plan) {
  std::vector<int64_t> offsets{0};
  for (const int64_t tokens : plan.tokens_per_rank) offsets.push_back(offsets.back() + tokens);
  return offsets;
}

std::span<const int64_t> arrival_tokens_of(const Plan& plan) {
  return plan.strategy_state<AllgatherState>().arrival_tokens;
}

const RankSums& rank_sums_of(const Plan& plan) {
  return plan.strategy_state<AllgatherState>().sums;
}

/// Every rank gets all tokens and keeps those for its experts. Rows return to their source and are
/// summed there; with partial_sums every rank sums its rows of every token, and the sums are
/// reduce-scattered. Sends P - 1 rows per token; at most K return, or P - 1 with partial_sums.
std::unique_ptr<Strategy> make_allgather() {
  return std::make_unique<Allgather>();
}

}  // namespace crossdock
