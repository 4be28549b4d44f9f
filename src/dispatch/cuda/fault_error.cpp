#include "dispatch/cuda/fault_error.hpp"

#include <bit>
#include <cmath>
#include <cstdlib>

#include "core/check.hpp"

namespace crossdock::cuda {
namespace {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kPlan:
      return "plan";
    case Operation::kDispatch:
      return "dispatch";
    case Operation::kCombine:
      return "combine";
    case Operation::kCombineUnweighted:
      return "combine_unweighted";
    case Operation::kDispatchBackward:
      return "dispatch_backward";
    case Operation::kCombineBackward:
      return "combine_backward";
    case Operation::kRouteValues:
      return "collect_routes";
  }
  return "";
}

std::string print_weight(int64_t bits) {
  const float weight = std::bit_cast<float>(static_cast<uint32_t>(bits));
  if (std::isnan(weight)) return "NaN";
  return weight > 0 ? "Infinity" : "-Infinity";
}

// With too few hardware queues, a rank's work may be queued behind a kernel that waits for it.
std::string queue_hint() {
  if (std::getenv("CUDA_DEVICE_MAX_CONNECTIONS") != nullptr) return "";
  return " Ranks that share a GPU need a hardware queue each: set CUDA_DEVICE_MAX_CONNECTIONS=32";
}

std::string refusal_text(const Fault& fault, FaultCode code, const FaultReader& reader) {
  const std::string token = concat("rank ", fault.culprit, ": token ", token_of(fault));
  if (code == FaultCode::kTooManyRoutes) {
    return concat(token, ": ", fault.value, " experts are set, at most max_routes_per_token (",
                  slot_of(fault), ") may be");
  }
  const std::string where = concat(token, ", slot ", slot_of(fault), ": ");
  if (code == FaultCode::kExpertRange) {
    return concat(where, "expert id ", fault.value, " must be in [0, ", reader.num_experts,
                  "), or -1 for no route");
  }
  if (code == FaultCode::kExpertRepeated) {
    return concat(where, "expert id ", fault.value,
                  " is already in an earlier slot; a token may name an expert only once");
  }
  return concat(where, "weight must be finite, got ", print_weight(fault.value),
                "; nonfinite = propagate allows it");
}

}  // namespace

Operation operation_of(std::string_view name) {
  for (const Operation operation :
       {Operation::kPlan, Operation::kDispatch, Operation::kCombine, Operation::kCombineUnweighted,
        Operation::kDispatchBackward, Operation::kCombineBackward, Operation::kRouteValues}) {
    if (name == name_of(operation)) return operation;
  }
  return Operation::kPlan;
}

Error to_error(const Fault& fault, const FaultReader& reader) {
  const auto code = static_cast<FaultCode>(fault.code);
  const ErrorContext context{.culprit = fault.culprit,
                             .sequence = fault.epoch,
                             .operation = name_of(static_cast<Operation>(fault.operation))};
  const std::string me = concat("rank ", reader.rank, " of ", reader.P);
  switch (code) {
    case FaultCode::kTimeout:
      return {ErrorCode::kTimeout,
              concat(me, ": its GPU waited ", static_cast<double>(reader.deadline_ns) * 1e-9,
                     " s for rank ", fault.culprit, " (", context.operation, ", wait ", fault.epoch,
                     "); is it making the same calls?", reader.shares_gpu ? queue_hint() : ""),
              context};
    case FaultCode::kPeerFailed:
      return {ErrorCode::kPeerFailed,
              concat(me, ": rank ", fault.culprit, " has failed (", context.operation, ", wait ",
                     fault.epoch, ")"),
              context};
    case FaultCode::kOtherCall:
    case FaultCode::kStopped:
      return {ErrorCode::kMismatch,
              concat(me, ": the ranks have not queued the same calls (", context.operation,
                     ", wait ", fault.epoch, ")"),
              context};
    case FaultCode::kTooManyRows:
      return {ErrorCode::kCapacity,
              concat("rank ", fault.culprit, " would receive ", fault.route,
                     " rows, more than max_rows (", reader.max_rows,
                     "); max_rows must be at least ", fault.route),
              context};
    default:
      return {ErrorCode::kInvalidArgument, refusal_text(fault, code, reader), context};
  }
}

}  // namespace crossdock::cuda
