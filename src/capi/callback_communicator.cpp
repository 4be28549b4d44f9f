#include "capi/callback_communicator.hpp"

#include <string>
#include <utility>
#include <vector>

#include "capi/status.hpp"
#include "capi/structs.hpp"
#include "comm/exchange_arguments.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "crossdock/mesh.hpp"

namespace crossdock::capi {
namespace {

Topology topology_of(const crossdock_communicator& callbacks) {
  std::vector<int> nodes;
  nodes.reserve(static_cast<size_t>(callbacks.size));
  for (int rank = 0; rank < callbacks.size; ++rank) {
    nodes.push_back(callbacks.node_of_rank != nullptr ? callbacks.node_of_rank[rank] : rank);
  }
  return Topology::from_node_ids(nodes);
}

double seconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

class CallbackCommunicator final : public Communicator {
 public:
  explicit CallbackCommunicator(const crossdock_communicator& callbacks)
      : callbacks_(callbacks), topology_(topology_of(callbacks)) {
    callbacks_.node_of_rank = nullptr;  // the caller's memory
  }
  ~CallbackCommunicator() override {
    if (!owns_context_) return;
    if (!has_left_ && callbacks_.leave != nullptr) {
      callbacks_.leave(callbacks_.context, comm::kPlainLeave.data());
    }
    if (callbacks_.destroy != nullptr) callbacks_.destroy(callbacks_.context);
  }

  void own_context() { owns_context_ = true; }

  int rank() const override { return callbacks_.rank; }
  int size() const override { return callbacks_.size; }
  std::string_view name() const override { return "callbacks"; }
  const Topology& topology() const override { return topology_; }
  Traffic traffic() const override { return traffic_; }

  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait) override {
    comm::check_gather(send, recv, recv_offsets, rank(), size());
    const crossdock_wait until = to_wait(wait);
    check("all_gather_v",
          callbacks_.all_gather_v(callbacks_.context, send.data, send.num_bytes, recv.data,
                                  recv_offsets.data(), &until),
          wait);
    for (int peer = 0; peer < size(); ++peer) {
      comm::count_bytes(traffic_, topology_, rank(), peer, send.num_bytes);
    }
  }

  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait) override {
    comm::check_blocks("send", send, send_offsets, size());
    comm::check_blocks("recv", recv, recv_offsets, size());
    const crossdock_wait until = to_wait(wait);
    check("all_to_all_v",
          callbacks_.all_to_all_v(callbacks_.context, send.data, send_offsets.data(), recv.data,
                                  recv_offsets.data(), &until),
          wait);
    for (int peer = 0; peer < size(); ++peer) {
      const auto r = static_cast<size_t>(peer);
      comm::count_bytes(traffic_, topology_, rank(), peer, send_offsets[r + 1] - send_offsets[r]);
    }
  }

  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override {
    comm::check_members(members, rank(), size());
    if (callbacks_.subgroup == nullptr) {
      throw Error(ErrorCode::kUnsupported,
                  "this communicator has no callback for subgroups; set crossdock_communicator's "
                  "subgroup");
    }
    const std::vector<int32_t> ranks(members.begin(), members.end());
    auto made = default_struct<crossdock_communicator>();
    check("subgroup",
          callbacks_.subgroup(callbacks_.context, ranks.data(), static_cast<int32_t>(ranks.size()),
                              &made),
          {.operation = "subgroup"});
    return own_communicator(made);
  }

  void abort(const Error& cause) override {
    if (callbacks_.abort != nullptr) callbacks_.abort(callbacks_.context, cause.what());
  }

  void leave(std::string_view reason) override {
    if (std::exchange(has_left_, true) || callbacks_.leave == nullptr) return;
    callbacks_.leave(callbacks_.context, std::string(reason).c_str());
  }

 private:
  // Makes a communicator from a struct that a callback has filled in, and owns its context even if
  // the struct cannot be used.
  static std::unique_ptr<Communicator> own_communicator(crossdock_communicator& made) {
    try {
      auto communicator = make_callback_communicator(read_struct("crossdock_communicator", &made));
      capi::own_context(*communicator);
      return communicator;
    } catch (...) {
      const auto* destroy = is_struct_size(made.struct_size)
                                ? find_field(&made, &crossdock_communicator::destroy)
                                : nullptr;
      if (destroy != nullptr && *destroy != nullptr) (*destroy)(made.context);
      throw;
    }
  }

  static crossdock_wait to_wait(const WaitContext& wait) {
    return {.operation = wait.operation,
            .sequence = wait.sequence,
            .arrival_s = seconds(wait.arrival),
            .progress_s = seconds(wait.progress)};
  }

  static void check(const char* callback, crossdock_status status, const WaitContext& wait) {
    const std::string reason = take_callback_error();
    if (status == CROSSDOCK_OK) return;
    throw Error(
        code_of(status),
        concat("the callback ", callback, " failed in ", wait.operation, " (call ", wait.sequence,
               "): ", reason.empty() ? crossdock_status_name(status) : reason.c_str()),
        {.culprit = -1, .sequence = wait.sequence, .operation = wait.operation});
  }

  crossdock_communicator callbacks_;
  Topology topology_;
  Traffic traffic_;
  bool has_left_ = false;
  bool owns_context_ = false;
};

}  // namespace

std::unique_ptr<Communicator> make_callback_communicator(const crossdock_communicator& callbacks) {
  CROSSDOCK_CHECK(callbacks.size >= 1 && callbacks.size <= kMaxMeshRanks,
                  "crossdock_communicator: size must be in [1, ", kMaxMeshRanks, "], got ",
                  callbacks.size);
  CROSSDOCK_CHECK(callbacks.rank >= 0 && callbacks.rank < callbacks.size,
                  "crossdock_communicator: rank must be in [0, ", callbacks.size, "), got ",
                  callbacks.rank);
  CROSSDOCK_CHECK(callbacks.all_gather_v != nullptr && callbacks.all_to_all_v != nullptr,
                  "crossdock_communicator: all_gather_v and all_to_all_v must not be NULL");
  return std::make_unique<CallbackCommunicator>(callbacks);
}

void own_context(Communicator& communicator) {
  static_cast<CallbackCommunicator&>(communicator).own_context();
}

}  // namespace crossdock::capi
