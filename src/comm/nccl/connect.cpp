#include "comm/nccl/connect.hpp"

#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <thread>

#include "comm/agreed_failure.hpp"
#include "comm/deadlines.hpp"
#include "comm/nccl_slot.hpp"
#include "core/check.hpp"
#include "core/descriptor.hpp"

namespace crossdock::cuda {
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
