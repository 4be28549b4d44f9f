#include "cost/step_memory.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "core/block_ledger.hpp"

namespace crossdock {
namespace {

constexpr double kPageBytes = 4096;
constexpr double kHeaderBytes = 72;  // of a rendezvous
constexpr double kOriginBytes = 24;  // token, row and weight of a route
constexpr double kWeightBytes = 4;   // fp32; fp64 tokens are for tests
constexpr double kCopyBytes = 16;    // what a gateway is told of a copy
constexpr double kIndexBytes = 8;

// The blocks of the windows: a request gets the smallest free block that fits, unless more than
// half of it would be wasted; otherwise a new one, in place of a free one up to half too small.
class WindowModel {
 public:
  double take(double num_bytes) {
    if (num_bytes <= 0) return 0;
    const double wanted = std::ceil(num_bytes / kPageBytes) * kPageBytes;
    const auto found = free_.lower_bound(wanted);
    if (found == free_.end() || *found > 2 * wanted) {
      if (found != free_.begin() && 2 * *std::prev(found) >= wanted) {
        held_ -= *std::prev(found);
        free_.erase(std::prev(found));
      }
      held_ += wanted;
      return wanted;
    }
    const double block = *found;
    free_.erase(found);
    return block;
  }
  void give_back(double block) {
    if (block > 0) free_.insert(block);
  }
  double held() const { return held_; }

 private:
  std::multiset<double> free_;
  double held_ = 0;
};

class PoolModel {
 public:
  /// No request is larger than `largest` bytes. The ledger counts bytes where a few times as many
  /// can be counted, and larger units otherwise.
  explicit PoolModel(double largest)
      : unit_(std::exp2(std::max(0.0, std::ceil(std::log2(std::max(1.0, largest))) - 57.0))) {}

  BlockLedger::Grant take(double num_bytes, BlockUse use) {
    const auto wanted = pages(num_bytes);
    return wanted > 0 ? ledger_.take(wanted, use) : BlockLedger::Grant{};
  }
  void give_back(const BlockLedger::Grant& grant, double num_bytes) {
    if (grant.block_bytes > 0) ledger_.give_back(grant.block_bytes, pages(num_bytes));
  }
  double held() const { return static_cast<double>(ledger_.bytes_held()) * unit_; }

 private:
  int64_t pages(double num_bytes) const {
    const double rounded = std::ceil(std::max(0.0, num_bytes) / kPageBytes) * kPageBytes;
    return static_cast<int64_t>(rounded / unit_);
  }
  double unit_;
  BlockLedger ledger_;
};

// Blocks that go back at the end of their scope.
class Lease {
 public:
  Lease(PoolModel& pool, double num_bytes, BlockUse use = BlockUse::kResult)
      : pool_(&pool), num_bytes_(num_bytes), grant_(pool.take(num_bytes, use)) {}
  Lease(WindowModel& windows, double num_bytes)
      : windows_(&windows), window_block_(windows.take(num_bytes)) {}
  ~Lease() { release(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  void release() {
    if (pool_ != nullptr) pool_->give_back(grant_, num_bytes_);
    if (windows_ != nullptr) windows_->give_back(window_block_);
    pool_ = nullptr;
    windows_ = nullptr;
  }

 private:
  PoolModel* pool_ = nullptr;
  double num_bytes_ = 0;
  BlockLedger::Grant grant_;
  WindowModel* windows_ = nullptr;
  double window_block_ = 0;
};

// The requests of one step, in the order of the code: each member stands for the function whose
// name it bears.
class StepTrace {
 public:
  StepTrace(const StepSizes& sizes, const CostInputs& inputs, StrategyKind kind)
      : n_(sizes),
        inputs_(inputs),
        bytes_(row_bytes_of(inputs)),
        kind_(kind),
        partial_sums_(inputs.config.partial_sums),
        P_(static_cast<double>(inputs.topology.node_of_rank.size())),
        E_(static_cast<double>(inputs.config.num_experts)),
        K_(static_cast<double>(inputs.config.top_k)),
        has_far_ranks_(inputs.topology.num_nodes > 1),
        pool_(largest_request()) {}

  // Forward and backward of a layer: the rows stay for backward, the experts' result does not; the
  // weights go to the rows in backward, and their gradients come back.
  void run() {
    const Lease plan_weights(pool_, n_.tokens * K_ * kWeightBytes);
    const Lease sum_weights(pool_, keeps_sum_weights() ? n_.received * kWeightBytes : 0);
    plan();
    const Lease rows = lease_rows(n_.padded * bytes_.tokens);
    const Lease row_scales(pool_, n_.padded * bytes_.scales);
    scatter(bytes_.tokens);
    if (bytes_.scales > 0) {
      const Lease stand_in(windows_, writes_to_peers() ? n_.padded * bytes_.scales : 0);
      scatter(bytes_.scales);
    }
    Lease y = lease_rows(n_.padded * bytes_.results);
    const Lease out(pool_, n_.tokens * bytes_.results);
    gather();
    y.release();

    const Lease grad_y = lease_rows(n_.padded * bytes_.results);
    const Lease row_weights(pool_, n_.padded * kWeightBytes);
    exchange(n_.sent * kWeightBytes, n_.received * kWeightBytes);  // scatter_routes
    scatter(bytes_.results);
    const Lease grad_rows = lease_rows(n_.padded * bytes_.results);
    const Lease grad_row_weights(pool_, n_.padded * kWeightBytes);
    const Lease grad_x(pool_, n_.tokens * bytes_.results);
    gather();
    const Lease grad_weights(pool_, n_.tokens * K_ * kWeightBytes);
    exchange(n_.received * kWeightBytes, n_.sent * kWeightBytes);  // gather_routes
  }

  MemoryNeed held() const {
    return {
        .window_bytes = windows_.held(), .pool_bytes = pool_.held(), .plan_bytes = plan_bytes()};
  }

 private:
  bool writes_to_peers() const {
    return kind_ == StrategyKind::kDirect || kind_ == StrategyKind::kHierarchical;
  }
  bool keeps_sum_weights() const { return partial_sums_ && !writes_to_peers(); }
  Lease lease_rows(double num_bytes) {
    return writes_to_peers() ? Lease(windows_, num_bytes) : Lease(pool_, num_bytes);
  }

  // The tokens of one round, as a part of all; `rows` travel in all.
  double share_of_round(double rows, double row_bytes, bool are_sums) const {
    if (n_.tokens <= 0) return 1.0;
    const RelayLoad load{
        .routes = routes() / n_.tokens, .travelling = rows / n_.tokens, .are_sums = are_sums};
    return std::min(1.0, tokens_per_round(inputs_, load, row_bytes) / n_.tokens);
  }
  double copies() const { return std::max(n_.copies_sent, n_.copies_received); }
  double routes() const { return std::max(n_.far_sent, n_.targets_received); }

  void agree(double body_bytes) {
    const Lease header(pool_, kHeaderBytes, BlockUse::kScratch);
    const Lease headers(pool_, P_ * kHeaderBytes, BlockUse::kScratch);
    const Lease body(pool_, body_bytes, BlockUse::kScratch);
    const Lease bodies(pool_, P_ * body_bytes, BlockUse::kScratch);
  }

  void exchange(double sent_bytes, double received_bytes) {
    const Lease send(pool_, sent_bytes, BlockUse::kScratch);
    const Lease recv(pool_, received_bytes, BlockUse::kScratch);
  }

  void plan() {
    const Lease counts(pool_, P_ * (E_ + 1) * kIndexBytes, BlockUse::kScratch);
    agree(0);
    if (kind_ == StrategyKind::kAllgather) {
      exchange(n_.sent * kIndexBytes, n_.received * kIndexBytes);
    }
    if (writes_to_peers()) {
      if (!has_far_ranks_) return;
      agree(0);
      exchange(P_ * kCopyBytes, P_ * kCopyBytes);  // sizes of what follows
      exchange(n_.copies_sent * kCopyBytes + n_.far_sent * kOriginBytes,
               n_.copies_received * kCopyBytes + n_.targets_received * kOriginBytes);
    } else if (partial_sums_) {
      exchange(n_.sent * kOriginBytes, n_.received * kOriginBytes);
    }
  }

  void scatter(double row_bytes) {
    switch (kind_) {
      case StrategyKind::kAllgather:
        return exchange(n_.tokens * row_bytes, n_.all_tokens * row_bytes);
      case StrategyKind::kAlltoall:
        return exchange((n_.sent - n_.kept) * row_bytes, (n_.received - n_.kept) * row_bytes);
      default:
        if (!has_far_ranks_) return;
        const double round_row =
            row_bytes * share_of_round(copies(), row_bytes, /*are_sums=*/false);
        exchange(n_.copies_sent * round_row, n_.copies_received * round_row);
    }
  }

  void gather() { partial_sums_ ? gather_partial_sums() : gather_sum(); }

  void gather_sum() {
    if (!writes_to_peers()) {
      exchange((n_.received - n_.kept) * bytes_.results, (n_.sent - n_.kept) * bytes_.results);
    } else if (has_far_ranks_) {
      const double round_row =
          bytes_.results * share_of_round(routes(), bytes_.results, /*are_sums=*/false);
      exchange(n_.targets_received * round_row, n_.far_sent * round_row);
    }
  }

  void gather_partial_sums() {
    switch (kind_) {
      case StrategyKind::kAllgather:
        return exchange(n_.all_tokens * bytes_.partial, n_.all_tokens * bytes_.partial);
      case StrategyKind::kAlltoall:
        return exchange(n_.sums_received * bytes_.partial, n_.sums_sent * bytes_.partial);
      default:
        break;
    }
    const double share = share_of_round(copies(), bytes_.partial, /*are_sums=*/true);
    Lease sums(pool_, n_.copies_received * share * bytes_.partial, BlockUse::kScratch);
    const Lease returned(pool_, n_.copies_sent * share * bytes_.partial, BlockUse::kScratch);
    sums.release();
    const Lease weights(pool_, (n_.sent - n_.far_sent) * share * kWeightBytes, BlockUse::kScratch);
    const Lease near(pool_, n_.near_sums * share * bytes_.partial, BlockUse::kScratch);
  }

  // At least as many bytes as any request has.
  double largest_request() const {
    const double rows = std::max({n_.padded, n_.received, n_.sent, n_.all_tokens, n_.tokens * K_,
                                  n_.copies_received, n_.targets_received, n_.copies_sent});
    const double row_bytes = std::max(bytes_.partial, kOriginBytes + kCopyBytes);
    return 2 * rows * row_bytes + P_ * (E_ + 1) * std::max(kIndexBytes, kHeaderBytes);
  }

  // What a plan and its strategy keep in vectors; the terms that grow with T or P * E.
  double plan_bytes() const {
    double bytes =
        n_.tokens * K_ * (4 + 2 * kIndexBytes) + n_.sent * kIndexBytes + 2 * P_ * E_ * kIndexBytes;
    if (kind_ == StrategyKind::kAllgather) bytes += n_.received * kIndexBytes;
    if (writes_to_peers() && has_far_ranks_) {
      bytes += (2 * n_.copies_sent + n_.far_sent + 2 * n_.copies_received) * kIndexBytes +
               n_.targets_received * kOriginBytes;
    }
    if (partial_sums_) {
      bytes += writes_to_peers()
                   ? (n_.sent - n_.far_sent + 2 * n_.near_sums + n_.copies_sent + n_.tokens) *
                         kIndexBytes
                   : (n_.received + 2 * n_.sums_received + n_.sums_sent + n_.tokens) * kIndexBytes;
    }
    return bytes;
  }

  const StepSizes& n_;
  const CostInputs& inputs_;
  RowBytes bytes_;
  StrategyKind kind_;
  bool partial_sums_;
  double P_;
  double E_;
  double K_;
  bool has_far_ranks_;
  PoolModel pool_;
  WindowModel windows_;
};

}  // namespace

MemoryNeed memory_of_step(const StepSizes& sizes, const CostInputs& inputs, StrategyKind kind) {
  // Blocks that one step leaves serve the next in other places: what is held settles in a few.
  StepTrace trace(sizes, inputs, kind);
  for (int step = 0; step < 4; ++step) trace.run();
  return trace.held();
}

}  // namespace crossdock
