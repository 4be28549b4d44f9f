#pragma once

#include <functional>
#include <optional>

#include "capi/status.hpp"
#include "comm/refusal.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"

namespace crossdock::capi {

/// The collective call that arguments belong to.
struct Call {
  Group& group;
  const char* operation;
  uint64_t subject = 0;  // id of the plan that the call uses
  /// How its ranks agree; by default in the group.
  std::function<void(const Proposal&)> agree = nullptr;
};

/// A call of a dispatcher or a layer, whose ranks may run ahead if the tensors are on GPUs. `plan`:
/// the one it uses; if there is none, ranks run ahead if they did so before.
template <typename Caller>
Call call_of(Caller& caller, Group& group, const char* operation, const Plan& plan) {
  const Device device = plan.valid() ? plan.device() : Device{.kind = DeviceKind::kCuda};
  return {.group = group,
          .operation = operation,
          .subject = plan.valid() ? plan.id() : 0,
          .agree = [&caller, device](const Proposal& proposal) { caller.agree(proposal, device); }};
}

/// Converts the arguments of a collective call. Returns why that is impossible, if so.
template <typename Convert>
std::optional<Error> conversion_refusal(const Convert& body) {
  return refusal_of([&] {
    check_not_refused();
    body();
  });
}

/// Converts the arguments of a collective call. If they cannot be converted, this rank refuses the
/// call, so all ranks return the same error instead of waiting for this one.
template <typename Convert>
void convert(const Call& call, const Convert& body) {
  const std::optional<Error> refusal = conversion_refusal(body);
  if (!refusal) return;
  const Proposal proposal{
      .operation = call.operation, .subject = call.subject, .refusal = &*refusal};
  if (call.agree) {
    call.agree(proposal);
  } else {
    call.group.agree(proposal);
  }
}

}  // namespace crossdock::capi
