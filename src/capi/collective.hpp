#pragma once

#include <optional>

#include "capi/status.hpp"
#include "comm/agreed_failure.hpp"
#include "crossdock/group.hpp"

namespace crossdock::capi {

/// The collective call that arguments belong to.
struct Call {
  Group& group;
  const char* operation;
  uint64_t subject = 0;  // id of the plan that the call uses
};

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
  call.group.agree({.operation = call.operation, .subject = call.subject, .refusal = &*refusal});
}

}  // namespace crossdock::capi
