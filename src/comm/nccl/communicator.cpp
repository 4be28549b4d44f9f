#include "comm/nccl/communicator.hpp"

#include <utility>

#include "comm/nccl/ending.hpp"

namespace crossdock::cuda {
namespace {

bool is_failure(ncclResult_t status) {
  return status != ncclSuccess && status != ncclInProgress;
}

[[noreturn]] void throw_unconnected(const NcclLibrary& library, ncclResult_t status,
                                    ncclComm_t comm) {
  const char* detail = library.get_last_error(comm);
  throw Error(ErrorCode::kUnsupported,
              concat("NCCL cannot connect the ranks: ", library.get_error_string(status), " (",
                     detail != nullptr && *detail != '\0' ? detail : "no details",
                     "); does every rank have a GPU of its own? NCCL_DEBUG=INFO shows more"));
}

}  // namespace

NcclCommunicator::NcclCommunicator(const NcclLibrary& library, ncclComm_t comm)
    : library_(library), is_own_(false), comm_(comm), is_connected_(true) {}

NcclCommunicator::NcclCommunicator(const NcclLibrary& library, const ncclUniqueId& id,
                                   const Member& member)
    : library_(library), is_own_(true), member_(member) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t status =
      library_.comm_init_rank_config(&comm_, member.size, id, member.rank, &config);
  if (!is_failure(status)) return;
  try {
    throw_unconnected(library_, status, comm_);
  } catch (...) {
    abort();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  if (!is_own_ || comm_ == nullptr || is_in_forked_child()) return;
  const bool is_sound = is_connected_ && state() == ncclSuccess;
  end_in_background(library_, comm_, is_sound ? NcclEnd::kDestroy : NcclEnd::kAbort,
                    member_.patience);
}

bool NcclCommunicator::is_in_forked_child() const {
  return generation_ != fork_generation();
}

ncclResult_t NcclCommunicator::state() const {
  ncclResult_t status = ncclSuccess;
  const ncclResult_t asked = library_.comm_get_async_error(comm_, &status);
  return asked != ncclSuccess ? asked : status;
}

bool NcclCommunicator::is_connected() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) throw Error(ErrorCode::kUnsupported, kAborted);
  const ncclResult_t status = state();
  if (is_failure(status)) throw_unconnected(library_, status, comm_);
  is_connected_ = status == ncclSuccess;
  return is_connected_;
}

std::string NcclCommunicator::async_error() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return kAborted;
  const ncclResult_t status = state();
  return is_failure(status) ? library_.get_error_string(status) : "";
}

void NcclCommunicator::abort() noexcept {
  const std::lock_guard lock(mutex_);
  ncclComm_t comm = std::exchange(comm_, nullptr);
  if (comm == nullptr || is_in_forked_child()) return;
  end_in_background(library_, comm, NcclEnd::kAbort, member_.patience);
}

}  // namespace crossdock::cuda
