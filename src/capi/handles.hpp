#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/check.hpp"
#include "core/process.hpp"
#include "crossdock/crossdock.h"
#include "crossdock/crossdock.hpp"

namespace crossdock::capi {

/// Base of the objects behind the C API's handles. Recognises pointers to other objects and objects
/// of a parent process: callers in untyped languages confuse handles, and forked children destroy
/// handles they inherited.
template <typename Object>
class Handle {
 public:
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool is_of_this_kind() const { return kind_ == &kind_of_object; }
  bool is_of_parent() const { return generation_ != fork_generation(); }

 protected:
  Handle() = default;
  ~Handle() { kind_ = nullptr; }

 private:
  inline static char kind_of_object = 0;  // its address identifies the type

  const void* volatile kind_ = &kind_of_object;  // volatile: the destructor's store is not removed
  const uint64_t generation_ = fork_generation();
};

template <typename Object>
concept HandleObject =
    std::derived_from<std::remove_const_t<Object>, Handle<std::remove_const_t<Object>>>;

/// The object behind a handle. Throws if there is none that this process can use.
template <HandleObject Object>
Object& handle(const char* name, Object* given) {
  CROSSDOCK_CHECK(given != nullptr, name, " must not be NULL");
  CROSSDOCK_CHECK(given->is_of_this_kind(), name,
                  " must be a handle of its own type that has not been destroyed");
  if (given->is_of_parent()) {
    throw Error(ErrorCode::kUnsupported,
                concat(name, " belongs to the parent process; a forked child cannot use it"));
  }
  return *given;
}

template <HandleObject Object>
bool is_usable(const Object* given) {
  return given != nullptr && given->is_of_this_kind() && !given->is_of_parent();
}

/// Destroys the object behind a handle, unless this process must not touch it.
template <HandleObject Object>
void destroy(Object* given) noexcept {
  if (is_usable(given)) delete given;
}

/// The object behind a pointer that must not be null.
template <typename Value>
Value& pointee(const char* name, Value* given) {
  CROSSDOCK_CHECK(given != nullptr, name, " must not be NULL");
  return *given;
}

// The objects behind the handles of the C API.

/// A group and the objects made with it share ownership of the group, so handles may be destroyed
/// in any order.
struct SharedGroup {
  explicit SharedGroup(std::shared_ptr<Group> group_in)
      : group(std::move(group_in)),
        communicator(group->communicator().name()),
        note(group->communicator().note()) {}

  /// Throws if the handle of the group has been destroyed: this rank has left.
  Group& open() const {
    CROSSDOCK_CHECK(!is_destroyed, "the group has been destroyed; destroy it after the last call");
    return *group;
  }

  std::shared_ptr<Group> group;
  std::string communicator;  // its name
  std::string note;          // of the communicator
  std::atomic<bool> is_destroyed = false;
};
using GroupPtr = std::shared_ptr<SharedGroup>;

/// A mesh, shared by its handle and the groups obtained from it.
struct SharedMesh {
  SharedMesh(GroupPtr world_in, const MeshShape& shape)
      : world(std::move(world_in)), mesh(world->open(), shape) {}

  GroupPtr world;
  Mesh mesh;
};

}  // namespace crossdock::capi

struct crossdock_group : crossdock::capi::Handle<crossdock_group> {
  explicit crossdock_group(crossdock::capi::GroupPtr shared_in) : shared(std::move(shared_in)) {}

  crossdock::capi::GroupPtr shared;
  bool belongs_to_mesh = false;  // the mesh destroys it
};

struct crossdock_mesh : crossdock::capi::Handle<crossdock_mesh> {
  crossdock_mesh(const crossdock::MeshLayout& layout_in,
                 std::shared_ptr<crossdock::capi::SharedMesh> mesh)
      : layout(layout_in), shared(std::move(mesh)) {}

  crossdock::MeshLayout layout;
  std::shared_ptr<crossdock::capi::SharedMesh> shared;  // null: lists of ranks only
  std::vector<std::unique_ptr<crossdock_group>> groups{};
};

struct crossdock_dispatcher : crossdock::capi::Handle<crossdock_dispatcher> {
  crossdock_dispatcher(crossdock::capi::GroupPtr group_in, const crossdock::DispatchConfig& config,
                       const char* strategy_name)
      : group(std::move(group_in)), dispatcher(group->open(), config, strategy_name) {}

  crossdock::capi::GroupPtr group;
  crossdock::Dispatcher dispatcher;
  std::optional<crossdock::Error> refusal{};  // why the first plan refuses the configuration
  crossdock::Stream stream{};                 // of the device options
  mutable std::string strategy{};             // its name, once requested
};

struct crossdock_plan : crossdock::capi::Handle<crossdock_plan> {
  explicit crossdock_plan(crossdock::capi::GroupPtr group_in) : group(std::move(group_in)) {}

  crossdock::capi::GroupPtr group;
  crossdock::Plan plan;
};

struct crossdock_pending : crossdock::capi::Handle<crossdock_pending> {
  explicit crossdock_pending(const crossdock_dispatcher& begun_by)
      : group(begun_by.group), dispatcher(&begun_by) {}

  crossdock::capi::GroupPtr group;
  const crossdock_dispatcher* dispatcher;  // only it may finish the call
  std::variant<crossdock::Pending<crossdock::DispatchResult>,
               crossdock::Pending<crossdock::OwnedTensor>>
      call;
};

struct crossdock_experts : crossdock::capi::Handle<crossdock_experts> {
  explicit crossdock_experts(const crossdock::ExpertsConfig& config) : experts(config) {}

  crossdock::Experts experts;
};

struct crossdock_experts_saved : crossdock::capi::Handle<crossdock_experts_saved> {
  crossdock::ExpertsSaved saved;
};

namespace crossdock::capi {

/// The groups of a layer other than its own; null if not given.
struct LayerGroups {
  GroupPtr counting;
  GroupPtr sequences;
  GroupPtr replicated;
};

inline Group* open_or_null(const GroupPtr& group) {
  return group ? &group->open() : nullptr;
}

}  // namespace crossdock::capi

struct crossdock_layer : crossdock::capi::Handle<crossdock_layer> {
  crossdock_layer(crossdock::capi::GroupPtr group_in, crossdock::capi::LayerGroups others_in,
                  const crossdock::MoeLayerConfig& config)
      : group(std::move(group_in)),
        others(std::move(others_in)),
        layer(group->open(), config,
              {.counting_group = crossdock::capi::open_or_null(others.counting),
               .sequence_group = crossdock::capi::open_or_null(others.sequences),
               .replicated_over = crossdock::capi::open_or_null(others.replicated)}) {}

  crossdock::capi::GroupPtr group;
  crossdock::capi::LayerGroups others;
  crossdock::MoeLayer layer;
  std::optional<crossdock::Error> refusal{};  // why the first forward refuses the configuration
  crossdock::Stream stream{};                 // of the device options
};

struct crossdock_layer_saved : crossdock::capi::Handle<crossdock_layer_saved> {
  explicit crossdock_layer_saved(const crossdock_layer& layer)
      : group(layer.group), stream(layer.stream) {}

  /// The decision with its numbers in host memory. Waits for the GPU if they are there.
  crossdock::MoeDecision decision_on_host() const { return saved.decision.on_host(stream); }

  crossdock::capi::GroupPtr group;
  crossdock::Stream stream;  // of the forward
  crossdock::MoeSaved saved{};
};

struct crossdock_job_plan : crossdock::capi::Handle<crossdock_job_plan> {
  explicit crossdock_job_plan(crossdock::JobPlan plan_in) : plan(std::move(plan_in)) {}

  crossdock::JobPlan plan;
};

/// Memory that a call returned to the caller.
struct crossdock_memory : crossdock::capi::Handle<crossdock_memory> {
  crossdock_memory(crossdock::capi::GroupPtr group_in, std::shared_ptr<const void> owner_in)
      : group(std::move(group_in)), owner(std::move(owner_in)) {}

  crossdock::capi::GroupPtr group;
  std::shared_ptr<const void> owner;
  crossdock::Device device{};
  crossdock::Stream stream{};  // in which the memory was allocated
};
