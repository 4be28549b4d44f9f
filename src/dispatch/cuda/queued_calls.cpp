#include "dispatch/cuda/queued_calls.hpp"

#include "comm/queued_calls_slot.hpp"
#include "dispatch/cuda/fault_error.hpp"

namespace crossdock::cuda {

std::shared_ptr<QueuedCalls> QueuedCalls::of(Group& group) {
  std::weak_ptr<QueuedCalls>& slot = comm::queued_calls_of(group);
  std::shared_ptr<QueuedCalls> shared = slot.lock();
  if (!shared) {
    shared = std::make_shared<QueuedCalls>(group);
    slot = shared;
  }
  return shared;
}

void QueuedCalls::recover(CallQueue& queue, const std::optional<CallAccount>& own) {
  const uint32_t number = own ? queue.note_refused(own->call) : 0;
  stop(&queue, number, own ? operation_of(own->call.operation) : Operation::kPlan);
  std::optional<CallAccount> account;
  for (const CallQueue* one : queues_) {
    if (!account) account = one->account(own, number);
  }
  const Error error = meet(account ? account : own);
  for (CallQueue* one : queues_) one->resume(error.context().sequence);
  throw error;
}

std::optional<Error> QueuedCalls::settle() {
  stop(nullptr, 0, Operation::kPlan);
  std::optional<CallAccount> account;
  for (const CallQueue* one : queues_) {
    if (!account) account = one->account(std::nullopt, 0);
  }
  const Error error = meet(account);
  for (CallQueue* one : queues_) one->resume(error.context().sequence);
  if (error.code() == ErrorCode::kInternal) return std::nullopt;
  return error;
}

// Memory that the calls use is not reused before the devices of all ranks have finished: each rank
// waits for its own before the hosts meet.
void QueuedCalls::stop(const CallQueue* refusing, uint32_t refused, Operation operation) {
  for (CallQueue* one : queues_) one->stop(one == refusing ? refused : 0, operation);
  for (CallQueue* one : queues_) one->await_stop();
}

Error QueuedCalls::meet(const std::optional<CallAccount>& account) {
  try {
    return explain_halt(group_, account);
  } catch (const Error&) {
    if (group_.is_poisoned()) throw;
  }
  // Other ranks were meeting in another call, which has failed. They come here now.
  return explain_halt(group_, account);
}

}  // namespace crossdock::cuda
