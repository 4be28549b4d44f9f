#include "cli/standard_streams.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

namespace crossdock::cli {

void open_missing_streams() {
  for (int number = STDIN_FILENO; number <= STDERR_FILENO; ++number) {
    if (fcntl(number, F_GETFD) >= 0) continue;
    // The lowest free number; the wrong direction makes its use fail.
    open("/dev/null", number == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

bool flush_output() {
  return std::cout.flush() && std::fflush(stdout) == 0;
}

}  // namespace crossdock::cli
