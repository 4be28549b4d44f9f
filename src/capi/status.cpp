#include "capi/status.hpp"

#include <new>
#include <optional>
#include <string>
#include <utility>

#include "capi/structs.hpp"
#include "crossdock/crossdock.hpp"

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
