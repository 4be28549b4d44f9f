#include "layer/chunk_pipeline.hpp"

#include <chrono>
#include <utility>

namespace crossdock {

ChunkPipeline::~ChunkPipeline() {
  is_given_up_ = true;
  last_ = {};  // waits for a thread
}

void ChunkPipeline::add(std::function<void()> work) {
  using std::chrono::seconds;
  if (last_.valid() && last_.wait_for(seconds(0)) == std::future_status::ready) finish();
  const auto policy = in_parallel_ ? std::launch::async | std::launch::deferred  // if no thread
                                   : std::launch::deferred;
  last_ = std::async(policy, [this, before = std::move(last_), work = std::move(work)]() mutable {
    if (before.valid()) before.get();
    if (!is_given_up_) work();
  });
}

void ChunkPipeline::finish() {
  if (last_.valid()) last_.get();
}

}  // namespace crossdock
