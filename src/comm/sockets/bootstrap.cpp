// From blobs to a communicator, for processes that a launcher has started.
#include <algorithm>
#include <atomic>
#include <charconv>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "comm/sockets/communicator.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/endpoint.hpp"
#include "comm/sockets/launch.hpp"
#include "comm/sockets/node_memory.hpp"
#include "comm/sockets/socket.hpp"
#include "comm/sockets/store.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/hash.hpp"
#include "core/process.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/sockets.hpp"

namespace crossdock {

bool mpi_is_launched() {
  // Open MPI; PMIx (prte, Slurm); PMI-1/2 (MPICH, Intel MPI, Slurm).
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    if (!environment_variable(variable).empty()) return true;
  }
  return false;
}

namespace comm {
namespace {

int number_in(const char* name, int lowest, int highest) {
  const std::string text = environment_variable(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  CROSSDOCK_CHECK(error == std::errc() && end == text.data() + text.size() && value >= lowest &&
                      value <= highest,
                  name, " must be a number from ", lowest, " to ", highest, ", got '", text, "'");
  return value;
}

constexpr int kMaxRanks = 1 << 20;
constexpr int kMaxPort = 65535;

SocketsLaunch launch_of_torchrun() {
  for (const char* name : {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    CROSSDOCK_CHECK(!environment_variable(name).empty(), "RANK is set, so ", name,
                    " must be set too");
  }
  SocketsLaunch launch;
  launch.size = number_in("WORLD_SIZE", 1, kMaxRanks);
  launch.rank = number_in("RANK", 0, launch.size - 1);
  launch.master_address = environment_variable("MASTER_ADDR");
  launch.master_port = number_in("MASTER_PORT", 1, kMaxPort);
  // torchrun itself listens there and would complain about unknown requests.
  if (environment_variable("TORCHELASTIC_USE_AGENT_STORE") == "True" &&
      launch.master_port < kMaxPort) {
    ++launch.master_port;
  }
  launch.job = concat(environment_variable("CROSSDOCK_JOB"), "/",
                      environment_variable("TORCHELASTIC_RUN_ID"), "/",
                      environment_variable("TORCHELASTIC_RESTART_COUNT"));
  return launch;
}

SocketsLaunch launch_of_slurm() {
  constexpr int kFirstPort = 20000;
  constexpr int kNumPorts = 12000;  // below the ports that Linux gives to outgoing connections
  SocketsLaunch launch;
  // A step may have fewer tasks than its job.
  const bool has_step_size = !environment_variable("SLURM_STEP_NUM_TASKS").empty();
  launch.size = number_in(has_step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", 1, kMaxRanks);
  launch.rank = number_in("SLURM_PROCID", 0, launch.size - 1);
  launch.master_address = environment_variable("MASTER_ADDR").empty()
                              ? first_host(environment_variable("SLURM_STEP_NODELIST"))
                              : environment_variable("MASTER_ADDR");
  launch.job =
      concat(environment_variable("SLURM_JOB_ID"), ".", environment_variable("SLURM_STEP_ID"));
  const uint64_t hash = hash_bytes(std::as_bytes(std::span(launch.job)));
  launch.master_port =
      environment_variable("MASTER_PORT").empty()
          ? kFirstPort + static_cast<int>(hash % kNumPorts) / kNumStorePorts * kNumStorePorts
          : number_in("MASTER_PORT", 1, kMaxPort);
  return launch;
}

// Distinguishes jobs on neighbouring ports, and the communicators that a process makes in turn.
uint64_t key_of(const SocketsLaunch& launch, uint64_t round) {
  const std::string text =
      concat(launch.job, ";", launch.master_port, ";", launch.size, ";", round);
  return hash_bytes(std::as_bytes(std::span(text)));
}

}  // namespace

std::string first_host(const std::string& node_list) {
  std::string host;
  for (size_t i = 0; i < node_list.size() && node_list[i] != ','; ++i) {
    if (node_list[i] != '[') {
      host += node_list[i];
      continue;
    }
    const size_t close = node_list.find(']', i);
    if (close == std::string::npos) break;
    const size_t number_end = node_list.find_first_of("-,]", i + 1);
    host += node_list.substr(i + 1, number_end - i - 1);
    i = close;
  }
  return host;
}

}  // namespace comm

std::optional<SocketsLaunch> sockets_launch_from_environment() {
  if (!environment_variable("RANK").empty()) return comm::launch_of_torchrun();
  // A batch script has the first of these but not the second: it is not a rank.
  if (!environment_variable("SLURM_PROCID").empty() &&
      !environment_variable("SLURM_STEP_NODELIST").empty()) {
    return comm::launch_of_slurm();
  }
  return std::nullopt;
}

std::unique_ptr<Communicator> make_sockets_communicator(const SocketsLaunch& launch,
                                                        SocketsOptions options) {
  CROSSDOCK_CHECK(launch.size > 0 && launch.rank >= 0 && launch.rank < launch.size,
                  "the rank must be from 0 to size - 1, got rank ", launch.rank, " of ",
                  launch.size);
  CROSSDOCK_CHECK(
      launch.size == 1 || (launch.master_port > 0 && launch.master_port <= comm::kMaxPort),
      "master_port must be from 1 to ", comm::kMaxPort, ", got ", launch.master_port);
  // Every process makes its communicators in the same order.
  static std::atomic<uint64_t> num_made = 0;
  if (options.address.empty() && environment_variable("CROSSDOCK_SOCKETS_ADDRESS").empty()) {
    const std::string local = comm::interface_towards(launch.master_address).host_text();
    options.address = local;
  }
  comm::StoreArgs store{
      .host = launch.master_address,
      .port = launch.master_port,
      .key = comm::key_of(launch, num_made++),
      .rank = launch.rank,
      .size = launch.size,
      .blob = {},
      .deadline = options.setup_deadline.value_or(comm::default_arrival_deadline()),
      .interrupt = options.interrupt,
      .on_wait = options.on_wait,
      .notice_after = options.notice_after};
  std::optional<SocketsBootstrap> bootstrap;
  try {
    bootstrap.emplace(std::move(options));
  } catch (const Error& error) {
    comm::refuse_exchange(store, error);
    throw;
  }
  store.blob.assign(bootstrap->blob().begin(), bootstrap->blob().end());
  return bootstrap->join(comm::exchange_blobs(store), launch.rank);
}

std::unique_ptr<Communicator> make_sockets_communicator(SocketsOptions options) {
  const auto launch = sockets_launch_from_environment();
  if (!launch) {
    throw Error(ErrorCode::kUnsupported,
                "the environment names no rank; start the processes with torchrun or srun, or set "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
  }
  return make_sockets_communicator(*launch, std::move(options));
}

namespace comm {
namespace {

constexpr std::string_view kWorld = "world";  // names the communicator to be made

void check_options(const SocketsOptions& options) {
  CROSSDOCK_CHECK(options.chunk_bytes > 0 && options.chunk_bytes <= kMaxPayloadBytes,
                  "chunk_bytes must be from 1 to ", kMaxPayloadBytes, ", got ",
                  options.chunk_bytes);
  constexpr int64_t kMaxWindow = int64_t{1} << 30;
  CROSSDOCK_CHECK(options.window_bytes > 0 && options.window_bytes <= kMaxWindow,
                  "window_bytes must be from 1 to ", kMaxWindow, ", got ", options.window_bytes);
  CROSSDOCK_CHECK(options.ranks_per_node >= 0,
                  "ranks_per_node must be 0 (detected) or positive, got ", options.ranks_per_node);
}

SocketsWorld decode_world(std::span<const std::vector<std::byte>> blobs, int rank) {
  SocketsWorld world{.rank = rank, .blobs = {}, .id = kHashStart};
  std::map<std::string, size_t> rank_of_blob;
  for (size_t i = 0; i < blobs.size(); ++i) {
    const std::string bytes(reinterpret_cast<const char*>(blobs[i].data()), blobs[i].size());
    const auto [first, is_new] = rank_of_blob.emplace(bytes, i);
    CROSSDOCK_CHECK(is_new, "blobs ", first->second, " and ", i,
                    " must differ; every rank needs a bootstrap of its own");
    DecodedBlob decoded = decode_blob(blobs[i]);
    if (!decoded.blob) {
      throw Error(decoded.is_foreign_version ? ErrorCode::kMismatch : ErrorCode::kInvalidArgument,
                  concat("the blob of rank ", i, " ", decoded.flaw,
                         decoded.is_foreign_version ? "; all ranks must run the same build" : ""),
                  {.culprit = static_cast<int>(i)});
    }
    world.blobs.push_back(*decoded.blob);
    world.id = hash_bytes(blobs[i], world.id);
  }
  for (size_t i = 0; i < world.blobs.size(); ++i) {
    const SocketsBlob& blob = world.blobs[i];
    const SocketsBlob& first = world.blobs.front();
    if (blob.window_bytes == first.window_bytes && blob.ranks_per_node == first.ranks_per_node) {
      continue;
    }
    throw Error(ErrorCode::kMismatch,
                concat("rank ", i, " has window_bytes=", blob.window_bytes, " and ranks_per_node=",
                       blob.ranks_per_node, " where rank 0 has ", first.window_bytes, " and ",
                       first.ranks_per_node, "; these options must be identical on every rank"),
                {.culprit = static_cast<int>(i)});
  }
  return world;
}

uint64_t id_named(const SocketsWorld& world, std::string_view name) {
  const uint64_t hash = hash_bytes(std::as_bytes(std::span(name)), world.id);
  return hash == 0 ? 1 : hash;  // 0 is no communicator
}

/// Links between all ranks of the world.
Links::Args links_of_world(const std::shared_ptr<Endpoint>& endpoint, std::string_view name,
                           const Topology& topology, std::chrono::nanoseconds deadline) {
  const SocketsWorld& world = endpoint->world();
  Links::Args args{.endpoint = endpoint,
                   .comm_id = id_named(world, name),
                   .world_ranks = {},
                   .rank = world.rank,
                   .topology = topology,
                   .directories = {},
                   .deadline = deadline};
  for (int rank = 0; rank < world.size(); ++rank) args.world_ranks.push_back(rank);
  args.directories.resize(world.blobs.size());
  return args;
}

std::vector<ProcessIdentity> processes_of(const SocketsWorld& world) {
  std::vector<ProcessIdentity> processes;
  for (const SocketsBlob& blob : world.blobs) processes.push_back(blob.process);
  return processes;
}

/// Sends `mine` to rank 0; returns the bytes of all ranks on rank 0, [P][size of mine], nothing
/// elsewhere.
std::vector<uint8_t> gather_at_root(Communicator& star, std::span<const uint8_t> mine,
                                    const WaitContext& wait) {
  const auto p = static_cast<size_t>(star.size());
  const auto send = std::make_shared<std::vector<uint8_t>>(mine.begin(), mine.end());
  const bool is_root = star.rank() == 0;
  const auto recv = std::make_shared<std::vector<uint8_t>>(is_root ? p * mine.size() : 0);
  std::vector<int64_t> send_offsets(p + 1, std::ssize(mine));
  send_offsets.front() = 0;
  std::vector<int64_t> recv_offsets(p + 1, 0);
  for (size_t rank = 0; is_root && rank <= p; ++rank) {
    recv_offsets[rank] = static_cast<int64_t>(rank) * std::ssize(mine);
  }
  star.all_to_all_v(
      {reinterpret_cast<std::byte*>(send->data()), std::ssize(*send), send}, send_offsets,
      {reinterpret_cast<std::byte*>(recv->data()), std::ssize(*recv), recv}, recv_offsets, wait);
  return *recv;
}

/// Sends the values of rank 0 to all ranks; the others pass a vector of the same size.
void broadcast_from_root(Communicator& star, std::vector<int>& values, const WaitContext& wait) {
  const auto p = static_cast<size_t>(star.size());
  const auto num_bytes = static_cast<int64_t>(values.size() * sizeof(int));
  std::vector<int64_t> send_offsets(p + 1, 0);
  std::vector<int64_t> recv_offsets(p + 1, num_bytes);
  recv_offsets.front() = 0;
  std::shared_ptr<std::vector<int>> send = std::make_shared<std::vector<int>>();
  if (star.rank() == 0) {
    for (size_t rank = 0; rank < p; ++rank) {
      send->insert(send->end(), values.begin(), values.end());
      send_offsets[rank + 1] = static_cast<int64_t>(rank + 1) * num_bytes;
    }
  }
  const auto recv = std::make_shared<std::vector<int>>(values.size());
  star.all_to_all_v({reinterpret_cast<std::byte*>(send->data()), send_offsets.back(), send},
                    send_offsets, {reinterpret_cast<std::byte*>(recv->data()), num_bytes, recv},
                    recv_offsets, wait);
  values = *recv;
}

/// Tells the ranks that are past this part of the set-up, and wait for this one in the next, why it
/// gives up: those of its node by its directory, the others by a message.
void refuse_world(const std::shared_ptr<Endpoint>& endpoint, const Failure& failure) {
  const SocketsWorld& world = endpoint->world();
  const uint64_t comm_id = id_named(world, kWorld);
  const ControlMessage message = abort_message(failure);
  endpoint->directory().refuse(comm_id, message);
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank != world.rank) endpoint->send_control(comm_id, rank, message);
  }
  flush_in_background(endpoint);
}

/// All ranks learn which of them share a node. Uses TCP through rank 0, and thus also finds out
/// whether all ranks have arrived.
Topology agree_on_nodes(const std::shared_ptr<Endpoint>& endpoint, const ReachablePeers& peers,
                        std::chrono::nanoseconds deadline) {
  const SocketsWorld& world = endpoint->world();
  const Topology apart = Topology::uniform(world.size(), 1);
  Links::Args args = links_of_world(endpoint, "join", apart, deadline);
  args.says_goodbye = false;  // it would connect all ranks to each other
  SocketsCommunicator star({.topology = apart, .processes = processes_of(world)},
                           std::make_unique<Links>(std::move(args)), /*note=*/"");
  const WaitContext wait{.operation = "join",
                         .sequence = 1,
                         .arrival = deadline,
                         .progress = deadline,
                         .on_wait = &endpoint->options().on_wait,
                         .notice_after = endpoint->options().notice_after};
  std::vector<int> nodes(world.blobs.size());
  try {
    const auto rows = gather_at_root(star, peers.reaches, wait);
    if (world.rank == 0) nodes = group_into_nodes(rows, world.size());
    broadcast_from_root(star, nodes, wait);
  } catch (const Error&) {
    if (star.failure()) refuse_world(endpoint, *star.failure());
    throw;
  }
  Topology found = Topology::from_node_ids(nodes);
  const int ranks_per_node = endpoint->options().ranks_per_node;
  if (ranks_per_node == 0) return found;
  Topology simulated = Topology::uniform(world.size(), ranks_per_node);
  for (size_t rank = 1; rank < nodes.size(); ++rank) {
    CROSSDOCK_CHECK(simulated.node_of_rank[rank] != simulated.node_of_rank[rank - 1] ||
                        found.node_of_rank[rank] == found.node_of_rank[rank - 1],
                    "ranks_per_node (", ranks_per_node, ") puts ranks ", rank - 1, " and ", rank,
                    " on one node, but they do not share memory");
  }
  return simulated;
}

std::unique_ptr<Communicator> join_world(const std::shared_ptr<Endpoint>& endpoint) {
  const SocketsWorld& world = endpoint->world();
  const auto deadline = endpoint->options().setup_deadline.value_or(default_arrival_deadline());
  ReachablePeers peers = find_reachable_peers(world);
  const Topology topology = agree_on_nodes(endpoint, peers, deadline);
  Links::Args args = links_of_world(endpoint, kWorld, topology, deadline);
  args.directories = std::move(peers.directories);
  auto communicator = std::make_unique<SocketsCommunicator>(
      Members{.topology = topology, .processes = processes_of(world)},
      std::make_unique<Links>(std::move(args)), std::move(peers.note));
  if (topology.num_nodes == 1) endpoint->stop_listening();
  return communicator;
}

}  // namespace
}  // namespace comm

struct SocketsBootstrap::State {
  SocketsOptions options;
  comm::Socket listener;
  std::unique_ptr<comm::Directory> directory;
  std::vector<std::byte> blob;
};

SocketsBootstrap::SocketsBootstrap(SocketsOptions options) : state_(std::make_unique<State>()) {
  comm::check_options(options);
  const comm::Secret secret = comm::make_secret();
  auto listener = comm::listen_at(comm::address_to_listen_at(options.address));
  if (!listener) throw Error(ErrorCode::kCommunication, "there is no free port to listen on");
  state_->directory = std::make_unique<comm::Directory>(secret);
  comm::SocketsBlob blob;
  blob.process = comm::identify_this_process();
  blob.machine = comm::identify_this_machine();
  blob.address = comm::address_of(*listener);
  blob.directory = state_->directory->descriptor();
  blob.secret = secret;
  blob.window_bytes = options.window_bytes;
  blob.ranks_per_node = options.ranks_per_node;
  state_->blob = comm::encode(blob);
  state_->listener = std::move(*listener);
  state_->options = std::move(options);
}

SocketsBootstrap::~SocketsBootstrap() = default;

std::span<const std::byte> SocketsBootstrap::blob() const {
  return state_->blob;
}

std::unique_ptr<Communicator> SocketsBootstrap::join(std::span<const std::vector<std::byte>> blobs,
                                                     int rank) {
  CROSSDOCK_CHECK(state_->directory != nullptr, "join may be called once; make a new bootstrap");
  CROSSDOCK_CHECK(rank >= 0 && rank < std::ssize(blobs), "rank must be from 0 to ",
                  std::ssize(blobs) - 1, " for ", blobs.size(), " blobs, got ", rank);
  CROSSDOCK_CHECK(blobs[static_cast<size_t>(rank)] == state_->blob, "blob ", rank,
                  " must be this process's own; are the blobs in rank order?");
  comm::SocketsWorld world = comm::decode_world(blobs, rank);
  return comm::join_world(std::make_shared<comm::Endpoint>(std::move(state_->listener),
                                                           std::move(state_->directory),
                                                           std::move(world), state_->options));
}

}  // namespace crossdock
