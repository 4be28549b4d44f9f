#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

struct PlanData;       // see extend/plan_data.hpp
class DevicePlanData;  // see extend/plan_data.hpp

enum class DropPolicy : uint8_t {
  kPosition,  // keeps the lowest (token, slot)
  kWeight     // keeps the largest weights, ties to the lower (token, slot)
};

/// Limits each expert to C rows per source rank, C = ceil((T * K / E) * factor), computed in double
/// with K = top_k.
struct Capacity {
  double factor = 1.0;
  DropPolicy policy = DropPolicy::kPosition;
  /// Pads every segment to exactly C rows per source, with C computed from max_tokens.
  bool pad_to_capacity = false;
  int64_t max_tokens = 0;  // largest T of any rank and step; for pad_to_capacity
};

enum class NonFinite : uint8_t { kReject, kPropagate };

/// Whether a token's rows on one rank (or node) are summed before they are sent back, and the dtype
/// in which the sums are sent. Less traffic, different bits (docs/numerics.md).
enum class PartialSums : uint8_t {
  kNone,    // every row is sent: the same bits for every strategy and number of ranks
  kF32,     // fp32; fp64 for fp64 rows
  kRowType  // dtype of the rows: each sum is computed in fp32 and rounded once
};

inline constexpr std::array<std::string_view, 3> kPartialSumsNames = {"none", "fp32", "rows"};

constexpr std::string_view name_of(PartialSums sums) {
  return kPartialSumsNames[static_cast<size_t>(sums)];
}

/// The inverse of name_of. Throws Error(kInvalidArgument), listing the valid names.
CROSSDOCK_API PartialSums parse_partial_sums(std::string_view name);

/// Dtype in which sums of rows of dtype `rows` are sent. kNone, which sends none, gives the same
/// result as kF32.
constexpr DType partial_dtype(PartialSums sums, DType rows) {
  return sums == PartialSums::kRowType || rows == DType::kF64 ? rows : DType::kF32;
}

/// How many copies of a token `direct` and `hierarchical` send between GPUs of one node. The
/// resulting rows are bit-identical.
enum class Copies : uint8_t {
  kAuto,      // kPerRank if the ranks are on several GPUs, kPerRoute if they share one
  kPerRoute,  // one per row: nothing is read or written twice
  kPerRank    // one per rank, copied there to the token's other rows: less link traffic
};

inline constexpr std::array<std::string_view, 3> kCopiesNames = {"auto", "per_route", "per_rank"};

constexpr std::string_view name_of(Copies copies) {
  return kCopiesNames[static_cast<size_t>(copies)];
}

/// The inverse of name_of. Throws Error(kInvalidArgument), listing the valid names.
CROSSDOCK_API Copies parse_copies(std::string_view name);

/// Must be identical on every rank of a group.
struct DispatchConfig {
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  int64_t width = 0;        // D
  int64_t alignment = 1;    // of segment starts, in rows: 1, 8, 16, 32, 64, 128 or 256
  std::optional<Capacity> capacity{};
  std::vector<int32_t> placement{};  // [E] expert -> rank; empty: contiguous, as even as possible
  PartialSums partial_sums = PartialSums::kNone;  // in combine and dispatch_backward
  NonFinite nonfinite = NonFinite::kReject;       // for weights
  std::optional<int64_t> max_rows{};  // limit on R; if any rank exceeds it, all throw kCapacity
  /// Every local expert has at least one row (one alignment unit): pad rows if it has no routes,
  /// for kernels that cannot handle an empty expert. Its count stays 0.
  bool keep_empty_segments = false;
  /// Upper bound on the set bits of a token in a dense map, from top_k to E; a token with more is
  /// refused. Plans of dense maps then have this many slots per token. 0: no bound; the number of
  /// slots comes from the map (see DenseRouting), and plan() waits for the GPU.
  int64_t max_routes_per_token = 0;
  Copies copies = Copies::kAuto;  // in dispatch on GPUs; ignored on the CPU and between nodes
};

/// First expert of `rank` under the default placement; E if `rank` is P.
CROSSDOCK_API int64_t first_expert(int64_t num_experts, int num_ranks, int rank);

/// The routes of every token. A slot holds an expert id, or -1 for no route; a route with weight 0
/// is still a route. Weights of slots without a route are ignored.
struct Routing {
  ConstTensorView expert_ids{};  // [T, K] int32 or int64; in [0, E) or -1; distinct per token
  ConstTensorView weights{};     // [T, K] fp64, fp32, bf16 or fp16; see Plan::weights
  ConstTensorView mask{};        // [T] bool, optional: true = padding, the token has no routes
};

/// A routing as a dense map. The slots of a token are its set bits in ascending expert order,
/// followed by unused slots. Any number of bits may be set. The K of the plan, identical on every
/// rank, is max_routes_per_token if it is set; otherwise the largest number of bits in any unmasked
/// token of any rank, but at least top_k. Plan::weights() has this K as its second dimension.
struct DenseRouting {
  ConstTensorView map{};      // [T, E] bool
  ConstTensorView weights{};  // [T, E], dtype as in Routing; ignored where no bit is set
  ConstTensorView mask{};     // [T] bool, optional
};

/// One routing, agreed by all ranks. Made by Dispatcher::plan, read-only afterwards, owned by the
/// caller. Any number of plans may be in use at once. Cheap to copy: copies share their data.
class CROSSDOCK_API Plan {
 public:
  Plan() = default;
  Plan(std::shared_ptr<const PlanData> data, std::shared_ptr<const void> strategy_state,
       std::shared_ptr<const DevicePlanData> device_data = nullptr);

  bool valid() const { return data_ != nullptr; }
  uint64_t id() const;
  /// Device of the routing; tokens and rows must be there too.
  Device device() const;
  int64_t num_tokens() const;
  /// R, the number of rows on this rank, pad rows included. May wait for the GPU.
  int64_t num_rows() const;
  /// Upper bound on num_rows(), known without waiting: the R of every tensor of rows. Equal to
  /// num_rows() on the CPU; on a GPU, the configuration's max_rows if set. Rows past the last
  /// segment, from num_rows() on, are never read and may hold anything; the dispatcher leaves them
  /// unspecified in its results, and Experts sets them to 0 in its outputs.
  int64_t capacity_rows() const;
  int64_t num_local_experts() const;
  /// On the plan's device. Valid as long as the plan, like the results of dropped() and weights().
  Segments segments() const&;
  Segments segments() const&& = delete;
  /// [E] routes of this rank dropped by capacity, in host memory. May wait for the GPU.
  std::span<const int64_t> dropped() const&;
  std::span<const int64_t> dropped() const&& = delete;
  /// [T, K] weights of kept routes, 0 elsewhere. On the plan's device. Stored in fp32; fp64 weights
  /// are stored in fp64 on the CPU, where they require fp64 tokens, and rounded to fp32 on a GPU.
  /// Gradients of weights have the same dtype.
  ConstTensorView weights() const&;
  ConstTensorView weights() const&& = delete;

  /// For strategies.
  const PlanData& data() const { return *data_; }
  template <typename State>
  const State& strategy_state() const {
    return *static_cast<const State*>(strategy_state_.get());
  }
  const std::shared_ptr<const DevicePlanData>& device_data() const { return device_data_; }
  /// A copy of this plan with data on a device.
  Plan with_device_data(std::shared_ptr<const DevicePlanData> device_data) const;

 private:
  std::shared_ptr<const PlanData> data_;
  std::shared_ptr<const void> strategy_state_;
  std::shared_ptr<const DevicePlanData> device_data_;
};

}  // namespace crossdock
