// Groups of processes, however they are started.
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "capi/group_options.hpp"
#include "capi/handles.hpp"
#include "capi/running_calls.hpp"
#include "capi/status.hpp"
#include "capi/structs.hpp"
#include "crossdock/sockets.hpp"

struct crossdock_bootstrap : crossdock::capi::Handle<crossdock_bootstrap> {
  explicit crossdock_bootstrap(crossdock::SocketsOptions options) : sockets(std::move(options)) {}

  crossdock::SocketsBootstrap sockets;
};

namespace crossdock::capi {
namespace {

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
