#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "dispatch/cuda/tensors.hpp"

namespace crossdock {

/// Blocks streams and threads until it is opened or destroyed. It opens by itself after a while, so
/// a test with an endless wait fails instead of hanging.
class Gate {
 public:
  Gate() = default;
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() const {
    const std::lock_guard lock(state_->mutex);
    state_->is_open = true;
    state_->opened.notify_all();
  }

  /// Whether it has not been opened, nor opened by itself.
  bool is_closed() const {
    const std::lock_guard lock(state_->mutex);
    return !state_->is_open && !state_->gave_up;
  }

  /// Whether it was opened in time.
  bool wait() const { return state_->wait(); }

  /// Blocks all work queued in the stream from now on.
  void hold(cudaStream_t stream) const {
    const auto wait = [](void* data) {
      const std::unique_ptr<std::shared_ptr<State>> state(
          static_cast<std::shared_ptr<State>*>(data));
      (*state)->wait();
    };
    cuda_ok(cudaLaunchHostFunc(stream, wait, new std::shared_ptr<State>(state_)));
  }

 private:
  struct State {
    bool wait() {
      std::unique_lock lock(mutex);
      if (!opened.wait_for(lock, std::chrono::seconds(40), [this] { return is_open || gave_up; })) {
        gave_up = true;
      }
      return is_open;
    }

    std::mutex mutex;
    std::condition_variable opened;
    bool is_open = false;
    bool gave_up = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// A gate that blocks a stream from the start.
class StreamGate : public Gate {
 public:
  explicit StreamGate(cudaStream_t stream) { hold(stream); }
};

/// Opens a gate at the end of a scope, whatever happens there.
class GateOpener {
 public:
  explicit GateOpener(const Gate& gate) : gate_(gate) {}
  ~GateOpener() { gate_.open(); }
  GateOpener(const GateOpener&) = delete;
  GateOpener& operator=(const GateOpener&) = delete;

 private:
  const Gate& gate_;
};

}  // namespace crossdock
