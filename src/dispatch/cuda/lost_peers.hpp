#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/cuda/peer_channel.hpp"

namespace crossdock::cuda {

/// Ends the waits of this rank's kernels when a peer's process has ended, because the host may be
/// waiting for the stream of those kernels. Thread-safe.
class LostPeers {
 public:
  /// Adds a channel whose waits must end.
  void add(std::shared_ptr<PeerChannel> channel) {
    const std::lock_guard lock(mutex_);
    if (lost_) channel->abandon(lost_);
    channels_.push_back(std::move(channel));
  }

  /// The process of the peer in this slot has ended.
  void note(int slot) {
    const std::lock_guard lock(mutex_);
    if (!lost_) lost_ = slot;
    for (const std::shared_ptr<PeerChannel>& channel : channels_) channel->abandon(lost_);
  }

  /// Keeps the registration that calls note; see PeerMemory::watch_owners.
  void set_watch(std::shared_ptr<const void> watch) { watch_ = std::move(watch); }

 private:
  std::mutex mutex_;
  std::optional<int> lost_;
  std::vector<std::shared_ptr<PeerChannel>> channels_;
  std::shared_ptr<const void> watch_;  // destroyed first
};

}  // namespace crossdock::cuda
