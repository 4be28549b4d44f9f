// A group over the program's own MPI_Comm.

#include <mpi.h>

#include <crossdock/crossdock.hpp>
#include <cstdio>

namespace {

// Returns whether all ranks of the group have met.
bool meet(MPI_Comm comm) {
  using namespace crossdock;
  int rank = -1;
  MPI_Comm_rank(comm, &rank);
  Group group(make_mpi_communicator(&comm));
  const Agreement met = group.agree(
      {.operation = "meet", .body = std::as_bytes(std::span(&rank, 1)), .under_way = false});
  for (int r = 0; r < group.size(); ++r) {
    if (*reinterpret_cast<const int*>(met.body(r).data()) != r) return false;
  }
  return group.rank() == rank;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int status = 1;
  try {
    if (meet(MPI_COMM_WORLD)) status = 0;
  } catch (const crossdock::Error& error) {
    std::printf("%s\n", error.what());
  }
  MPI_Finalize();
  return status;
}
