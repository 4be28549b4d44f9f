// main() of GoogleTest programs whose ranks are MPI processes. Every process runs every test; rank
// 0 prints as usual, the others only their failures. If any rank fails, the program fails on all.
//
// A test under MPI must use EXPECT, not ASSERT, before collective calls: a rank that returns early
// leaves the others in them.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>

#include "support/failure_printer.hpp"

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  ::testing::InitGoogleTest(&argc, argv);
  crossdock::testing::print_as_rank(rank);
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0 && failed != 0) std::fprintf(stderr, "some rank has failed\n");
  MPI_Finalize();
  return failed;
}
