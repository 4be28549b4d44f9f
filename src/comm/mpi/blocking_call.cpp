#include "comm/mpi/blocking_call.hpp"

#include <mpi.h>

#include "comm/deadlines.hpp"
#include "comm/mpi/environment.hpp"
#include "core/check.hpp"

namespace crossdock::comm {

bool mpi_has_threads() {
  int level = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&level) == MPI_SUCCESS && level == MPI_THREAD_MULTIPLE;
}

void throw_abandoned_call(const std::string& what, std::chrono::nanoseconds waited) {
  note_mpi_is_stuck();
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  throw Error(ErrorCode::kTimeout,
              concat("process ", rank, " of ", size, ": waited ", to_seconds_text(waited), " for ",
                     what, "; are all of them running, and are the links between them up?"),
              {.culprit = -1, .sequence = 0, .operation = "set-up"});
}

WaitNotice notice_of_call(std::chrono::nanoseconds waited, std::chrono::nanoseconds deadline) {
  WaitNotice notice{
      .awaited = {}, .operation = "set-up", .waited = waited, .left = deadline - waited};
  MPI_Comm_rank(MPI_COMM_WORLD, &notice.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &notice.size);
  return notice;
}

}  // namespace crossdock::comm
