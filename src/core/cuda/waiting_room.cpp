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

std::shared_ptr<const void> WaitingRoom::take(const Request& request) {
  const std::lock_guard lock(mutex_);
  const auto remove = [this, stream_id = request.stream_id](auto taken) {
    std::multiset<int>& of_stream = of_streams_[stream_id];
    of_stream.erase(taken);
    if (of_stream.empty()) of_streams_.erase(stream_id);
  };
  const auto taken = of_streams_[request.stream_id].insert(request.sms);
  if (!fits(request.num_streams)) {
    remove(taken);
    return nullptr;
  }
  return {this, [this, remove, taken](const void*) {
            const std::lock_guard again(mutex_);
            remove(taken);
          }};
}

bool WaitingRoom::fits(int num_streams) const {
  int sum = 0;
  for (const auto& [stream, taken] : of_streams_) sum += *taken.rbegin();
  const bool is_one_call = std::ssize(of_streams_) <= num_streams;
  return sum <= (is_one_call ? num_sms_ : num_sms_ * 3 / 4);
}

uint64_t id_of(cudaStream_t stream) {
  return reinterpret_cast<uint64_t>(stream);
}

}  // namespace crossdock::cuda
