#include "core/cuda/waiting_room.hpp"

#include "core/cuda/device.hpp"

namespace crossdock::cuda {

WaitingRoom& WaitingRoom::of(int device) {
  // Never destroyed: rooms may be given back by static objects.
  static auto* mutex = new std::mutex;
  static auto* rooms = new std::map<int, WaitingRoom>;
  const std::lock_guard lock(*mutex);
  return rooms->try_emplace(device, num_sms(device)).first->second;
}

std::shared_ptr<const void> WaitingRoom::take(uint64_t stream_id, int sms) {
  const std::lock_guard lock(mutex_);
  const auto taken = of_streams_[stream_id].insert(sms);
  const auto give_back = [this, stream_id, taken](const void*) {
    const std::lock_guard again(mutex_);
    of_streams_[stream_id].erase(taken);
  };
  if (num_taken() > num_sms_) {
    of_streams_[stream_id].erase(taken);
    return nullptr;
  }
  return {this, give_back};
}

int WaitingRoom::num_taken() const {
  int sum = 0;
  for (const auto& [stream, taken] : of_streams_) sum += taken.empty() ? 0 : *taken.rbegin();
  return sum;
}

uint64_t id_of(cudaStream_t stream) {
  static thread_local char of_thread;
  if (stream == cudaStreamPerThread) return reinterpret_cast<uint64_t>(&of_thread);
  return reinterpret_cast<uint64_t>(stream);
}

}  // namespace crossdock::cuda
