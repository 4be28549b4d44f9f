#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "capi/handles.hpp"

namespace crossdock::capi {

/// A crossdock_group_config as options of the C++ API.
struct GroupSettings {
  GroupOptions group{};
  std::optional<std::chrono::nanoseconds> setup_deadline{};
  std::optional<std::chrono::nanoseconds> setup_notice_after{};
  int ranks_per_node = 0;
};

/// A deadline in seconds; nullopt, the default, for 0.
std::optional<std::chrono::nanoseconds> to_deadline(const char* name, double seconds);

/// The callback of a config as that of the C++ API; empty if there is none.
OnWait to_on_wait(void (*on_wait)(void* context, const crossdock_wait_notice* notice),
                  void* context);

/// Throws Error(kInvalidArgument) if a field is invalid. `given` may be null.
GroupSettings to_settings(const crossdock_group_config* given);

std::unique_ptr<crossdock_group> make_group(std::unique_ptr<Communicator> communicator,
                                            const GroupOptions& options);
std::unique_ptr<crossdock_group> make_group(std::unique_ptr<Group> group);

}  // namespace crossdock::capi
