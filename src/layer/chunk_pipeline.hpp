#pragma once

#include <atomic>
#include <functional>
#include <future>

namespace crossdock {

/// Work that follows the chunks of a dispatch, one after the other in the order they were added, on
/// threads of its own, so that whoever adds can go on with the exchange. Used by one thread.
class ChunkPipeline {
 public:
  /// Not in parallel: all work waits for finish().
  explicit ChunkPipeline(bool in_parallel) : in_parallel_(in_parallel) {}
  /// Leaves out what has not begun and waits for what has.
  ~ChunkPipeline();
  ChunkPipeline(const ChunkPipeline&) = delete;
  ChunkPipeline& operator=(const ChunkPipeline&) = delete;

  /// Throws what earlier work threw, if it is known already.
  void add(std::function<void()> work);

  /// Waits for all work. Throws what it threw; nothing that follows a failure has run.
  void finish();

 private:
  bool in_parallel_;
  std::atomic<bool> is_given_up_ = false;
  std::future<void> last_;
};

}  // namespace crossdock
