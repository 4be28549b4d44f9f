#include "comm/nccl/communicator.hpp"

#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "comm/attachment.hpp"
#include "comm/failure.hpp"
#include "comm/nccl/library.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/descriptor.hpp"

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

namespace {

using comm::Clock;
using std::chrono::milliseconds;

// How often ranks agree whether all are connected. The others notice the failure or end of a rank
// this soon, although NCCL itself would keep waiting for it.
constexpr milliseconds kRound{50};

struct Report {
  std::span<const std::byte> body{};
  const std::optional<Error>& refusal;
};

Agreement agree(Group& group, const Report& report) {
  return group.agree({.operation = "plan",
                      .body = report.body,
                      .under_way = true,
                      .refusal = as_refusal(report.refusal)});
}

// Whether every rank has sent a byte other than 0.
bool is_true_on_all(const Group& group, const Agreement& agreement) {
  bool all = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    all = all && agreement.body(rank)[0] != std::byte{0};
  }
  return all;
}

ncclUniqueId agree_on_id(Group& group, const NcclLibrary& library) {
  ncclUniqueId id{};
  std::optional<Error> refusal;
  if (group.rank() == 0) {
    const StandardDescriptorGuard guard;  // NCCL listens
    refusal =
        refusal_of([&] { check_nccl(library, library.get_unique_id(&id), "ncclGetUniqueId"); });
  }
  const size_t own_ids = group.rank() == 0 ? 1 : 0;
  const Agreement agreed =
      agree(group, {.body = std::as_bytes(std::span(&id, own_ids)), .refusal = refusal});
  std::memcpy(&id, agreed.body(0).data(), sizeof(id));
  return id;
}

// Waits for one round. Throws if NCCL has failed, or at the deadline.
bool is_connected_soon(NcclCommunicator& communicator, Clock::time_point begin,
                       std::chrono::nanoseconds deadline) {
  const Clock::time_point round_begin = Clock::now();
  while (!communicator.is_connected()) {
    const Clock::time_point now = Clock::now();
    if (now > comm::deadline_after(begin, deadline)) {
      throw Error(
          ErrorCode::kUnsupported,
          concat("NCCL has not connected the ranks within ", comm::to_seconds_text(deadline),
                 "; can the nodes reach each other? NCCL_DEBUG=INFO shows more"));
    }
    if (now - round_begin > kRound) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

void await_connection(Group& group, const std::shared_ptr<NcclCommunicator>& communicator,
                      std::optional<Error> refusal) {
  const Clock::time_point begin = Clock::now();
  while (true) {
    bool is_connected = false;
    if (!refusal) {
      refusal = refusal_of([&] {
        is_connected = is_connected_soon(*communicator, begin, *group.options().arrival_deadline);
      });
    }
    const std::byte own{is_connected};
    if (is_true_on_all(group, agree(group, {.body = std::span(&own, 1), .refusal = refusal}))) {
      return;
    }
  }
}

std::shared_ptr<NcclCommunicator> make_communicator(Group& group,
                                                    const NcclConnection& connection) {
  const ncclUniqueId id = agree_on_id(group, connection.library);
  const StandardDescriptorGuard guard;
  std::shared_ptr<NcclCommunicator> made;
  const std::optional<Error> refusal = refusal_of([&] {
    made = std::make_shared<NcclCommunicator>(
        connection.library, id,
        NcclCommunicator::Member{.rank = group.rank(),
                                 .size = group.size(),
                                 .device = connection.device,
                                 .patience = *group.options().progress_deadline});
  });
  await_connection(group, made, refusal);
  return made;
}

}  // namespace

std::shared_ptr<NcclCommunicator> share_nccl_communicator(Group& group,
                                                          const NcclConnection& connection) {
  std::weak_ptr<NcclCommunicator>& slot = comm::nccl_communicator_of(group);
  std::shared_ptr<NcclCommunicator> shared = slot.lock();
  const std::byte has_one{shared && shared->device() == connection.device};
  const Agreement agreed = group.agree({.operation = "plan",
                                        .config = connection.config + ";nccl_comm=own",
                                        .body = std::span(&has_one, 1),
                                        .refusal = connection.refusal});
  if (!is_true_on_all(group, agreed)) {
    shared = make_communicator(group, connection);
    group.log(LogLevel::kInfo, "rows between nodes go through NCCL, which is connected");
    slot = shared;
  }
  return shared;
}

}  // namespace crossdock::cuda
