#include "dispatch/cuda/call_log.hpp"

#include <span>

#include "comm/cuda/peer_calls.cuh"
#include "core/hash.hpp"

namespace crossdock::cuda {

uint32_t CallLog::add(const char* operation, uint64_t subject, std::string_view config) {
  const uint32_t number = ++last_;
  const size_t place = (number - 1) % kMostCalls;
  if (place == calls_.size()) calls_.emplace_back();
  CallText& call = calls_[place];
  call.operation = operation;
  call.subject = subject;
  call.config.assign(config);
  return number;
}

const CallText* CallLog::find(uint32_t number) const {
  const bool is_kept = number >= 1 && number <= last_ && last_ - number < kMostCalls;
  return is_kept ? &calls_[(number - 1) % kMostCalls] : nullptr;
}

uint32_t hash_of_call(const char* operation, uint64_t subject, std::string_view config) {
  const std::span<const uint64_t> plan(&subject, 1);
  uint64_t hash = hash_bytes(std::string_view(operation));
  hash = hash_bytes(std::as_bytes(plan), hash);
  hash = hash_bytes(config, hash);
  const uint64_t mixed = hash ^ hash >> 32;
  constexpr uint64_t kNumHashes = QueuedCall::kFailed - QueuedCall::kFirstHash;
  return QueuedCall::kFirstHash + static_cast<uint32_t>(mixed % kNumHashes);
}

}  // namespace crossdock::cuda
