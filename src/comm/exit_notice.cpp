#include "comm/exit_notice.hpp"

#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

namespace crossdock::comm {
namespace {

// Never freed: used while the process exits.
struct PendingNotices {
  std::mutex mutex;
  std::set<const std::function<void()>*> notices;
};

PendingNotices& pending_notices() {
  static auto* pending = new PendingNotices;
  return *pending;
}

void give_notices() {
  const std::lock_guard lock(pending_notices().mutex);
  for (const auto* notice : pending_notices().notices) (*notice)();
}

}  // namespace

ExitNotice::ExitNotice(std::function<void()> notice) : notice_(std::move(notice)) {
  // Registered after the handler that finalises MPI, so it runs before that one.
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(give_notices); });
  const std::lock_guard lock(pending_notices().mutex);
  pending_notices().notices.insert(&notice_);
}

ExitNotice::~ExitNotice() {
  const std::lock_guard lock(pending_notices().mutex);
  pending_notices().notices.erase(&notice_);
}

}  // namespace crossdock::comm
