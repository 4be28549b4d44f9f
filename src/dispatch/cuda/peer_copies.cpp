#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/row_transport.hpp"

namespace crossdock::cuda {
namespace {

// Copies with kernels: a driver copy queued behind a barrier could keep other ranks from launching
// theirs.
class PeerCopies final : public RowTransport {
 public:
  explicit PeerCopies(CudaRank& rank) : rank_(rank) {}

  void run(const CudaRank::Agreed& agreed, size_t first_entry,
           std::span<const RowTransfer> transfers) override {
    const int P = rank_.group().size();
    const Operation operation = transfers[0].operation;
    launch_barrier(rank_.signals(), operation, rank_.stream());
    for (size_t i = 0; i < transfers.size(); ++i) {
      const RowTransfer& transfer = transfers[i];
      const std::byte* sent[kMaxPeers] = {};
      rank_.reach(agreed, first_entry + i, sent);
      for (int p = 0; p < P; ++p) {
        const RowTraffic::Part& part = transfer.traffic.parts[static_cast<size_t>(p)];
        launch_move_rows({.from = sent[p] + part.peer_begin * transfer.row_bytes,
                          .from_index = nullptr,
                          .to = transfer.recv + part.recv_begin * transfer.row_bytes,
                          .to_index = nullptr,
                          .num_rows = part.recv_count,
                          .row_bytes = transfer.row_bytes,
                          .signals = rank_.signals().state},
                         rank_.stream());
      }
    }
    launch_barrier(rank_.signals(), operation, rank_.stream());
  }

 private:
  CudaRank& rank_;
};

}  // namespace

std::unique_ptr<RowTransport> make_peer_copies(CudaRank& rank) {
  return std::make_unique<PeerCopies>(rank);
}

}  // namespace crossdock::cuda
