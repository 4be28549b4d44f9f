#include "cli/processes/interruption.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <utility>

#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

constexpr std::array kSignals = {SIGHUP, SIGINT, SIGTERM};
constexpr char kEnd = 0;  // not a signal: the object ends

std::array<int, 2> pipe_ends{-1, -1};
std::array<struct sigaction, kSignals.size()> old_actions;

void restore_actions() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &old_actions[i], nullptr);
}

// Wakes the watcher. From now on, signals have their usual effect.
void on_signal(int signal) {
  const int error = errno;
  restore_actions();
  const char byte = static_cast<char>(signal);
  [[maybe_unused]] const ssize_t written = write(pipe_ends[1], &byte, 1);
  errno = error;
}

}  // namespace

Interruption::Interruption(std::function<void()> print) : print_(std::move(print)) {
  if (pipe2(pipe_ends.data(), O_CLOEXEC) != 0) {
    throw Error(ErrorCode::kCommunication, "cannot create a pipe");
  }
  watcher_ = std::thread([this] { watch(); });
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &old_actions[i]);
    if (old_actions[i].sa_handler == SIG_IGN) continue;  // as under nohup
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(kSignals[i], &action, nullptr);
  }
}

Interruption::~Interruption() {
  restore_actions();
  [[maybe_unused]] const ssize_t written = write(pipe_ends[1], &kEnd, 1);
  watcher_.join();
  for (int& end : pipe_ends) close(std::exchange(end, -1));
}

void Interruption::watch() {
  char signal = kEnd;
  while (read(pipe_ends[0], &signal, 1) < 0 && errno == EINTR) {
  }
  if (signal == kEnd) return;
  // Held until the process ends: nothing changes any more, and nothing else is printed.
  const std::lock_guard lock(mutex_);
  try {
    print_();
  } catch (const std::exception&) {
    // What could be printed has been.
  }
  std::cout.flush();
  ::signal(signal, SIG_DFL);
  kill(getpid(), signal);
  pause();
}

void end_by_signal(int signal) {
  raise(signal);
  for (;;) pause();  // until the watcher has printed
}

}  // namespace crossdock::cli
