#include "dispatch/cuda/queued_calls.hpp"

#include "comm/queued_calls_slot.hpp"
#include "comm/rendezvous.hpp"
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

// Each rank stops queueing and tells its peers' kernels so. Once all hosts have met, no kernel
// waits for anything that is still to come, and the streams of all ranks drain. The hosts then
// compare what their devices have found, and resume. Memory that the calls use is not reused before
// the devices of all ranks have finished with it.
void QueuedCalls::recover(CallQueue& queue, const std::optional<RefusedCall>& refused) {
  std::optional<CallAccount> own;
  if (refused) own = refused->account;
  const uint32_t number = own ? queue.note_refused(own->call) : 0;
  const Operation operation = own ? operation_of(own->call.operation) : Operation::kPlan;
  for (CallQueue* one : queues_) {
    const bool refuses = own && one == &queue;
    one->stop(refuses ? refused->lane : nullptr, refuses ? number : 0, operation);
  }
  meet_hosts();
  for (CallQueue* one : queues_) one->await_stop();
  std::optional<CallAccount> account;
  for (const CallQueue* one : queues_) {
    const bool has_refused = one == &queue;
    if (!account) account = one->account(has_refused ? own : std::nullopt, number);
  }
  const Error error = explain_halt(group_, account);
  for (CallQueue* one : queues_) one->resume(error.context().sequence);
  throw error;
}

// Ranks that are meeting in another call get an error there, and come here when they find out why.
void QueuedCalls::meet_hosts() {
  while (true) {
    try {
      group_.agree({.operation = comm::kHaltOperation});
      return;
    } catch (const Error&) {
      if (group_.is_poisoned()) throw;
    }
  }
}

}  // namespace crossdock::cuda
