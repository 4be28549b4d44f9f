#pragma once

#include <string>

namespace crossdock::cli {

/// A file in memory that other processes of this machine and user can read by its path, for as long
/// as this object exists. However this process ends, nothing is left behind.
class MemoryFile {
 public:
  /// Throws Error.
  explicit MemoryFile(const std::string& text);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const;

 private:
  int file_;
};

}  // namespace crossdock::cli
