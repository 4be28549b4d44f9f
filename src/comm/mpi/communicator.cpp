#include "comm/mpi/communicator.hpp"

#include <utility>

#include "comm/exchange_arguments.hpp"
#include "comm/mpi/closing.hpp"
#include "comm/mpi/environment.hpp"
#include "comm/mpi/setup.hpp"
#include "comm/mpi/transfers.hpp"

namespace crossdock::comm {
namespace {

constexpr int kNumTags = 16384;  // MPI guarantees twice as many

int rank_in(MPI_Comm communicator) {
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  return rank;
}

}  // namespace

MpiCommunicator::MpiCommunicator(MPI_Comm data, MPI_Comm control, Members members,
                                 const MpiOptions& options)
    : PolledCommunicator(rank_in(data), std::move(members)),
      data_(data),
      control_communicator_(control),
      control_(std::make_unique<MpiControl>(control)),
      options_(options) {}

MpiCommunicator::~MpiCommunicator() {
  leave_quietly(kPlainLeave);
  try {
    close();
  } catch (const std::exception&) {
    // The MPI communicators are then not freed.
  }
}

void MpiCommunicator::close() {
  if (!mpi_is_running() || !is_clean()) return;
  const ControlMessage own = goodbye_message({});
  left()[static_cast<size_t>(rank())] = own;
  free_when_all_have_left({.data = data_,
                           .control = control_communicator_,
                           .channel = std::move(control_),
                           .left = std::move(left()),
                           .own_goodbye = own});
}

bool MpiCommunicator::is_open() const {
  return mpi_is_running();
}

void MpiCommunicator::note_failure() {
  note_mpi_failure();
}

std::unique_ptr<Transfers> MpiCommunicator::start(ExchangeArgs args, Traffic& traffic) {
  return std::make_unique<MpiTransfers>(
      MpiTransfers::Args{.communicator = data_,
                         .tag = static_cast<int>(args.number % kNumTags),
                         .lanes = std::move(args.lanes),
                         .memory = std::move(args.memory)},
      options_, traffic);
}

std::unique_ptr<Communicator> MpiCommunicator::subgroup(std::span<const int> ranks) {
  check_members(ranks, rank(), size());
  return make_subgroup({.parent = data_, .of = members(), .ranks = ranks}, options_);
}

}  // namespace crossdock::comm
