#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/row_transport.hpp"

namespace crossdock::cuda {
namespace {

// Copies with kernels: a driver copy queued behind a barrier could keep other ranks from launching
// theirs.
class PeerCopies final : public RowTransport {
 public:
  void run(const GpuCall& call, size_t first_entry,
           std::span<const RowTransfer> transfers) override {
    const int P = call.rank().group().size();
    const Operation operation = transfers[0].operation;
    launch_barrier(call.signals(), operation, call.stream());
    for (size_t i = 0; i < transfers.size(); ++i) {
      const RowTransfer& transfer = transfers[i];
      const std::byte* sent[kMaxPeers] = {};
      call.reach(first_entry + i, sent);
      for (int p = 0; p < P; ++p) {
        const RowTraffic::Part& part = transfer.traffic.parts[static_cast<size_t>(p)];
        launch_move_rows({.from = sent[p] + part.peer_begin * transfer.row_bytes,
                          .from_index = nullptr,
                          .to = transfer.recv + part.recv_begin * transfer.row_bytes,
                          .to_index = nullptr,
                          .num_rows = part.recv_count,
                          .row_bytes = transfer.row_bytes,
                          .signals = call.signals().state},
                         call.stream());
      }
    }
    launch_barrier(call.signals(), operation, call.stream());
  }
};

}  // namespace

std::unique_ptr<RowTransport> make_peer_copies() {
  return std::make_unique<PeerCopies>();
}

}  // namespace crossdock::cuda
