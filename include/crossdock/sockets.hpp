#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crossdock/extend/communicator.hpp"

namespace crossdock {

struct SocketsOptions {
  int64_t chunk_bytes = int64_t{256} << 10;  // largest data frame between nodes; at most 1 MiB
  /// Bytes that a rank buffers for each rank on another node. Must be identical on every rank.
  int64_t window_bytes = int64_t{1} << 20;
  int ranks_per_node = 0;  // > 0: ranks per simulated node, for tests; 0: detected
  /// Numeric address on which to listen. Default: CROSSDOCK_SOCKETS_ADDRESS; else the address of
  /// the interface that leads to MASTER_ADDR; else that of the default route; else the loopback
  /// address.
  std::string address{};
  /// Time for all processes to take part when a communicator or a subgroup is made. Default:
  /// CROSSDOCK_ARRIVAL_DEADLINE (seconds), else 600 s.
  std::optional<std::chrono::nanoseconds> setup_deadline{};
  /// (optional) Called at least every 100 ms by the waiting thread during a wait. If it returns
  /// true, the wait ends with Error(kCommunication), which the peers get too. Must not throw.
  std::function<bool()> interrupt{};
  /// (optional) Called once while a communicator is made if that has waited for other ranks for
  /// `notice_after`. Calls of a group have GroupOptions::on_wait.
  OnWait on_wait{};
  std::chrono::nanoseconds notice_after = std::chrono::seconds(3);
};

/// Connections that have been refused since the communicator's world was joined. A world of one
/// node stops listening once it is joined.
struct SocketsCounters {
  int64_t refused_connections = 0;  // no valid secret, another version or job, or silent
  int64_t malformed_frames = 0;     // not a frame of this protocol, or oversized
};

/// One process's part in making a communicator from blobs. The constructor opens a listening socket
/// and a memory file. Give the blob of every process to every process, by any means, and call join:
///
///   SocketsBootstrap bootstrap;
///   std::vector<std::vector<std::byte>> blobs = my_all_gather(bootstrap.blob());
///   Group group(bootstrap.join(blobs, rank));
///
/// Blobs contain a secret: whoever knows a blob can connect to its process.
class CROSSDOCK_API SocketsBootstrap {
 public:
  explicit SocketsBootstrap(SocketsOptions options = {});
  ~SocketsBootstrap();
  SocketsBootstrap(const SocketsBootstrap&) = delete;
  SocketsBootstrap& operator=(const SocketsBootstrap&) = delete;

  /// About 100 bytes: process, address, secret, version.
  std::span<const std::byte> blob() const;

  /// Makes the communicator. `blobs` [P] holds the blobs of all ranks in rank order; blobs[rank] is
  /// this process's own. Collective, with a deadline. May be called once. Throws kInvalidArgument
  /// if a blob is damaged, kMismatch if it is from another version, kTimeout if a rank does not
  /// arrive.
  std::unique_ptr<Communicator> join(std::span<const std::vector<std::byte>> blobs, int rank);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// This process's place in its job, and how its processes find each other.
struct SocketsLaunch {
  int rank = 0;
  int size = 1;
  std::string master_address = "127.0.0.1";  // host of rank 0: a name or an address
  int master_port = 0;
  std::string job{};  // identical on every rank of a job; tells jobs on neighbouring ports apart
};

/// The launch that the environment describes: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
/// (torchrun and others), or SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST and
/// SLURM_JOB_ID (srun). CROSSDOCK_JOB, if set, becomes part of `job`. Empty if the environment
/// describes no launch; throws kInvalidArgument if the description is incomplete or has invalid
/// numbers.
CROSSDOCK_API std::optional<SocketsLaunch> sockets_launch_from_environment();

/// A communicator of the processes of `launch`, which exchange their blobs through a small store in
/// the process of rank 0. The store listens on the first free port of the 16 starting at
/// master_port (torchrun occupies master_port itself) until all processes have joined. Collective.
CROSSDOCK_API std::unique_ptr<Communicator> make_sockets_communicator(const SocketsLaunch& launch,
                                                                      SocketsOptions options = {});

/// As above, for the launch that the environment describes. Throws kUnsupported if there is none.
CROSSDOCK_API std::unique_ptr<Communicator> make_sockets_communicator(SocketsOptions options = {});

/// The counters of a sockets communicator or of a subgroup of one; throws kInvalidArgument for any
/// other communicator.
CROSSDOCK_API SocketsCounters sockets_counters(const Communicator& communicator);

/// Communicator::note() of a sockets communicator, e.g. that ranks on one machine cannot open each
/// other's memory and use TCP instead. Throws as sockets_counters does.
CROSSDOCK_API std::string sockets_note(const Communicator& communicator);

}  // namespace crossdock
