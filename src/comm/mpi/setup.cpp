#include "comm/mpi/setup.hpp"

#include <utility>
#include <vector>

#include "comm/mpi/closing.hpp"
#include "comm/mpi/communicator.hpp"
#include "comm/mpi/environment.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"

namespace crossdock::comm {
namespace {

constexpr int64_t kMaxChunkBytes = int64_t{1} << 30;  // MPI counts in int

MPI_Comm duplicate(MPI_Comm communicator) {
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(communicator, &copy), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

/// The lowest rank of `communicator` on this rank's node.
int lowest_rank_of_node(MPI_Comm communicator, int rank) {
  MPI_Comm node = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node),
            "MPI_Comm_split_type");
  int lowest = rank;
  check_mpi(MPI_Bcast(&lowest, 1, MPI_INT, 0, node), "MPI_Bcast");
  check_mpi(MPI_Comm_free(&node), "MPI_Comm_free");
  return lowest;
}

Members find_members(MPI_Comm communicator, int ranks_per_node) {
  int rank = 0;
  int size = 0;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  const int node = lowest_rank_of_node(communicator, rank);
  std::vector<int> nodes(static_cast<size_t>(size));
  check_mpi(MPI_Allgather(&node, 1, MPI_INT, nodes.data(), 1, MPI_INT, communicator),
            "MPI_Allgather");
  const ProcessIdentity self = identify_this_process();
  Members members;
  members.processes.resize(static_cast<size_t>(size));
  check_mpi(MPI_Allgather(&self, sizeof self, MPI_BYTE, members.processes.data(), sizeof self,
                          MPI_BYTE, communicator),
            "MPI_Allgather");
  members.topology =
      ranks_per_node > 0 ? Topology::uniform(size, ranks_per_node) : Topology::from_node_ids(nodes);
  return members;
}

// The parts of a communicator.
struct MpiParts {
  MPI_Comm data = MPI_COMM_NULL;
  MPI_Comm control = MPI_COMM_NULL;
  Members members{};
};

std::unique_ptr<Communicator> assemble(MpiParts parts, const MpiOptions& options) {
  return std::make_unique<MpiCommunicator>(parts.data, parts.control, std::move(parts.members),
                                           options);
}

CallLimits limits_of(const MpiOptions& options) {
  return {.deadline = options.setup_deadline.value_or(default_arrival_deadline()),
          .notice = OnceNotice(&options.on_wait, options.notice_after)};
}

// A communicator of these ranks of `communicator`. Called only by them.
MPI_Comm communicator_of(MPI_Comm communicator, const std::vector<int>& members) {
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group chosen = MPI_GROUP_NULL;
  MPI_Comm part = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(communicator, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &chosen),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(communicator, chosen, 0, &part), "MPI_Comm_create_group");
  MPI_Group_free(&chosen);
  MPI_Group_free(&all);
  check_mpi(MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return part;
}

// A communicator over a duplicate of `original`. Collective.
std::unique_ptr<Communicator> make_communicator(MPI_Comm original, const MpiOptions& options) {
  CROSSDOCK_CHECK(options.chunk_bytes > 0 && options.chunk_bytes <= kMaxChunkBytes,
                  "chunk_bytes must be from 1 to ", kMaxChunkBytes, ", got ", options.chunk_bytes);
  CROSSDOCK_CHECK(options.max_in_flight >= 2,
                  "max_in_flight must be at least 2 (one message each way), got ",
                  options.max_in_flight);
  CROSSDOCK_CHECK(options.ranks_per_node >= 0,
                  "ranks_per_node must be 0 (as MPI reports) or positive, got ",
                  options.ranks_per_node);
  return assemble(run_with_deadline<MpiParts>(
                      [original, ranks_per_node = options.ranks_per_node] {
                        free_closed_communicators();
                        const MPI_Comm data = duplicate(original);
                        return MpiParts{data, duplicate(data), find_members(data, ranks_per_node)};
                      },
                      "all processes to make a communicator", limits_of(options)),
                  options);
}

}  // namespace

std::unique_ptr<Communicator> make_subgroup(const MpiSubgroup& subgroup,
                                            const MpiOptions& options) {
  Members members = subset_of(subgroup.of, subgroup.ranks);
  return assemble(
      run_with_deadline<MpiParts>(
          [parent = subgroup.parent,
           ranks = std::vector<int>(subgroup.ranks.begin(), subgroup.ranks.end()),
           members = std::move(members)] {
            free_closed_communicators();
            const MPI_Comm data = communicator_of(parent, ranks);
            return MpiParts{data, duplicate(data), members};
          },
          concat(subgroup.ranks.size(), " processes to make a subgroup"), limits_of(options)),
      options);
}

std::unique_ptr<Communicator> make_world_communicator(const MpiOptions& options) {
  ensure_mpi_is_initialized();
  return make_communicator(MPI_COMM_WORLD, options);
}

std::unique_ptr<Communicator> make_communicator_over(const void* mpi_comm,
                                                     const MpiOptions& options) {
  CROSSDOCK_CHECK(mpi_comm != nullptr, "mpi_comm must point to an MPI_Comm, got null");
  CROSSDOCK_CHECK(mpi_is_running(),
                  "MPI must be initialised, and not finalised, before its communicators are used");
  return make_communicator(*static_cast<const MPI_Comm*>(mpi_comm), options);
}

}  // namespace crossdock::comm
