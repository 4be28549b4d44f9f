#include "comm/memory/shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/check.hpp"
#include "core/descriptor.hpp"

namespace crossdock::comm {
namespace {

std::byte* map(int descriptor, int64_t num_bytes) {
  void* address = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                       descriptor, 0);
  return address == MAP_FAILED ? nullptr : static_cast<std::byte*>(address);
}

}  // namespace

std::unique_ptr<SharedFile> SharedFile::create(const char* name, int64_t num_bytes) {
  const int descriptor = above_standard(memfd_create(name, MFD_CLOEXEC));
  const auto give_up = [&](int error) {
    if (descriptor >= 0) ::close(descriptor);
    throw Error(ErrorCode::kCommunication,
                concat("cannot make a memory file of ", num_bytes, " bytes for messages: ",
                       std::strerror(error), "; memfd_create must be allowed and memory free"));
  };
  if (descriptor < 0) give_up(errno);
  int failure = 0;
  {
    const WriteSignalBlock no_signals;
    failure = posix_fallocate(descriptor, 0, num_bytes);
  }
  if (failure != 0) give_up(failure);
  std::byte* data = map(descriptor, num_bytes);
  if (data == nullptr) give_up(errno);
  return std::unique_ptr<SharedFile>(new SharedFile(descriptor, data, num_bytes));
}

std::unique_ptr<SharedFile> SharedFile::open(int pid, int descriptor, int64_t num_bytes,
                                             std::string& why) {
  const std::string path = concat("/proc/", pid, "/fd/", descriptor);
  const int opened = above_standard(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (opened < 0) {
    why = concat("cannot open ", path, ": ", std::strerror(errno));
    return nullptr;
  }
  struct stat status {};
  std::byte* data = nullptr;
  if (fstat(opened, &status) != 0 || status.st_size != num_bytes) {
    why = concat(path, " is not the memory file of this job");
  } else if ((data = map(opened, num_bytes)) == nullptr) {
    why = concat("cannot map ", path, ": ", std::strerror(errno));
  }
  ::close(opened);  // the mapping keeps the memory
  if (data == nullptr) return nullptr;
  return std::unique_ptr<SharedFile>(new SharedFile(/*descriptor=*/-1, data, num_bytes));
}

SharedFile::~SharedFile() {
  munmap(data_, num_bytes_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace crossdock::comm
