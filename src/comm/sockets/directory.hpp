#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/sockets/blob.hpp"
#include "comm/sockets/shared_file.hpp"
#include "core/fork_generation.hpp"

namespace crossdock::comm {

/// A page in a process's memory file that says where its mailboxes are: the descriptor of the
/// memory file of each channel. The ranks of a node thus find each other's mailboxes without a
/// message, also after a failure.
struct DirectoryPage {
  static constexpr uint32_t kMagic = 0x44534443;  // "CDSD": Crossdock sockets, directory
  static constexpr size_t kMaxChannels = 1024;
  struct Entry {
    std::atomic<uint64_t> channel;  // 0: free; written after the descriptor
    std::atomic<int32_t> descriptor;
  };

  uint32_t magic;
  uint32_t version;
  std::atomic<uint32_t> is_closed;  // its process makes no more communicators
  Secret secret;                    // as in the blob: shows that it is the page of that process
  std::array<Entry, kMaxChannels> entries;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// This process's directory.
class Directory {
 public:
  explicit Directory(const Secret& secret);
  /// Tells the others that nothing more will be published; not in a forked child.
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  int descriptor() const { return file_->descriptor(); }

  /// Makes the mailboxes of a channel known. Throws kCapacity if too many channels are open.
  void publish(uint64_t channel, int descriptor);
  void withdraw(uint64_t channel);

 private:
  DirectoryPage& page() const;

  const std::unique_ptr<SharedFile> file_;
  const uint64_t generation_ = fork_generation();
  std::mutex mutex_;  // for writing
};

/// The directory of another process on this node.
class PeerDirectory {
 public:
  /// Null, with the reason in `why`, if the memory of that process cannot be opened, for example
  /// because it runs in another container or as another user.
  static std::unique_ptr<PeerDirectory> open(const SocketsBlob& blob, std::string& why);

  /// The descriptor of the mailboxes of a channel, in that process; nullopt: not known yet.
  std::optional<int> find(uint64_t channel) const;
  /// Whether that process has given up or has closed all its communicators.
  bool is_closed() const;

 private:
  explicit PeerDirectory(std::unique_ptr<SharedFile> file) : file_(std::move(file)) {}
  const std::unique_ptr<SharedFile> file_;
};

}  // namespace crossdock::comm
