#include "comm/cuda/stream_watch.hpp"

#include <thread>
#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

double seconds(std::chrono::nanoseconds time) {
  return static_cast<double>(time.count()) * 1e-9;
}

// A deadline may be as long as the clock can represent.
std::chrono::nanoseconds sum(std::chrono::nanoseconds a, std::chrono::nanoseconds b) {
  return a > std::chrono::nanoseconds::max() - b ? std::chrono::nanoseconds::max() : a + b;
}

// The pause between two queries of a stream is a small fraction of the time waited so far: each
// query takes locks of the driver that other ranks of this process need for launches.
void pause_after(std::chrono::nanoseconds waited) {
  constexpr std::chrono::microseconds kLongest{50};
  const std::chrono::nanoseconds pause = waited / 64;
  if (pause >= kLongest) {
    std::this_thread::sleep_for(kLongest);
    return;
  }
  const auto end = std::chrono::steady_clock::now() + pause;
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

}  // namespace

StreamWatch::StreamWatch(const Options& options) : options_(options) {}

std::unique_ptr<OwnedEvent> StreamWatch::take_event() {
  if (spare_events_.empty()) return std::make_unique<OwnedEvent>(options_.device);
  std::unique_ptr<OwnedEvent> event = std::move(spare_events_.back());
  spare_events_.pop_back();
  return event;
}

void StreamWatch::begin_exchange(cudaStream_t stream, const char* operation, uint64_t sequence) {
  if (is_capturing(stream)) return;
  const std::lock_guard lock(mutex_);
  std::unique_ptr<OwnedEvent> begin = take_event();
  begin->record(stream);
  pending_.push_back(
      {.begin = std::move(begin), .end = nullptr, .operation = operation, .sequence = sequence});
}

void StreamWatch::end_exchange(cudaStream_t stream) {
  if (is_capturing(stream)) return;
  const std::lock_guard lock(mutex_);
  std::unique_ptr<OwnedEvent> end = take_event();
  end->record(stream);
  pending_.back().end = std::move(end);
}

void StreamWatch::set_probe(Probe probe) {
  const std::lock_guard lock(mutex_);
  probe_ = std::move(probe);
}

std::optional<Error> StreamWatch::fault() {
  const std::lock_guard lock(mutex_);
  if (fault_ || pending_.empty()) return fault_;
  const RelaxedCapture relaxed;  // queries are allowed although another stream may be captured
  std::erase_if(pending_, [&](Exchange& exchange) {
    if (!exchange.end || !exchange.end->has_passed()) return false;
    spare_events_.push_back(std::move(exchange.begin));
    spare_events_.push_back(std::move(exchange.end));
    return true;
  });
  if (pending_.empty()) return std::nullopt;
  const std::string failure = probe_.error ? probe_.error() : "";
  if (!failure.empty()) return note_fault(failed(pending_.front(), failure));
  for (Exchange& exchange : pending_) {
    if (!exchange.reached && exchange.begin->has_passed()) exchange.reached = Clock::now();
    if (exchange.reached && Clock::now() - *exchange.reached > options_.progress_deadline) {
      return note_fault(late(exchange));
    }
  }
  return std::nullopt;
}

std::optional<Error> StreamWatch::note_fault(const Error& error) {
  fault_ = error;
  if (probe_.abort) probe_.abort();
  return fault_;
}

std::optional<Error> StreamWatch::try_await(cudaStream_t stream,
                                            std::optional<std::chrono::nanoseconds> limit) {
  const std::chrono::nanoseconds most =
      limit.value_or(sum(options_.arrival_deadline, options_.progress_deadline));
  const RelaxedCapture relaxed;
  const Clock::time_point begin = Clock::now();
  while (true) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaSuccess) return std::nullopt;
    if (status != cudaErrorNotReady) {
      try {
        CROSSDOCK_CUDA(status);
      } catch (const Error& error) {
        return error;
      }
    }
    cudaGetLastError();  // "not ready" is not an error
    if (std::optional<Error> error = fault()) return error;
    const Clock::duration waited = Clock::now() - begin;
    if (waited > most) return held_up(waited);
    pause_after(waited);
  }
}

void StreamWatch::await(cudaStream_t stream) {
  if (const std::optional<Error> error = try_await(stream)) throw *error;
}

const char* StreamWatch::fate_of_communicator() const {
  return probe_.abort ? "The communicator has been aborted"
                      : "The communicator was not aborted; call ncclCommAbort to free the GPU";
}

Error StreamWatch::failed(const Exchange& exchange, const std::string& reason) const {
  return {
      ErrorCode::kCommunication,
      concat("rank ", options_.rank, " of ", options_.size, ": NCCL failed in ", exchange.operation,
             " (call ", exchange.sequence, "): ", reason, ". ", fate_of_communicator()),
      {.culprit = options_.rank, .sequence = exchange.sequence, .operation = exchange.operation}};
}

Error StreamWatch::late(const Exchange& exchange) const {
  return {
      ErrorCode::kTimeout,
      concat("rank ", options_.rank, " of ", options_.size, ": NCCL did not finish ",
             exchange.operation, " (call ", exchange.sequence, ") within ",
             seconds(options_.progress_deadline), " s; are all ranks of its communicator alive? ",
             fate_of_communicator()),
      {.culprit = options_.rank, .sequence = exchange.sequence, .operation = exchange.operation}};
}

Error StreamWatch::held_up(std::chrono::nanoseconds waited) const {
  return {ErrorCode::kTimeout,
          concat("rank ", options_.rank, " of ", options_.size, ": waited ", seconds(waited),
                 " s for its GPU stream; is work that was queued there waiting forever?")};
}

}  // namespace crossdock::cuda
