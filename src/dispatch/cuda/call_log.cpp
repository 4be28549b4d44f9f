#include "dispatch/cuda/call_log.hpp"

#include "comm/cuda/peer_calls.cuh"

namespace crossdock::cuda {
namespace {

// FNV-1a, 64 bits.
struct Hash {
  uint64_t value = 0xcbf29ce484222325;

  void add(uint64_t item) { value = (value ^ item) * 0x100000001b3; }
  void add(std::string_view text) {
    for (const char c : text) add(uint64_t{static_cast<unsigned char>(c)});
    add(text.size());
  }
};

}  // namespace

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
  Hash hash;
  hash.add(std::string_view(operation));
  hash.add(subject);
  hash.add(config);
  const uint64_t mixed = hash.value ^ hash.value >> 32;
  constexpr uint64_t kNumHashes = QueuedCall::kFailed - QueuedCall::kFirstHash;
  return QueuedCall::kFirstHash + static_cast<uint32_t>(mixed % kNumHashes);
}

}  // namespace crossdock::cuda
