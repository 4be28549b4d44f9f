#include "cli/processes/memory_file.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "crossdock/error.hpp"

namespace crossdock::cli {

MemoryFile::MemoryFile(const std::string& text) : file_(memfd_create("crossdock", MFD_CLOEXEC)) {
  for (size_t done = 0; file_ >= 0 && done < text.size();) {
    const ssize_t count = write(file_, text.data() + done, text.size() - done);
    if (count >= 0) {
      done += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      close(file_);
      file_ = -1;
    }
  }
  if (file_ < 0) {
    throw Error(ErrorCode::kCommunication,
                std::string("cannot write a file in memory: ") + std::strerror(errno));
  }
}

MemoryFile::~MemoryFile() {
  close(file_);
}

std::string MemoryFile::path() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_);
}

}  // namespace crossdock::cli
