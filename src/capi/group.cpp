#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "capi/callback_communicator.hpp"
#include "capi/collective.hpp"
#include "capi/group_options.hpp"
#include "capi/running_calls.hpp"
#include "capi/status.hpp"
#include "capi/structs.hpp"
#include "capi/tensors.hpp"
#include "comm/failure.hpp"

namespace crossdock::capi {

std::optional<std::chrono::nanoseconds> to_deadline(const char* name, double seconds) {
  // Nanoseconds overflow beyond this; 100 years is as good as no deadline.
  constexpr double kMostSeconds = 100.0 * 366 * 24 * 3600;
  CROSSDOCK_CHECK(seconds >= 0 && seconds <= kMostSeconds, name, " must be in [0, ", kMostSeconds,
                  "] seconds, got ", seconds);
  if (seconds == 0) return std::nullopt;
  return std::chrono::nanoseconds(std::llround(seconds * 1e9));
}

OnWait to_on_wait(void (*on_wait)(void* context, const crossdock_wait_notice* notice),
                  void* context) {
  if (on_wait == nullptr) return {};
  return [on_wait, context](const WaitNotice& notice) {
    if (have_calls_ended()) return;
    const auto to_seconds = [](std::chrono::nanoseconds time) {
      return std::chrono::duration<double>(time).count();
    };
    const std::string text = notice.text();
    auto given = default_struct<crossdock_wait_notice>();
    given.rank = notice.rank;
    given.size = notice.size;
    given.awaited = notice.awaited.data();
    given.num_awaited = static_cast<int32_t>(notice.awaited.size());
    given.sequence = notice.sequence;
    given.operation = notice.operation.c_str();
    given.waited_s = to_seconds(notice.waited);
    given.left_s = to_seconds(notice.left);
    given.text = text.c_str();
    call_back([&] { on_wait(context, &given); });
  };
}

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

std::unique_ptr<crossdock_group> make_group(std::unique_ptr<Communicator> communicator,
                                            const GroupOptions& options) {
  return make_group(std::make_unique<Group>(std::move(communicator), options));
}

std::unique_ptr<crossdock_group> make_group(std::unique_ptr<Group> group) {
  return std::make_unique<crossdock_group>(std::make_shared<SharedGroup>(std::move(group)));
}

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
