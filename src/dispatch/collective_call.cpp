#include "dispatch/collective_call.hpp"

#include <utility>

namespace crossdock {

HostCall::HostCall(const PathContext& context, CallTerms terms)
    : context_(context), terms_(std::move(terms)) {
  context_.group.check();
}

uint64_t HostCall::agree() {
  sequence_ = context_.group
                  .agree({.operation = terms_.operation,
                          .subject = terms_.subject_id(),
                          .config = std::move(terms_.text),
                          .refusal = as_refusal(refusal_)})
                  .sequence;
  return sequence_;
}

void agree_on_chunks(Group& group, const Plan& plan) {
  group.agree({.operation = "dispatch", .subject = plan.id()});
}

}  // namespace crossdock
