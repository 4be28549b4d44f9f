// Groups of processes, however they are started.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"
#include "comm/exchange_arguments.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "crossdock/crossdock.h"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/sockets.hpp"

namespace crossdock::capi {
namespace {

/// A crossdock_group_config as options of the C++ API.
struct GroupSettings {
  GroupOptions group{};
  std::optional<std::chrono::nanoseconds> setup_deadline{};
  std::optional<std::chrono::nanoseconds> setup_notice_after{};
  int ranks_per_node = 0;
};

/// A communicator whose exchanges are the caller's callbacks. REQUIRES: a struct that read_struct
/// returned. Throws Error(kInvalidArgument) if it is incomplete. Before own_context, its destructor
/// calls nothing: if no group can be made, the caller still owns the context.
std::unique_ptr<Communicator> make_callback_communicator(const crossdock_communicator& callbacks);

/// From now on, the communicator's destructor calls the leave and destroy callbacks. REQUIRES:
/// `communicator` came from make_callback_communicator.
void own_context(Communicator& communicator);

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

/// A deadline in seconds; nullopt, the default, for 0.
std::optional<std::chrono::nanoseconds> to_deadline(const char* name, double seconds) {
  // Nanoseconds overflow beyond this; 100 years is as good as no deadline.
  constexpr double kMostSeconds = 100.0 * 366 * 24 * 3600;
  CROSSDOCK_CHECK(seconds >= 0 && seconds <= kMostSeconds, name, " must be in [0, ", kMostSeconds,
                  "] seconds, got ", seconds);
  if (seconds == 0) return std::nullopt;
  return std::chrono::nanoseconds(std::llround(seconds * 1e9));
}

/// The callback of a config as that of the C++ API; empty if there is none.
OnWait to_on_wait(void (*on_wait)(void* context, const crossdock_wait_notice* notice),
                  void* context) {
  if (on_wait == nullptr) return {};
  return [on_wait, context](const WaitNotice& notice) {
    if (have_calls_ended()) return;
    const std::string text = notice.text();
    auto given = default_struct<crossdock_wait_notice>();
    given.rank = notice.rank;
    given.size = notice.size;
    given.awaited = notice.awaited.data();
    given.num_awaited = static_cast<int32_t>(notice.awaited.size());
    given.sequence = notice.sequence;
    given.operation = notice.operation.c_str();
    given.waited_s = seconds(notice.waited);
    given.left_s = seconds(notice.left);
    given.text = text.c_str();
    call_back([&] { on_wait(context, &given); });
  };
}

/// Throws Error(kInvalidArgument) if a field is invalid. `given` may be null.
GroupSettings to_settings(const crossdock_group_config* given) {
  const auto config = read_optional("crossdock_group_config", given);
  GroupSettings settings;
  GroupOptions& group = settings.group;
  group.arrival_deadline = to_deadline("arrival_deadline_s", config.arrival_deadline_s);
  group.progress_deadline = to_deadline("progress_deadline_s", config.progress_deadline_s);
  settings.setup_deadline = to_deadline("setup_deadline_s", config.setup_deadline_s);
  CROSSDOCK_CHECK(config.recorded_events >= -1,
                  "recorded_events must be -1 (none), 0 (the default) or positive, got ",
                  config.recorded_events);
  if (config.recorded_events != 0) {
    group.recorded_events = std::max<int64_t>(config.recorded_events, 0);
  }
  CROSSDOCK_CHECK(config.staging_bytes >= 0, "staging_bytes must be 0 (the default) or positive, ",
                  "got ", config.staging_bytes);
  if (config.staging_bytes > 0) group.staging_bytes = config.staging_bytes;
  if (config.report_file != nullptr) group.report_file = config.report_file;
  CROSSDOCK_CHECK(config.num_threads >= 0, "num_threads must be 0 (the default) or positive, got ",
                  config.num_threads);
  if (config.num_threads > 0) group.threads = std::make_shared<ThreadPool>(config.num_threads);
  settings.ranks_per_node = config.ranks_per_node;
  group.on_wait = to_on_wait(config.on_wait, config.on_wait_context);
  group.notice_after =
      to_deadline("notice_after_s", config.notice_after_s).value_or(group.notice_after);
  CROSSDOCK_CHECK(config.log_level >= 0 && config.log_level <= 2,
                  "log_level must be 0 (the default), 1 or 2, got ", config.log_level);
  if (config.on_log != nullptr) {
    group.on_log = [on_log = config.on_log, context = config.on_log_context](
                       LogLevel level, const std::string& line) {
      if (have_calls_ended()) return;
      call_back([&] { on_log(context, static_cast<int32_t>(level), line.c_str()); });
    };
  }
  if (config.log_level > 0) group.log_level = static_cast<LogLevel>(config.log_level);
  settings.setup_notice_after = to_deadline("setup_notice_after_s", config.setup_notice_after_s);
  return settings;
}

std::unique_ptr<crossdock_group> make_group(std::unique_ptr<Group> group) {
  return std::make_unique<crossdock_group>(std::make_shared<SharedGroup>(std::move(group)));
}

std::unique_ptr<crossdock_group> make_group(std::unique_ptr<Communicator> communicator,
                                            const GroupOptions& options) {
  return make_group(std::make_unique<Group>(std::move(communicator), options));
}

SocketsOptions to_options(const crossdock_bootstrap_config* given) {
  const auto config = read_optional("crossdock_bootstrap_config", given);
  SocketsOptions options;
  if (config.address != nullptr) options.address = config.address;
  options.setup_deadline = to_deadline("setup_deadline_s", config.setup_deadline_s);
  options.ranks_per_node = config.ranks_per_node;
  options.on_wait = to_on_wait(config.on_wait, config.on_wait_context);
  options.notice_after =
      to_deadline("notice_after_s", config.notice_after_s).value_or(options.notice_after);
  if (config.interrupt != nullptr) {
    options.interrupt = [interrupt = config.interrupt, context = config.interrupt_context] {
      return have_calls_ended() || call_back([&] { return interrupt(context) != 0; });
    };
  }
  return options;
}

std::vector<std::vector<std::byte>> to_blobs(const crossdock_join_args& args) {
  constexpr int64_t kMostBlobBytes = 65536;
  CROSSDOCK_CHECK(args.size >= 1 && args.rank >= 0 && args.rank < args.size,
                  "rank must be in [0, size), got rank ", args.rank, " of ", args.size);
  CROSSDOCK_CHECK(args.bytes != nullptr && args.offsets != nullptr,
                  "crossdock_join_args: bytes and offsets must not be NULL");
  const auto* bytes = static_cast<const std::byte*>(args.bytes);
  std::vector<std::vector<std::byte>> blobs;
  for (int32_t rank = 0; rank < args.size; ++rank) {
    const int64_t begin = args.offsets[rank];
    const int64_t end = args.offsets[rank + 1];
    CROSSDOCK_CHECK(begin >= 0 && begin <= end && end - begin <= kMostBlobBytes,
                    "offsets must be ascending and a blob have at most ", kMostBlobBytes,
                    " bytes, got ", begin, " and ", end, " for rank ", rank);
    blobs.emplace_back(bytes + begin, bytes + end);
  }
  return blobs;
}

}  // namespace
}  // namespace crossdock::capi

using namespace crossdock;
using capi::guarded;
using capi::handle;
using capi::pointee;

crossdock_status crossdock_group_from_threads(int32_t size, const crossdock_group_config* config,
                                              crossdock_group** groups) {
  return guarded([&] {
    pointee("groups", groups);
    const capi::GroupSettings settings = capi::to_settings(config);
    const ThreadOptions options{.ranks_per_node = settings.ranks_per_node, .group = settings.group};
    std::vector<std::unique_ptr<crossdock_group>> made;
    for (auto& communicator : make_thread_communicators(size, options)) {
      made.push_back(capi::make_group(std::move(communicator), settings.group));
    }
    for (size_t rank = 0; rank < made.size(); ++rank) groups[rank] = made[rank].release();
  });
}

crossdock_status crossdock_group_from_mpi(const void* mpi_comm,
                                          const crossdock_group_config* config,
                                          crossdock_group** group) {
  return guarded([&] {
    crossdock_group*& made = pointee("group", group);
    const capi::GroupSettings settings = capi::to_settings(config);
    MpiOptions options;
    options.ranks_per_node = settings.ranks_per_node;
    options.setup_deadline = settings.setup_deadline;
    options.on_wait = settings.group.on_wait;
    options.notice_after = settings.setup_notice_after.value_or(options.notice_after);
    made = capi::make_group(mpi_comm != nullptr ? make_mpi_communicator(mpi_comm, options)
                                                : make_mpi_communicator(options),
                            settings.group)
               .release();
  });
}

crossdock_status crossdock_group_from_callbacks(const crossdock_communicator* communicator,
                                                const crossdock_group_config* config,
                                                crossdock_group** group) {
  return guarded([&] {
    crossdock_group*& made = pointee("group", group);
    const capi::GroupSettings settings = capi::to_settings(config);
    const auto callbacks = capi::read_struct("crossdock_communicator", communicator);
    auto owner = capi::make_group(capi::make_callback_communicator(callbacks), settings.group);
    capi::own_context(owner->shared->group->communicator());
    made = owner.release();
  });
}

crossdock_status crossdock_group_describe(const crossdock_group* group,
                                          crossdock_group_info* info) {
  return guarded([&] {
    const capi::SharedGroup& described = *handle("group", group).shared;
    const Group& members = *described.group;
    const Topology& topology = members.topology();
    const GroupMemory memory = members.memory();
    crossdock_group_info value = {};
    value.rank = members.rank();
    value.size = members.size();
    value.num_nodes = topology.num_nodes;
    value.node = topology.node_of_rank[static_cast<size_t>(members.rank())];
    value.is_poisoned = members.is_poisoned() ? 1 : 0;
    value.pool_bytes = memory.pool_bytes;
    value.window_bytes = memory.window_bytes;
    value.communicator = described.communicator.c_str();
    value.note = described.note.c_str();
    capi::write_struct("crossdock_group_info", info, value);
  });
}

crossdock_status crossdock_group_check(const crossdock_group* group) {
  return guarded([&] { handle("group", group).shared->group->check(); });
}

crossdock_status crossdock_group_subgroup(crossdock_group* group, const int32_t* members,
                                          int32_t num_members, crossdock_group** subgroup) {
  return guarded([&] {
    Group& whole = *handle("group", group).shared->group;
    crossdock_group*& made = pointee("subgroup", subgroup);
    CROSSDOCK_CHECK(num_members >= 1 && num_members <= whole.size(), "num_members must be in [1, ",
                    whole.size(), "], got ", num_members);
    const std::vector<int> ranks(&pointee("members", members), members + num_members);
    made = capi::make_group(whole.subgroup(ranks)).release();
  });
}

void crossdock_group_leave(crossdock_group* group, const char* reason) {
  if (!capi::is_usable(group)) return;
  group->shared->group->leave(reason != nullptr ? reason : comm::kPlainLeave);
}

crossdock_status crossdock_group_all_reduce(crossdock_group* group, const crossdock_tensor* tensors,
                                            int64_t num_tensors) {
  return guarded([&] {
    Group& ranks = handle("group", group).shared->open();
    std::vector<TensorView> views;
    capi::convert({ranks, "all_reduce"},
                  [&] { views = capi::to_views("tensors", tensors, num_tensors); });
    ranks.all_reduce(views);
  });
}

crossdock_status crossdock_group_reduce_scatter(crossdock_group* group,
                                                const crossdock_tensor* input,
                                                const crossdock_tensor* out) {
  return guarded([&] {
    Group& ranks = handle("group", group).shared->open();
    TensorView from;
    TensorView to;
    capi::convert({ranks, "reduce_scatter"}, [&] {
      from = capi::to_view("input", input);
      to = capi::to_view("out", out);
    });
    ranks.reduce_scatter(from, to);
  });
}

void crossdock_group_destroy(crossdock_group* group) {
  if (!capi::is_usable(group) || group->belongs_to_mesh) return;
  group->shared->is_destroyed = true;
  group->shared->group->leave(comm::kPlainLeave);
  capi::destroy(group);
}

struct crossdock_bootstrap : crossdock::capi::Handle<crossdock_bootstrap> {
  explicit crossdock_bootstrap(crossdock::SocketsOptions options) : sockets(std::move(options)) {}

  crossdock::SocketsBootstrap sockets;
};

crossdock_status crossdock_bootstrap_open(const crossdock_bootstrap_config* config,
                                          crossdock_bootstrap** bootstrap) {
  return guarded([&] {
    crossdock_bootstrap*& made =
        pointee("bootstrap", bootstrap);  // checked before anything is made
    made = new crossdock_bootstrap(capi::to_options(config));
  });
}

crossdock_status crossdock_bootstrap_blob(const crossdock_bootstrap* bootstrap, const void** blob,
                                          int64_t* num_bytes) {
  return guarded([&] {
    const std::span<const std::byte> bytes = handle("bootstrap", bootstrap).sockets.blob();
    const void*& first = pointee("blob", blob);
    pointee("num_bytes", num_bytes) = std::ssize(bytes);
    first = bytes.data();
  });
}

void crossdock_bootstrap_destroy(crossdock_bootstrap* bootstrap) {
  capi::destroy(bootstrap);
}

crossdock_status crossdock_group_join(crossdock_bootstrap* bootstrap,
                                      const crossdock_join_args* args,
                                      const crossdock_group_config* config,
                                      crossdock_group** group) {
  return guarded([&] {
    SocketsBootstrap& sockets = handle("bootstrap", bootstrap).sockets;
    crossdock_group*& made = pointee("group", group);
    const GroupOptions options = capi::to_settings(config).group;
    const auto join = capi::read_struct("crossdock_join_args", args);
    made = capi::make_group(sockets.join(capi::to_blobs(join), join.rank), options).release();
  });
}

crossdock_status crossdock_group_from_environment(const crossdock_bootstrap_config* bootstrap,
                                                  const crossdock_group_config* config,
                                                  crossdock_group** group) {
  return guarded([&] {
    crossdock_group*& made = pointee("group", group);
    const GroupOptions options = capi::to_settings(config).group;
    made =
        capi::make_group(make_sockets_communicator(capi::to_options(bootstrap)), options).release();
  });
}
