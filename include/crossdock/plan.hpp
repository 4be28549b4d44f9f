#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "crossdock/tensor.hpp"

namespace crossdock {

struct PlanData;       // see extend/plan_data.hpp
class DevicePlanData;  // likewise

enum class DropPolicy : uint8_t {
  kPosition,  // keeps the lowest (token, slot)
  kWeight     // keeps the largest weights, ties to the lower (token, slot)
};

/// At most C rows per expert and source rank, C = ceil((T * K / E) * factor) in double.
struct Capacity {
  double factor = 1.0;
  DropPolicy policy = DropPolicy::kPosition;
  /// Every segment has exactly C rows per source, pad rows included, with C from max_tokens.
  bool pad_to_capacity = false;
  int64_t max_tokens = 0;  // largest T of any rank and step; for pad_to_capacity
};

enum class NonFinite : uint8_t { kReject, kPropagate };

/// What the ranks of a group must have alike.
struct DispatchConfig {
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  int64_t width = 0;        // D
  int64_t alignment = 1;    // segments start at multiples: 1, 8, 16, 32, 64, 128 or 256
  std::optional<Capacity> capacity{};
  std::vector<int32_t> placement{};  // [E] expert -> rank; empty: contiguous, as even as can be
  bool partial_sums = false;  // sum per rank before travelling home: less traffic, other bits
  NonFinite nonfinite = NonFinite::kReject;  // weights
  std::optional<int64_t> max_rows{};  // R at most, at any rank; more is an agreed kCapacity error
};

/// First expert of rank r under the default placement; rank P gives E.
CROSSDOCK_API int64_t first_expert(int64_t num_experts, int num_ranks, int rank);

/// Where each token goes. Routes are explicit: a slot holds an expert id, or -1 for none; a weight
/// of exactly 0 is a real route. Weights of slots without a route are not looked at.
struct Routing {
  ConstTensorView expert_ids{};  // [T, K] int32 or int64; in [0, E) or -1, no id twice in a token
  ConstTensorView weights{};     // [T, K] fp32, or fp64 with fp64 tokens
  ConstTensorView mask{};        // [T] bool, optional: true = padding, the token has no routes
};

/// The same as a dense map; the slots of a token are its set bits in ascending expert order.
/// At most K bits may be set in a token.
struct DenseRouting {
  ConstTensorView map{};      // [T, E] bool
  ConstTensorView weights{};  // [T, E] fp32, or fp64 with fp64 tokens
  ConstTensorView mask{};     // [T] bool, optional
};

/// One routing, agreed by all ranks. Made by Dispatcher::plan, read-only afterwards, owned by its
/// caller; any number may be in flight. Cheap to copy (shares its data).
class CROSSDOCK_API Plan {
 public:
  Plan() = default;
  Plan(std::shared_ptr<const PlanData> data, std::shared_ptr<const void> strategy_state,
       std::shared_ptr<const DevicePlanData> device_data = nullptr);

  bool valid() const { return data_ != nullptr; }
  uint64_t id() const;
  /// Where the routing was, and where tokens and rows must be.
  Device device() const;
  int64_t num_tokens() const;
  /// Rows at this rank, R, pad rows included. The one call that may synchronise with a device.
  int64_t num_rows() const;
  /// Upper bound of num_rows() that is known without synchronising, and the R of every tensor of
  /// rows: the same as num_rows() on the CPU; on a device the configuration's max_rows if given.
  /// Rows from num_rows() on are then unspecified.
  int64_t capacity_rows() const;
  int64_t num_local_experts() const;
  /// On the plan's device. These three show memory of the plan: keep the plan.
  Segments segments() const&;
  Segments segments() const&& = delete;
  /// [E] routes of this rank that capacity dropped, in host memory. May synchronise with a device.
  std::span<const int64_t> dropped() const&;
  std::span<const int64_t> dropped() const&& = delete;
  /// [T, K] the weights of kept routes; 0 elsewhere. On the plan's device.
  ConstTensorView weights() const&;
  ConstTensorView weights() const&& = delete;

  /// For strategies.
  const PlanData& data() const { return *data_; }
  template <typename State>
  const State& strategy_state() const {
    return *static_cast<const State*>(strategy_state_.get());
  }
  const std::shared_ptr<const DevicePlanData>& device_data() const { return device_data_; }
  /// The same plan, on a device.
  Plan with_device_data(std::shared_ptr<const DevicePlanData> device_data) const;

 private:
  std::shared_ptr<const PlanData> data_;
  std::shared_ptr<const void> strategy_state_;
  std::shared_ptr<const DevicePlanData> device_data_;
};

}  // namespace crossdock
