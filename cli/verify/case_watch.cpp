#include "cli/verify/case_watch.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace crossdock::cli {
namespace {

constexpr std::array kCrashes = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// Formatted before the case begins, as a handler of signals must not format.
struct Note {
  std::array<char, 1024> text{};
  size_t size = 0;
};
std::array<Note, 2> notes;
std::atomic<size_t> current_note{0};

void write_note() {
  const Note& note = notes[current_note];
  for (size_t done = 0; done < note.size;) {
    const ssize_t count = write(STDERR_FILENO, note.text.data() + done, note.size - done);
    if (count <= 0) return;
    done += static_cast<size_t>(count);
  }
}

// The default action, restored by SA_RESETHAND, follows when the handler returns.
void on_crash(int signal) {
  write_note();
  raise(signal);
}

CaseWatch::Advice advice_of_run;

void set_note(int64_t number) {
  const size_t next = 1 - current_note;
  const int size = std::snprintf(
      notes[next].text.data(), notes[next].text.size(),
      "crossdock verify: did not survive case %lld; reproduce it with --random 1 "
      "--seed %llu --first %lld%s\n",
      static_cast<long long>(number), static_cast<unsigned long long>(advice_of_run.seed),
      static_cast<long long>(number), advice_of_run.options.c_str());
  notes[next].size = std::min(static_cast<size_t>(size), notes[next].text.size() - 1);
  current_note = next;
}

}  // namespace

CaseWatch::CaseWatch(Advice advice, std::chrono::seconds limit) {
  advice_of_run = std::move(advice);
  for (const int crash : kCrashes) {
    struct sigaction old {};
    sigaction(crash, nullptr, &old);
    if (old.sa_handler != SIG_DFL) continue;  // a sanitizer's
    struct sigaction action {};
    action.sa_handler = on_crash;
    action.sa_flags = SA_RESETHAND | SA_NODEFER;
    sigaction(crash, &action, nullptr);
  }
  watcher_ = std::thread([this, limit] { watch(limit); });
}

CaseWatch::~CaseWatch() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_one();
  watcher_.join();
  for (const int crash : kCrashes) {
    struct sigaction now {};
    sigaction(crash, nullptr, &now);
    if (now.sa_handler == on_crash) signal(crash, SIG_DFL);
  }
}

void CaseWatch::begin(int64_t number) {
  const std::lock_guard lock(mutex_);
  set_note(number);
  ++num_changes_;
  is_running_ = true;
}

void CaseWatch::pause() {
  const std::lock_guard lock(mutex_);
  ++num_changes_;
  is_running_ = false;
}

void CaseWatch::watch(std::chrono::seconds limit) {
  std::unique_lock lock(mutex_);
  int64_t seen = num_changes_;
  while (!changed_.wait_for(lock, limit, [this] { return is_over_; })) {
    if (is_running_ && num_changes_ == seen) {
      write_note();
      std::_Exit(EXIT_FAILURE);
    }
    seen = num_changes_;
  }
}

}  // namespace crossdock::cli
