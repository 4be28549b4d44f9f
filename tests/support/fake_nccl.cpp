#include "support/fake_nccl.hpp"

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace crossdock::test {
namespace {

constexpr std::chrono::seconds kPatience{60};

// Bytes in transit from one rank to another.
struct Parcel {
  const void* data = nullptr;
  size_t num_bytes = 0;
  bool is_taken = false;
};

// The communicators that were made with one id.
struct Clique {
  int num_made = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Parcel>>> parcels;  // by (from, to)
};

struct FakeComm {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int size = 1;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  FakeNccl::Faults faults;
  FakeNccl::Counts counts;
  int num_ids = 0;
  std::map<int, std::shared_ptr<Clique>> cliques;  // by id
};

State& state() {
  static auto* instance = new State;
  return *instance;
}

struct Operation {
  bool is_send = false;
  void* data = nullptr;
  size_t num_bytes = 0;
  int peer = 0;
  FakeComm* comm = nullptr;
  cudaStream_t stream = nullptr;
};
thread_local std::vector<Operation> queued;

FakeComm* fake(ncclComm_t comm) {
  return reinterpret_cast<FakeComm*>(comm);
}

ncclResult_t get_version(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* get_error_string(ncclResult_t status) {
  return status == ncclSuccess ? "no error" : "an error of the stand-in";
}

const char* get_last_error(ncclComm_t /*comm*/) {
  return "as the test wants";
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  const std::lock_guard lock(state().mutex);
  if (state().faults.refuses_id) return ncclSystemError;
  const int number = ++state().num_ids;
  std::memcpy(id->internal, &number, sizeof(number));
  state().cliques[number] = std::make_shared<Clique>();
  return ncclSuccess;
}

ncclResult_t init_rank(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                       ncclConfig_t* config) {
  const std::lock_guard lock(state().mutex);
  if (rank == state().faults.fails_at_once) return ncclSystemError;
  int number = 0;
  std::memcpy(&number, id.internal, sizeof(number));
  const std::shared_ptr<Clique> clique = state().cliques.at(number);
  ++clique->num_made;
  ++state().counts.made;
  *comm = reinterpret_cast<ncclComm_t>(new FakeComm{.clique = clique, .rank = rank, .size = size});
  return config->blocking == 0 ? ncclInProgress : ncclSuccess;
}

ncclResult_t destroy(ncclComm_t comm) {
  const std::lock_guard lock(state().mutex);
  delete fake(comm);
  ++state().counts.destroyed;
  state().changed.notify_all();
  return ncclSuccess;
}

ncclResult_t abort(ncclComm_t comm) {
  const std::lock_guard lock(state().mutex);
  delete fake(comm);
  ++state().counts.aborted;
  state().changed.notify_all();
  return ncclSuccess;
}

ncclResult_t get_async_error(ncclComm_t comm, ncclResult_t* status) {
  const std::lock_guard lock(state().mutex);
  const FakeComm& asked = *fake(comm);
  const FakeNccl::Faults& faults = state().faults;
  const bool is_ready = asked.clique->num_made == asked.size && faults.never_connected < 0;
  *status = is_ready ? ncclSuccess : ncclInProgress;
  if (asked.rank == faults.fails_later) *status = ncclSystemError;
  return ncclSuccess;
}

ncclResult_t count(ncclComm_t comm, int* size) {
  *size = fake(comm)->size;
  return ncclSuccess;
}

ncclResult_t user_rank(ncclComm_t comm, int* rank) {
  *rank = fake(comm)->rank;
  return ncclSuccess;
}

ncclResult_t cu_device(ncclComm_t /*comm*/, int* device) {
  *device = 0;
  return ncclSuccess;
}

ncclResult_t group_start() {
  queued.clear();
  return ncclSuccess;
}

ncclResult_t send(const void* data, size_t num_bytes, ncclDataType_t /*type*/, int peer,
                  ncclComm_t comm, cudaStream_t stream) {
  queued.push_back({.is_send = true,
                    .data = const_cast<void*>(data),
                    .num_bytes = num_bytes,
                    .peer = peer,
                    .comm = fake(comm),
                    .stream = stream});
  return ncclSuccess;
}

ncclResult_t recv(void* data, size_t num_bytes, ncclDataType_t /*type*/, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  queued.push_back({.is_send = false,
                    .data = data,
                    .num_bytes = num_bytes,
                    .peer = peer,
                    .comm = fake(comm),
                    .stream = stream});
  return ncclSuccess;
}

std::shared_ptr<Parcel> put_parcel(const Operation& operation) {
  auto parcel = std::make_shared<Parcel>(
      Parcel{.data = operation.data, .num_bytes = operation.num_bytes, .is_taken = false});
  const std::lock_guard lock(state().mutex);
  operation.comm->clique->parcels[{operation.comm->rank, operation.peer}].push_back(parcel);
  state().changed.notify_all();
  return parcel;
}

// Null if none arrives.
std::shared_ptr<Parcel> take_parcel(const Operation& operation) {
  std::unique_lock lock(state().mutex);
  auto& parcels = operation.comm->clique->parcels[{operation.peer, operation.comm->rank}];
  if (!state().changed.wait_for(lock, kPatience, [&] { return !parcels.empty(); })) return nullptr;
  std::shared_ptr<Parcel> parcel = parcels.front();
  parcels.pop_front();
  return parcel;
}

bool receive(const Operation& operation) {
  const std::shared_ptr<Parcel> parcel = take_parcel(operation);
  if (!parcel || parcel->num_bytes != operation.num_bytes) return false;
  const bool is_copied = cudaMemcpyAsync(operation.data, parcel->data, parcel->num_bytes,
                                         cudaMemcpyDefault, operation.stream) == cudaSuccess &&
                         cudaStreamSynchronize(operation.stream) == cudaSuccess;
  const std::lock_guard lock(state().mutex);
  parcel->is_taken = true;
  state().changed.notify_all();
  return is_copied;
}

bool fails_exchanges() {
  const std::lock_guard lock(state().mutex);
  return state().faults.fails_exchanges;
}

// The host waits for the streams, so no copy waits on the GPU, where it could block other ranks.
ncclResult_t group_end() {
  const std::vector<Operation> operations = std::exchange(queued, {});
  if (fails_exchanges()) return ncclRemoteError;
  std::vector<std::shared_ptr<Parcel>> sent;
  for (const Operation& operation : operations) {
    if (cudaStreamSynchronize(operation.stream) != cudaSuccess) return ncclUnhandledCudaError;
    if (operation.is_send) sent.push_back(put_parcel(operation));
  }
  for (const Operation& operation : operations) {
    if (!operation.is_send && !receive(operation)) return ncclSystemError;
  }
  std::unique_lock lock(state().mutex);
  for (const std::shared_ptr<Parcel>& parcel : sent) {
    if (!state().changed.wait_for(lock, kPatience, [&] { return parcel->is_taken; })) {
      return ncclSystemError;
    }
  }
  return ncclSuccess;
}

constexpr cuda::NcclLibrary kLibrary{.get_version = get_version,
                                     .get_error_string = get_error_string,
                                     .get_last_error = get_last_error,
                                     .get_unique_id = get_unique_id,
                                     .comm_init_rank_config = init_rank,
                                     .comm_destroy = destroy,
                                     .comm_abort = abort,
                                     .comm_get_async_error = get_async_error,
                                     .comm_count = count,
                                     .comm_user_rank = user_rank,
                                     .comm_cu_device = cu_device,
                                     .group_start = group_start,
                                     .group_end = group_end,
                                     .send = send,
                                     .recv = recv};

}  // namespace

FakeNccl::FakeNccl() {
  const std::lock_guard lock(state().mutex);
  state().faults = {};
  state().counts = {};
  state().cliques.clear();
}

const cuda::NcclLibrary& FakeNccl::library() const {
  return kLibrary;
}

void FakeNccl::set_faults(const Faults& faults) {
  const std::lock_guard lock(state().mutex);
  state().faults = faults;
}

FakeNccl::Counts FakeNccl::await_ends() const {
  std::unique_lock lock(state().mutex);
  const Counts& counts = state().counts;
  state().changed.wait_for(lock, kPatience,
                           [&] { return counts.destroyed + counts.aborted == counts.made; });
  return counts;
}

}  // namespace crossdock::test
