#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/mpi/control.hpp"

namespace crossdock::comm {

/// What a rank that has left an engine's two communicators must still do: free them, which is safe
/// once all ranks have left in good order. No message is under way then, so MPI may give their
/// numbers to others.
struct MpiClosing {
  MPI_Comm data = MPI_COMM_NULL;
  MPI_Comm control = MPI_COMM_NULL;
  std::unique_ptr<MpiControl> channel;              // over `control`
  std::vector<std::optional<ControlMessage>> left;  // [P] goodbyes heard so far
  ControlMessage own_goodbye;                       // in `left` too
};

/// Keeps them until free_closed_communicators finds that all have left.
void free_when_all_have_left(MpiClosing closing);

/// Frees what can be freed. MPI calls that collective, but MPI libraries do not wait in it. Called
/// when communicators are made, where MPI may block anyway.
void free_closed_communicators();

/// Leaves the rest as it is; before MPI is finalised.
void give_up_closing();

}  // namespace crossdock::comm
