#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace crossdock::comm {

/// A memory file and its mapping. The memory disappears with the last process that has it open,
/// however it ends.
class SharedFile {
 public:
  /// A new file of zeros, whose memory is reserved now: later stores cannot fail for lack of
  /// memory. Throws kCommunication if there is not enough.
  static std::unique_ptr<SharedFile> create(const char* name, int64_t num_bytes);
  /// The file that process `pid` has open as `descriptor`. Null, with the reason in `why`, if it
  /// cannot be opened or has a different size.
  static std::unique_ptr<SharedFile> open(int pid, int descriptor, int64_t num_bytes,
                                          std::string& why);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  std::byte* data() const { return data_; }
  /// -1 for a file of another process.
  int descriptor() const { return descriptor_; }

 private:
  SharedFile(int descriptor, std::byte* data, int64_t num_bytes)
      : descriptor_(descriptor), data_(data), num_bytes_(static_cast<size_t>(num_bytes)) {}

  const int descriptor_;
  std::byte* const data_;
  const size_t num_bytes_;
};

}  // namespace crossdock::comm
