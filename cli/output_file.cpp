#include "cli/output_file.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

constexpr mode_t kNewFileMode = 0666;
constexpr std::chrono::milliseconds kPatience{10'000};  // with the reader of a pipe

[[noreturn]] void throw_failure(const std::string& what, const std::string& file, int failure) {
  std::string reason = std::strerror(failure);
  if (failure == ENXIO) reason = "no process has opened the pipe to read it";
  if (failure == ETIMEDOUT) reason = "the process that has opened the pipe does not read it";
  throw Error(ErrorCode::kInvalidArgument, "cannot write " + what + " to " + file + ": " + reason);
}

// Where the bytes go.
struct Target {
  std::string path;  // symbolic links resolved if it is replaced
  bool is_in_place;  // otherwise a new file replaces it
  bool exists;       // false also for a dangling link
  mode_t mode = 0;   // of the existing file
  int output = -1;   // the descriptor if it is this process's standard output or error
};

// The standard output or error of this process if the file is one of them, otherwise -1.
int output_that_is(const struct stat& file) {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat other {};
    if (fstat(descriptor, &other) == 0 && other.st_dev == file.st_dev &&
        other.st_ino == file.st_ino) {
      return descriptor;
    }
  }
  return -1;
}

Target find_target(const std::string& file) {
  struct stat found {};
  if (stat(file.c_str(), &found) != 0) {
    struct stat link {};
    const bool is_link = lstat(file.c_str(), &link) == 0 && S_ISLNK(link.st_mode);
    return {.path = file, .is_in_place = is_link, .exists = false};
  }
  const int output = output_that_is(found);
  if (!S_ISREG(found.st_mode) || output >= 0) {
    return {
        .path = file, .is_in_place = true, .exists = true, .mode = found.st_mode, .output = output};
  }
  std::error_code failure;
  const std::filesystem::path path = std::filesystem::canonical(file, failure);
  return {.path = failure ? file : path.string(),
          .is_in_place = false,
          .exists = true,
          .mode = found.st_mode};
}

// Returns 0 or an errno: ETIMEDOUT if a pipe's reader has read nothing for a while.
int write_all(int descriptor, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno == EAGAIN) {
      pollfd waiting{.fd = descriptor, .events = POLLOUT, .revents = 0};
      if (poll(&waiting, 1, static_cast<int>(kPatience.count())) == 0) return ETIMEDOUT;
    } else if (count < 0 && errno != EINTR) {
      return errno;
    }
    if (count > 0) done += static_cast<size_t>(count);
  }
  return 0;
}

// Opens it for writing. Waits a while for the reader of a pipe, who may start later than this
// program: ENXIO if none comes. Returns -1 with errno if it fails.
int open_target(const Target& target) {
  // O_CREAT only for new files: it fails for a pipe of another user.
  const int flags =
      O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC | O_NONBLOCK | (target.exists ? 0 : O_CREAT);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  int descriptor = -1;
  while ((descriptor = open(target.path.c_str(), flags, kNewFileMode)) < 0 && errno == ENXIO &&
         S_ISFIFO(target.mode) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return descriptor;
}

// A pipe without a reader is an error, not a signal.
int write_in_place(const Target& target, const std::string& text) {
  // If this process's output is a regular file, a second descriptor would have its own position,
  // and later output would overwrite the text.
  const bool is_output = target.output >= 0;
  const int descriptor = is_output ? target.output : open_target(target);
  if (descriptor < 0) return errno;
  const auto old_handler = std::signal(SIGPIPE, SIG_IGN);
  const int failure = write_all(descriptor, text);
  std::signal(SIGPIPE, old_handler);
  return !is_output && close(descriptor) != 0 && failure == 0 ? errno : failure;
}

// The folder in which writing to a dangling symbolic link creates a file.
std::string folder_of_new_file(const std::filesystem::path& link) {
  std::error_code failure;
  const auto folder = std::filesystem::read_symlink(link, failure).parent_path();
  const std::string path = (link.parent_path() / folder).string();
  return path.empty() ? "." : path;
}

// A new, empty file with a unique name in the folder of the target.
class TemporaryFile {
 public:
  explicit TemporaryFile(const Target& target)
      : name_((std::filesystem::path(target.path).parent_path() / ".crossdock-XXXXXX").string()),
        descriptor_(mkostemp(name_.data(), O_CLOEXEC)) {
    if (descriptor_ < 0) {
      failure_ = errno;
      return;
    }
    const mode_t mask = umask(0);
    umask(mask);
    fchmod(descriptor_, target.exists ? target.mode & 07777 : kNewFileMode & ~mask);
  }
  ~TemporaryFile() {
    if (descriptor_ < 0) return;
    close(descriptor_);
    if (!is_renamed_) std::remove(name_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int failure() const { return failure_; }
  // Returns 0 or an errno.
  int write_and_rename(const std::string& text, const std::string& path) {
    if (const int failure = write_all(descriptor_, text); failure != 0) return failure;
    is_renamed_ = std::rename(name_.c_str(), path.c_str()) == 0;
    return is_renamed_ ? 0 : errno;
  }

 private:
  std::string name_;
  int descriptor_;
  int failure_ = 0;
  bool is_renamed_ = false;
};

}  // namespace

void check_output_file(const std::string& what, const std::string& file) {
  const Target target = find_target(file);
  if (S_ISDIR(target.mode)) throw_failure(what, file, EISDIR);
  if (target.is_in_place) {
    const std::string needed = target.exists ? file : folder_of_new_file(file);
    if (access(needed.c_str(), W_OK) != 0) throw_failure(what, file, errno);
    return;
  }
  const TemporaryFile temporary(target);
  if (temporary.failure() != 0) throw_failure(what, file, temporary.failure());
}

void write_file(const std::string& what, const std::string& file, const std::string& text) {
  const Target target = find_target(file);
  int failure = 0;
  if (target.is_in_place) {
    failure = write_in_place(target, text);
  } else {
    TemporaryFile temporary(target);
    failure = temporary.failure();
    if (failure == 0) failure = temporary.write_and_rename(text, target.path);
  }
  if (failure != 0) throw_failure(what, file, failure);
}

}  // namespace crossdock::cli
