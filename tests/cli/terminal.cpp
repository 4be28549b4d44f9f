#include "cli/terminal.hpp"

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>

namespace crossdock::cli {
namespace {

constexpr std::chrono::seconds kLimit{120};

// A terminal whose only features are the carriage return and "erase to the end of the line".
class Emulator {
 public:
  Emulator(int columns, Screen& screen) : columns_(static_cast<size_t>(columns)), screen_(screen) {
    screen.lines.emplace_back();
  }

  void show(const std::string& bytes) {
    for (size_t i = 0; i < bytes.size();) {
      if (bytes[i] == '\x1b') {
        const size_t end = bytes.find_first_of("mK", i);
        if (end == std::string::npos) break;
        if (bytes[end] == 'K') line_.resize(column_);
        i = end + 1;
      } else {
        size_t length = 1;  // of the UTF-8 character
        while (i + length < bytes.size() && (bytes[i + length] & 0xc0) == 0x80) ++length;
        put(bytes.substr(i, length));
        i += length;
      }
    }
    finish_line();
    if (screen_.lines.back().empty()) screen_.lines.pop_back();
  }

 private:
  void put(const std::string& character) {
    if (character == "\r") {
      column_ = 0;
    } else if (character == "\n") {
      finish_line();
      screen_.lines.emplace_back();
      line_.clear();
      column_ = 0;
    } else {
      if (column_ == columns_) screen_.has_wrapped = true;
      if (column_ >= line_.size()) line_.resize(column_ + 1, " ");
      line_[column_++] = character;
    }
  }

  void finish_line() {
    std::string& text = screen_.lines.back();
    text.clear();
    for (const std::string& character : line_) text += character;
  }

  size_t columns_;
  Screen& screen_;
  std::vector<std::string> line_;  // its characters
  size_t column_ = 0;
};

// Reads all output until the program closes the terminal; returns false past the time limit.
bool read_all(int terminal, Typing& typing, std::string& bytes) {
  const auto end = std::chrono::steady_clock::now() + kLimit;
  std::array<char, 4096> piece{};
  while (std::chrono::steady_clock::now() < end) {
    const std::string typed = typing ? typing(bytes) : "";
    if (!typed.empty()) {
      typing = nullptr;
      if (write(terminal, typed.data(), typed.size()) < 0) return false;
    }
    pollfd waiting{.fd = terminal, .events = POLLIN, .revents = 0};
    if (poll(&waiting, 1, 100) <= 0) continue;
    const ssize_t count = read(terminal, piece.data(), piece.size());
    if (count <= 0) return true;  // EIO: every process has closed it
    bytes.append(piece.data(), static_cast<size_t>(count));
  }
  return false;
}

}  // namespace

std::string Screen::text() const {
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  return all;
}

Screen run_in_terminal(const std::string& line, int columns, Typing typing) {
  winsize size{};
  size.ws_col = static_cast<unsigned short>(columns);
  size.ws_row = 24;
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, &size);
  if (pid == 0) {
    execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
    _exit(127);
  }
  Screen screen;
  if (pid < 0) return screen;
  if (!read_all(terminal, typing, screen.bytes)) kill(-pid, SIGKILL);  // forkpty made a session
  close(terminal);
  int status = 0;
  waitpid(pid, &status, 0);
  screen.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  screen.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  Emulator(columns, screen).show(screen.bytes);
  return screen;
}

}  // namespace crossdock::cli
