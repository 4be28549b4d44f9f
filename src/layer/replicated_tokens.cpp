#include "layer/replicated_tokens.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "layer/route_counts.hpp"

namespace crossdock {
namespace {

// Compared by the ranks of the group.
struct Identity {
  int64_t num_tokens;
  uint64_t sample;
};

}  // namespace

int64_t ReplicatedTokens::first_of(int64_t num_tokens) const {
  const int64_t length = (num_tokens + over_.size() - 1) / over_.size();
  return std::min(over_.rank() * length, num_tokens);
}

ConstTensorView ReplicatedTokens::slice_of(const char* name, const ConstTensorView& tensor,
                                           const ConstTensorView& x) const {
  if (!tensor.given()) return {};
  const int64_t num_tokens = x.num_rows();
  check_memory(name, tensor, x.device);
  CROSSDOCK_CHECK(tensor.num_rows() == num_tokens && tensor.shape.rank() <= 2, name,
                  " must have a row for each of the ", num_tokens, " tokens, got ",
                  describe(tensor));
  const int64_t length = (num_tokens + over_.size() - 1) / over_.size();
  const int64_t first = first_of(num_tokens);
  const int64_t count = std::min(length, num_tokens - first);
  ConstTensorView slice = tensor;
  slice.shape = tensor.shape.rank() == 1 ? Shape{count} : Shape{count, tensor.shape[1]};
  if (tensor.data != nullptr) {
    slice.data = static_cast<const std::byte*>(tensor.data) + first * tensor.row_bytes();
  }
  return slice;
}

MoeForwardArgs ReplicatedTokens::slice(const MoeForwardArgs& args) {
  MoeForwardArgs part = args;
  part.x = slice_of("x", args.x, args.x);
  part.out = {};
  part.mask = slice_of("mask", args.mask, args.x);
  part.sequence_ids = slice_of("sequence_ids", args.sequence_ids, args.x);
  part.forced_ids = slice_of("forced_ids", args.forced_ids, args.x);
  part.token_ids = slice_of("token_ids", args.token_ids, args.x);
  if (!args.token_ids.given() && args.x.device.is_cpu()) {
    token_ids_.resize(static_cast<size_t>(part.x.num_rows()));
    std::iota(token_ids_.begin(), token_ids_.end(), first_of(args.x.num_rows()));
    part.token_ids = ConstTensorView(token_ids_.data(), {part.x.num_rows()});
  }
  return part;
}

MoeBackwardArgs ReplicatedTokens::slice(const MoeBackwardArgs& args) const {
  MoeBackwardArgs part = args;
  part.x = slice_of("x", args.x, args.x);
  part.grad_out = slice_of("grad_out", args.grad_out, args.x);
  part.grad_x = {};
  return part;
}

MoeBackwardDwArgs ReplicatedTokens::slice(const MoeBackwardDwArgs& args) const {
  MoeBackwardDwArgs part = args;
  part.x = slice_of("x", args.x, args.x);
  part.grad_out = slice_of("grad_out", args.grad_out, args.x);
  return part;
}

uint64_t ReplicatedTokens::sample(const char* operation, const ConstTensorView& tokens,
                                  Stream stream) const {
  if (tokens.device.is_cpu()) return sample_tokens({.x = tokens});
  if (compared_.contains(operation) || is_captured(stream, tokens.device)) return 0;
  return sample_tokens(HostTokens({.x = tokens}, stream).tokens());
}

std::optional<Error> ReplicatedTokens::agree(const char* operation, const ConstTensorView& tokens,
                                             std::optional<Error> refusal, Stream stream) {
  Identity own{};
  if (!refusal) {
    refusal = refusal_of([&] {
      own = {.num_tokens = tokens.num_rows(), .sample = sample(operation, tokens, stream)};
    });
  }
  return refusal_of([&] {
    const Agreement agreement =
        over_.agree({.operation = operation, .body = body_of(own), .refusal = as_refusal(refusal)});
    const auto first = item_of<Identity>(agreement, 0);
    for (int rank = 1; rank < over_.size(); ++rank) {
      const auto of_rank = item_of<Identity>(agreement, rank);
      CROSSDOCK_CHECK(of_rank.num_tokens == first.num_tokens,
                      "tokens must be identical on the ranks of replicated_over, but rank ", rank,
                      " of that group has ", of_rank.num_tokens, " of them and rank 0 ",
                      first.num_tokens);
      CROSSDOCK_CHECK(of_rank.sample == first.sample,
                      "tokens and gradients must be identical on the ranks of replicated_over, "
                      "but those of ranks 0 and ",
                      rank,
                      " of that group differ; sum partial gradients over the group first, and "
                      "leave replicated_over out if each rank has tokens of its own");
    }
    if (own.sample != 0) compared_.insert(operation);
  });
}

OwnedTensor ReplicatedTokens::gather(const char* operation, const TensorView& slice,
                                     const AllTokens& all, LayerParts& parts) {
  return slice.device.is_cpu() ? gather_on_host(operation, slice, all)
                               : gather_on_gpu(operation, slice, all, parts);
}

OwnedTensor ReplicatedTokens::gather_on_host(const char* operation, const TensorView& slice,
                                             const AllTokens& all) {
  const std::span body(static_cast<const std::byte*>(slice.data),
                       static_cast<size_t>(slice.num_bytes()));
  const Agreement agreement = over_.agree({.operation = operation, .body = body});
  OwnedTensor result{.view = all.out, .owner = nullptr};
  run_agreed(over_, [&] {  // slices are contiguous and in the order of the ranks
    const int64_t num_bytes = agreement.offsets.back();
    if (!all.out.given()) {
      result = over_.pool().take(slice.dtype, {all.num_tokens, slice.shape[1]});
    }
    CROSSDOCK_ASSERT(result.view.num_bytes() == num_bytes);
    if (num_bytes > 0) {
      std::memcpy(result.view.data, agreement.bytes.data(), static_cast<size_t>(num_bytes));
    }
  });
  return result;
}

// A dispatcher with one expert on each rank. The ranks have the same number of tokens, so all of
// them need a larger one at the same time.
Dispatcher& ReplicatedTokens::dispatcher_for(int64_t width, int64_t num_tokens) {
  if (to_all_.empty() || to_all_.back()->config().max_rows < num_tokens) {
    const int64_t P = over_.size();
    const DispatchConfig config{
        .num_experts = P,
        .top_k = P,
        .width = width,
        .max_rows = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(num_tokens))),
        .max_routes_per_token = P};
    to_all_.push_back(std::make_unique<Dispatcher>(over_, config, "direct"));
  }
  return *to_all_.back();
}

// Every rank sends its slice to all ranks.
OwnedTensor ReplicatedTokens::gather_on_gpu(const char* operation, const TensorView& slice,
                                            const AllTokens& all, LayerParts& parts) {
  over_.agree({.operation = operation});  // throws what another rank refuses
  DeviceMemory* memory = nullptr;
  Dispatcher* to_all = nullptr;
  OwnedTensor map;
  OwnedTensor weights;
  run_agreed(over_, [&] {
    memory = &parts.memory_of(slice.device);
    to_all = &dispatcher_for(slice.shape[1], all.num_tokens);
    to_all->set_device_options({.stream = parts.stream,
                                .max_sms = parts.device_options.max_sms,
                                .run_ahead = parts.device_options.run_ahead});
    const Shape routes{slice.num_rows(), over_.size()};
    map = memory->take(DType::kBool, routes, parts.stream);
    weights = memory->take(DType::kF32, routes, parts.stream);
    memory->fill(map.view, 1, parts.stream);
    memory->fill(weights.view, 0, parts.stream);
  });
  const Plan plan = to_all->plan(DenseRouting{.map = map.view, .weights = weights.view});
  OwnedTensor rows = to_all->dispatch(plan, {.x = slice}).rows;
  rows.view.shape = {all.num_tokens, slice.shape[1]};
  if (!all.out.given()) return rows;
  run_agreed(over_, [&] { memory->copy(rows.view, all.out, parts.stream); });
  return {.view = all.out, .owner = nullptr};
}

// After a mismatch, not all ranks of the layer's group would join an agreement.
void ReplicatedTokens::refuse(const char* operation, const Group& group, const Error& error) {
  if (group.is_poisoned()) return over_.fail(error);
  if (error.code() == ErrorCode::kMismatch) return;
  refusal_of([&] { over_.agree({.operation = operation, .refusal = &error}); });
}

void check_replicated(const RouterConfig& config, const MoeForwardArgs& args) {
  const bool needs_ids = config.jitter != 0.0 && !args.token_ids.given();
  if (args.x.device.is_cpu() || !needs_ids) return;
  throw Error(ErrorCode::kUnsupported,
              "pass token_ids: with jitter and replicated_over, the layer numbers tokens in host "
              "memory only, got tokens on a GPU");
}

}  // namespace crossdock
