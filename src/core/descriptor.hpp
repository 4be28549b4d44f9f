#pragma once

#include <unistd.h>

#include <csignal>
#include <utility>

namespace crossdock {

/// Moves a descriptor that a system call has just returned to a number above those of standard
/// input, output and error. If the program was started without these, what it prints would
/// otherwise go into the descriptor. Returns the new number; -1, with errno, if the call failed or
/// there is no free number.
int above_standard(int number);

/// While one exists, the numbers of standard input, output and error are in use: another library
/// does not get them for what it opens.
class StandardDescriptorGuard {
 public:
  StandardDescriptorGuard();
  ~StandardDescriptorGuard();
  StandardDescriptorGuard(const StandardDescriptorGuard&) = delete;
  StandardDescriptorGuard& operator=(const StandardDescriptorGuard&) = delete;
};

/// A file descriptor above those of standard input, output and error, closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(above_standard(number)) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_ = -1;
};

/// While one exists, a write by this thread beyond the file size limit (ulimit -f) or to a pipe
/// without a reader fails with EFBIG or EPIPE instead of raising a signal that ends the process.
/// The process's signal handlers are left alone. The destructor preserves errno.
class WriteSignalBlock {
 public:
  WriteSignalBlock();
  ~WriteSignalBlock();
  WriteSignalBlock(const WriteSignalBlock&) = delete;
  WriteSignalBlock& operator=(const WriteSignalBlock&) = delete;

 private:
  sigset_t old_mask_{};
  sigset_t own_signals_{};  // which of the two signals were not pending before
};

}  // namespace crossdock
