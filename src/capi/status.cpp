#include "capi/status.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "capi/configs.hpp"
#include "core/process.hpp"
#include "crossdock/crossdock.h"
#include "crossdock/crossdock.hpp"

namespace crossdock::capi {
namespace {

struct Calls {
  std::atomic<int64_t> num_running = 0;
  std::atomic<std::thread::id> ended_by{};  // the default: nobody
};

constinit PerProcess<Calls> all_calls;

}  // namespace

RunningCall::RunningCall() noexcept {
  Calls& calls = all_calls.get();
  ++calls.num_running;  // first: end_calls looks at the two in the opposite order
  const std::thread::id ended_by = calls.ended_by;
  if (ended_by == std::thread::id() || ended_by == std::this_thread::get_id()) return;
  --calls.num_running;
  hold_thread();
}

RunningCall::~RunningCall() {
  --all_calls.get().num_running;
}

bool have_calls_ended() noexcept {
  return all_calls.get().ended_by.load() != std::thread::id();
}

void hold_thread() noexcept {
  while (true) pause();
}

}  // namespace crossdock::capi

int32_t crossdock_end_calls(double seconds) {
  using std::chrono::steady_clock;
  using namespace crossdock::capi;
  Calls& calls = all_calls.get();
  calls.ended_by = std::this_thread::get_id();
  const auto deadline = steady_clock::now() + std::chrono::duration<double>(seconds);
  while (calls.num_running > 0) {
    if (steady_clock::now() >= deadline) return 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 1;
}

namespace crossdock::capi {
namespace {

struct Failure {
  crossdock_status status = CROSSDOCK_OK;
  std::string text;
  ErrorContext context;
};

thread_local Failure last_failure;
thread_local std::string callback_error;
thread_local std::optional<std::string> refusal_of_next_call;

crossdock_status status_of(ErrorCode code) {
  return 1 + static_cast<crossdock_status>(code);  // in the same order
}
static_assert(1 + static_cast<int>(ErrorCode::kInvalidArgument) == CROSSDOCK_INVALID_ARGUMENT);
static_assert(1 + static_cast<int>(ErrorCode::kMismatch) == CROSSDOCK_MISMATCH);
static_assert(1 + static_cast<int>(ErrorCode::kUnsupported) == CROSSDOCK_UNSUPPORTED);
static_assert(1 + static_cast<int>(ErrorCode::kCapacity) == CROSSDOCK_CAPACITY);
static_assert(1 + static_cast<int>(ErrorCode::kPeerFailed) == CROSSDOCK_PEER_FAILED);
static_assert(1 + static_cast<int>(ErrorCode::kTimeout) == CROSSDOCK_TIMEOUT);
static_assert(1 + static_cast<int>(ErrorCode::kCommunication) == CROSSDOCK_COMMUNICATION);
static_assert(1 + static_cast<int>(ErrorCode::kCuda) == CROSSDOCK_CUDA_FAILURE);
static_assert(1 + static_cast<int>(ErrorCode::kInternal) == CROSSDOCK_INTERNAL);
static_assert(1 + static_cast<int>(ErrorCode::kOutOfMemory) == CROSSDOCK_OUT_OF_MEMORY);

// A text that cannot be copied is replaced by one that is short enough to need no allocation.
crossdock_status keep(crossdock_status status, const char* text, const ErrorContext& context) {
  last_failure.status = status;
  last_failure.context = context;
  try {
    last_failure.text = text;
  } catch (const std::bad_alloc&) {
    last_failure.text = "no memory";
  }
  return status;
}

}  // namespace

crossdock_status keep_failure() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return keep(status_of(error.code()), error.what(), error.context());
  } catch (const std::bad_alloc&) {
    return keep(CROSSDOCK_OUT_OF_MEMORY, "out of memory", {});
  } catch (const std::exception& error) {
    return keep(CROSSDOCK_INTERNAL, error.what(), {});
  } catch (...) {
    return keep(CROSSDOCK_INTERNAL, "a non-standard exception", {});
  }
}

ErrorCode code_of(crossdock_status status) {
  const bool is_failure = status >= CROSSDOCK_PEER_FAILED && status <= CROSSDOCK_OUT_OF_MEMORY;
  return is_failure ? static_cast<ErrorCode>(status - 1) : ErrorCode::kCommunication;
}

std::string take_callback_error() {
  return std::exchange(callback_error, {});
}

void check_not_refused() {
  if (!refusal_of_next_call) return;
  throw Error(ErrorCode::kInvalidArgument, *std::exchange(refusal_of_next_call, std::nullopt));
}

}  // namespace crossdock::capi

using namespace crossdock;

const char* crossdock_last_error(void) {
  return capi::last_failure.text.c_str();
}

crossdock_status crossdock_last_error_info(crossdock_error_info* info) {
  auto value = capi::default_struct<crossdock_error_info>();
  value.status = capi::last_failure.status;
  value.culprit = capi::last_failure.context.culprit;
  value.sequence = capi::last_failure.context.sequence;
  value.operation = capi::last_failure.context.operation;
  return capi::guarded([&] { capi::write_struct("crossdock_error_info", info, value); });
}

const char* crossdock_status_name(crossdock_status status) {
  if (status == CROSSDOCK_OK) return "ok";
  const bool is_code = status >= CROSSDOCK_INVALID_ARGUMENT && status <= CROSSDOCK_OUT_OF_MEMORY;
  return is_code ? name_of(static_cast<ErrorCode>(status - 1)) : "unknown";
}

const char* crossdock_version(void) {
  static const std::string kVersion(describe_build().version);
  return kVersion.c_str();
}

void crossdock_set_callback_error(const char* reason) {
  static_cast<void>(capi::guarded([&] { capi::callback_error = reason != nullptr ? reason : ""; }));
}

void crossdock_refuse_next_call(const char* reason) {
  capi::refusal_of_next_call.reset();
  if (reason == nullptr) return;
  try {
    capi::refusal_of_next_call.emplace(reason);
  } catch (const std::bad_alloc&) {  // the call must be refused all the same
    capi::refusal_of_next_call.emplace("no memory");
  }
}
