#include "layer/overlap.hpp"

#include <optional>
#include <utility>

#include "comm/failure.hpp"
#include "core/threading.hpp"

namespace crossdock {

BackgroundWork::~BackgroundWork() {
  const detail::PoolWait waiting;
  std::unique_lock lock(mutex_);
  waiting_.clear();
  is_idle_.wait(lock, [this] { return num_turns_ == 0; });
}

void BackgroundWork::add(std::function<void()> task) {
  std::unique_lock lock(mutex_);
  throw_error(lock);
  waiting_.push_back(std::move(task));
  worker_.add([this] { run_next(); });
  ++num_turns_;  // in time: run_next needs the mutex
}

void BackgroundWork::finish() {
  const detail::PoolWait waiting;
  std::unique_lock lock(mutex_);
  is_idle_.wait(lock, [this] { return num_turns_ == 0; });
  throw_error(lock);
}

// Runs on the worker. A task and everything it holds are destroyed before the owner learns that it
// has finished.
void BackgroundWork::run_next() {
  std::unique_lock lock(mutex_);
  if (!waiting_.empty()) {
    std::function<void()> task = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = nullptr;
    lock.lock();
    if (error) {
      error_ = error;
      waiting_.clear();
    }
  }
  if (--num_turns_ == 0) is_idle_.notify_one();
}

void BackgroundWork::throw_error(std::unique_lock<std::mutex>& lock) {
  if (!error_) return;
  const std::exception_ptr error = std::exchange(error_, nullptr);
  lock.unlock();
  std::rethrow_exception(error);
}

Worker::Worker()
    : thread_(start_thread("the overlap of a layer; set overlap_chunks = 1 and "
                           "overlap_shared = false to run without",
                           [this] { run(); })) {}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Worker::add(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return is_stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

bool Overlap::is_requested(const MoeLayerConfig& config) {
  return config.overlap_chunks > 1 || (config.shared_inner > 0 && config.overlap_shared);
}

ForwardRows Overlap::forward(const MoeForwardArgs& args, MoeSaved& saved) {
  const Plan& plan = saved.decision.plan;
  ForwardRows rows;
  ExpertsForwardArgs experts;
  BackgroundWork work(worker_);  // last: its destructor waits for tasks that use the above

  const auto compute_shared = [&] { rows.shared_y = parts_.forward_shared(args, saved); };
  const auto compute_chunk = [&](const DispatchResult& sent, const DispatchChunk& chunk) {
    if (!rows.y.view.given()) {
      experts = parts_.prepare_forward(args, plan, sent, rows.y);
      saved.experts = parts_.experts.begin_forward(experts);
    }
    work.add([&, sent, chunk] {  // the copy of `sent` keeps the rows if the dispatch fails
      const EventRecorder::Scope scope(parts_.group.recorder(), "experts", 0);
      parts_.experts.forward_part(experts, saved.experts, {chunk.first_expert, chunk.last_expert});
    });
  };

  if (parts_.overlaps_shared()) run_agreed(parts_.group, [&] { work.add(compute_shared); });
  DispatchArgs dispatch{.x = args.x,
                        .with_row_weights = parts_.weights_in_experts(),
                        .num_chunks = parts_.config.overlap_chunks};
  if (parts_.overlaps_chunks()) dispatch.on_chunk = compute_chunk;
  saved.sent = parts_.dispatcher.dispatch(plan, dispatch);
  run_agreed(parts_.group, [&] {
    if (!parts_.overlaps_shared()) compute_shared();
    work.finish();
    if (!parts_.overlaps_chunks()) rows.y = parts_.forward_experts(args, saved);
  });
  return rows;
}

BackwardRows Overlap::backward(const MoeBackwardArgs& args) {
  MoeSaved& saved = *args.saved;
  BackwardRows rows;
  ExpertsBackwardDxArgs dx;
  BackgroundWork work(worker_);  // last: its destructor waits for tasks that use the above

  const auto compute_shared = [&] { rows.shared_grad_x = parts_.backward_shared(args); };
  const auto compute_chunk = [&](const DispatchResult& grad_y, const DispatchChunk& chunk) {
    if (!rows.grad_rows.view.given()) {
      dx = parts_.prepare_backward(args, grad_y, rows);
      parts_.experts.begin_backward_dx(dx);
    }
    work.add([&, grad_y, chunk] {  // the copy of `grad_y` keeps the rows if the dispatch fails
      const EventRecorder::Scope scope(parts_.group.recorder(), "experts_dx", 0);
      parts_.experts.backward_dx_part(dx, {chunk.first_expert, chunk.last_expert});
    });
  };

  if (parts_.overlaps_shared()) run_agreed(parts_.group, [&] { work.add(compute_shared); });
  DispatchArgs dispatch{
      .x = args.grad_out, .with_row_weights = true, .num_chunks = parts_.config.overlap_chunks};
  if (parts_.overlaps_chunks()) dispatch.on_chunk = compute_chunk;
  saved.grad_y = parts_.dispatcher.dispatch(saved.decision.plan, dispatch);
  run_agreed(parts_.group, [&] {
    if (!parts_.overlaps_shared()) compute_shared();
    work.finish();
    if (parts_.overlaps_chunks()) {
      parts_.experts.finish_backward_dx(dx);
    } else {
      parts_.backward_experts(args, rows);
    }
  });
  return rows;
}

namespace {

// Number of SMs that the experts of a chunk leave free for the dispatch of later chunks.
int free_sms_beside(const LayerParts& parts, const Plan& plan, const DispatchChunk& chunk) {
  const bool is_last = chunk.last_expert == plan.num_local_experts();
  return is_last ? 0 : parts.dispatch_sms();
}

}  // namespace

ForwardRows forward_beside_dispatch(LayerParts& parts, const MoeForwardArgs& args,
                                    MoeSaved& saved) {
  const Plan& plan = saved.decision.plan;
  ForwardRows rows;
  Pending<DispatchResult> pending =
      parts.dispatcher.begin_dispatch(plan, {.x = args.x,
                                             .with_row_weights = parts.weights_in_experts(),
                                             .num_chunks = parts.config.overlap_chunks});
  run_agreed(parts.group, [&] {
    if (parts.overlaps_shared()) rows.shared_y = parts.forward_shared(args, saved);
    ExpertsForwardArgs experts = parts.prepare_forward(args, plan, pending.result(), rows.y);
    saved.experts = parts.experts.begin_forward(experts);
    while (const std::optional<DispatchChunk> chunk = parts.dispatcher.next_chunk(pending)) {
      const EventRecorder::Scope scope(parts.group.recorder(), "experts", 0);
      experts.free_sms = free_sms_beside(parts, plan, *chunk);
      parts.experts.forward_part(experts, saved.experts, {chunk->first_expert, chunk->last_expert});
    }
    saved.sent = parts.dispatcher.finish(std::move(pending));
    if (!parts.overlaps_shared()) rows.shared_y = parts.forward_shared(args, saved);
  });
  return rows;
}

BackwardRows backward_beside_dispatch(LayerParts& parts, const MoeBackwardArgs& args) {
  MoeSaved& saved = *args.saved;
  const Plan& plan = saved.decision.plan;
  BackwardRows rows;
  Pending<DispatchResult> pending = parts.dispatcher.begin_dispatch(
      plan,
      {.x = args.grad_out, .with_row_weights = true, .num_chunks = parts.config.overlap_chunks});
  run_agreed(parts.group, [&] {
    if (parts.overlaps_shared()) rows.shared_grad_x = parts.backward_shared(args);
    ExpertsBackwardDxArgs dx = parts.prepare_backward(args, pending.result(), rows);
    parts.experts.begin_backward_dx(dx);
    while (const std::optional<DispatchChunk> chunk = parts.dispatcher.next_chunk(pending)) {
      const EventRecorder::Scope scope(parts.group.recorder(), "experts_dx", 0);
      dx.free_sms = free_sms_beside(parts, plan, *chunk);
      parts.experts.backward_dx_part(dx, {chunk->first_expert, chunk->last_expert});
    }
    parts.experts.finish_backward_dx(dx);
    saved.grad_y = parts.dispatcher.finish(std::move(pending));
    if (!parts.overlaps_shared()) rows.shared_grad_x = parts.backward_shared(args);
  });
  return rows;
}

}  // namespace crossdock
