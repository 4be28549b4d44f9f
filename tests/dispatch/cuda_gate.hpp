#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "dispatch/cuda_tensors.hpp"

namespace crossdock {

/// Holds up a stream or a thread until it is opened, or for a minute.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }

  /// Whether it was opened in time.
  bool wait() {
    std::unique_lock lock(mutex_);
    return opened_.wait_for(lock, std::chrono::minutes(1), [this] { return is_open_; });
  }

  /// Later work of the stream waits. REQUIRES: the gate outlives that.
  void hold(const RankStream& stream) {
    const auto wait = [](void* gate) { static_cast<Gate*>(gate)->wait(); };
    cuda_ok(cudaLaunchHostFunc(stream.get(), wait, this));
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

/// Opens a gate at the end of a scope, whatever happens there.
class GateOpener {
 public:
  explicit GateOpener(Gate& gate) : gate_(gate) {}
  ~GateOpener() { gate_.open(); }
  GateOpener(const GateOpener&) = delete;
  GateOpener& operator=(const GateOpener&) = delete;

 private:
  Gate& gate_;
};

/// Holds up what is queued in a stream after it, until it is opened or destroyed.
class StreamGate {
 public:
  explicit StreamGate(cudaStream_t stream) : gate_(std::make_shared<Gate>()) {
    cuda_ok(cudaLaunchHostFunc(stream, wait, new std::shared_ptr<Gate>(gate_)));
  }
  ~StreamGate() { open(); }
  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;

  void open() { gate_->open(); }

 private:
  static void wait(void* argument) {
    const std::unique_ptr<std::shared_ptr<Gate>> gate(
        static_cast<std::shared_ptr<Gate>*>(argument));
    (*gate)->wait();
  }

  std::shared_ptr<Gate> gate_;
};

}  // namespace crossdock
