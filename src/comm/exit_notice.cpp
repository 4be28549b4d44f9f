#include "comm/exit_notice.hpp"

#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

#include "core/process_state.hpp"

namespace crossdock::comm {
namespace {

struct PendingNotices {
  std::mutex mutex;
  std::set<const std::function<void()>*> notices;
};

constinit PerProcess<PendingNotices> pending_notices;

void give_notices() {
  PendingNotices& pending = pending_notices.get();
  const std::lock_guard lock(pending.mutex);
  for (const auto* notice : pending.notices) (*notice)();
}

}  // namespace

ExitNotice::ExitNotice(std::function<void()> notice) : notice_(std::move(notice)) {
  // Registered after the handler that finalises MPI, so it runs before that one.
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(give_notices); });
  PendingNotices& pending = pending_notices.get();
  const std::lock_guard lock(pending.mutex);
  pending.notices.insert(&notice_);
}

ExitNotice::~ExitNotice() {
  PendingNotices& pending = pending_notices.get();
  const std::lock_guard lock(pending.mutex);
  pending.notices.erase(&notice_);
}

}  // namespace crossdock::comm
