// Communicators for processes that a launcher has started.
#include "comm/sockets/launch.hpp"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <span>
#include <utility>

#include "comm/sockets/directory.hpp"
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

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

int number_in(const char* name, int lowest, int highest) {
  const std::string text = variable(name);
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
    CROSSDOCK_CHECK(!variable(name).empty(), "RANK is set, so ", name, " must be set too");
  }
  SocketsLaunch launch;
  launch.size = number_in("WORLD_SIZE", 1, kMaxRanks);
  launch.rank = number_in("RANK", 0, launch.size - 1);
  launch.master_address = variable("MASTER_ADDR");
  launch.master_port = number_in("MASTER_PORT", 1, kMaxPort);
  // torchrun itself listens there and would complain about unknown requests.
  if (variable("TORCHELASTIC_USE_AGENT_STORE") == "True" && launch.master_port < kMaxPort) {
    ++launch.master_port;
  }
  launch.job = concat(variable("CROSSDOCK_JOB"), "/", variable("TORCHELASTIC_RUN_ID"), "/",
                      variable("TORCHELASTIC_RESTART_COUNT"));
  return launch;
}

SocketsLaunch launch_of_slurm() {
  constexpr int kFirstPort = 20000;
  constexpr int kNumPorts = 12000;  // below the ports that Linux gives to outgoing connections
  SocketsLaunch launch;
  // A step may have fewer tasks than its job.
  const bool has_step_size = !variable("SLURM_STEP_NUM_TASKS").empty();
  launch.size = number_in(has_step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", 1, kMaxRanks);
  launch.rank = number_in("SLURM_PROCID", 0, launch.size - 1);
  launch.master_address = variable("MASTER_ADDR").empty()
                              ? first_host(variable("SLURM_STEP_NODELIST"))
                              : variable("MASTER_ADDR");
  launch.job = concat(variable("SLURM_JOB_ID"), ".", variable("SLURM_STEP_ID"));
  const uint64_t hash = hash_bytes(std::as_bytes(std::span(launch.job)));
  launch.master_port =
      variable("MASTER_PORT").empty()
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
  if (!comm::variable("RANK").empty()) return comm::launch_of_torchrun();
  // A batch script has the first of these but not the second: it is not a rank.
  if (!comm::variable("SLURM_PROCID").empty() && !comm::variable("SLURM_STEP_NODELIST").empty()) {
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
  if (options.address.empty() && comm::variable("CROSSDOCK_SOCKETS_ADDRESS").empty()) {
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

}  // namespace crossdock
