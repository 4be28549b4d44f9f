#include "dispatch/cuda/run_ahead/recovery.hpp"

#include "comm/attachment.hpp"
#include "comm/rendezvous.hpp"
#include "dispatch/cuda/fault_error.hpp"
#include "dispatch/cuda/rank_agreement.hpp"

namespace crossdock::cuda {

std::shared_ptr<Recovery> Recovery::of(Group& group) {
  std::weak_ptr<void>& attachment = comm::attachment_of(group);
  auto shared = std::static_pointer_cast<Recovery>(attachment.lock());
  if (!shared) {
    shared = std::make_shared<Recovery>(group);
    attachment = shared;
  }
  return shared;
}

// Each rank stops queueing and tells its peers' kernels so. Once all hosts have met, no kernel
// waits for anything that is still to come, and the streams of all ranks drain. The hosts then
// compare what their devices have found, and resume. Memory that the calls use is not reused before
// the devices of all ranks have finished with it.
void Recovery::recover(RankAgreement& dispatcher, const std::optional<RefusedCall>& refused) {
  std::optional<CallAccount> own;
  if (refused) own = refused->account;
  const uint32_t number = own ? dispatcher.note_refused(own->call) : 0;
  const Operation operation = own ? operation_of(own->call.operation) : Operation::kPlan;
  for (RankAgreement* one : dispatchers_) {
    const bool refuses = own && one == &dispatcher;
    one->stop(refuses ? refused->lane : nullptr, refuses ? number : 0, operation);
  }
  meet_hosts();
  for (RankAgreement* one : dispatchers_) one->await_stop();
  std::optional<CallAccount> account;
  for (const RankAgreement* one : dispatchers_) {
    const bool has_refused = one == &dispatcher;
    if (!account) account = one->account(has_refused ? own : std::nullopt, number);
  }
  const Error error = explain_halt(group_, account);
  for (RankAgreement* one : dispatchers_) one->resume(error.context().sequence);
  throw error;
}

// Ranks that are meeting in another call get an error there, and come here when they find out why.
void Recovery::meet_hosts() {
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
