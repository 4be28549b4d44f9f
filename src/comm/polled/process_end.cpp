#include "comm/polled/process_end.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/descriptor.hpp"
#include "core/hash.hpp"
#include "core/process.hpp"

namespace crossdock::comm {
namespace {

// The beginning of a file of /proc; empty if it cannot be read.
std::string read_proc_file(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> text{};
  const ssize_t length = read(file.number(), text.data(), text.size());
  return length > 0 ? std::string(text.data(), static_cast<size_t>(length)) : std::string();
}

struct ProcessStat {
  char state = 'X';  // 'X': no such process
  uint64_t start_ticks = 0;
};

// /proc/<pid>/stat: pid (name) state ... with the start time as field 22. The name may contain
// anything, so fields are counted from the last parenthesis.
ProcessStat read_stat(int32_t pid) {
  const std::string text = read_proc_file(concat("/proc/", pid, "/stat"));
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  ProcessStat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start_ticks;
  return stat;
}

std::string read_boot_id() {
  const std::string text = read_proc_file("/proc/sys/kernel/random/boot_id");
  return text.substr(0, text.find('\n'));
}

std::string pid_namespace() {
  char target[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", target, sizeof target - 1);
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : std::string();
}

}  // namespace

uint64_t identify_this_machine() {
  const std::string boot_id = read_boot_id();
  return boot_id.empty() ? 0 : hash_bytes(boot_id);
}

ProcessIdentity identify_this_process() {
  const std::string boot_id = read_boot_id();
  const int32_t pid = getpid();
  return {.pid_space = boot_id.empty() ? 0 : hash_bytes(boot_id + pid_namespace()),
          .start_ticks = read_stat(pid).start_ticks,
          .pid = pid,
          .reserved = 0};
}

bool is_visible(const ProcessIdentity& process, const ProcessIdentity& self) {
  return self.pid_space != 0 && process.pid_space == self.pid_space && process.start_ticks != 0 &&
         read_stat(process.pid).start_ticks == process.start_ticks;
}

bool has_ended(const ProcessIdentity& process) {
  const ProcessStat stat = read_stat(process.pid);
  const bool is_zombie = stat.state == 'Z' || stat.state == 'X';
  return is_zombie || stat.start_ticks != process.start_ticks;
}

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
