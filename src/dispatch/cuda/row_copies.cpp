#include <algorithm>
#include <vector>

#include "comm/agreement/items.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"
#include "core/process.hpp"
#include "crossdock/group.hpp"
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

namespace {

// The rows that two ranks exchange in one round.
struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;
};

RowRange range_of_round(int64_t begin, int64_t count, int64_t first, int64_t rows_per_part) {
  return {.begin = begin + std::min(first, count),
          .count = std::clamp<int64_t>(count - first, 0, rows_per_part)};
}

// One side of a round: rows on the device, and their bytes in host memory, by rank.
struct StagedSide {
  std::vector<RowRange> rows;       // [P]
  std::vector<int64_t> offsets{0};  // [P + 1] bytes in `staging`
  Buffer staging;

  void add(const RowRange& range, int64_t row_bytes) {
    rows.push_back(range);
    offsets.push_back(offsets.back() + range.count * row_bytes);
  }
  SharedBytes bytes() const { return {staging.data(), offsets.back(), staging.owner()}; }
};

/// Rows go to page-locked host memory, through the communicator, and from host memory to the
/// receiving GPU. They go in rounds, which bounds host memory by GroupOptions::staging_bytes. No
/// kernel waits for another rank.
class StagedCopies final : public RowTransport {
 public:
  explicit StagedCopies(CudaRank& rank) : rank_(rank) {}

  void check_usable(const GpuCall& call) const override {
    CROSSDOCK_CHECK(!is_capturing(call.stream()),
                    "GPUs that cannot reach each other's memory exchange rows through host memory, "
                    "which cannot be captured in a graph; give an NCCL communicator "
                    "(DeviceOptions::nccl_comm)");
  }

  void run(const GpuCall& call, size_t /*first_entry*/,
           std::span<const RowTransfer> transfers) override {
    for (const RowTransfer& transfer : transfers) exchange(call, transfer);
  }

 private:
  void exchange(const GpuCall& call, const RowTransfer& transfer) {
    const char* const operation = call.agreed().operation;
    const int64_t staging_bytes = rank_.group().options().staging_bytes;
    const int64_t rows_per_part =
        std::max<int64_t>(1, staging_bytes / (rank_.group().size() * transfer.row_bytes));
    const int64_t own = most_rows(transfer.traffic);
    const Agreement all = rank_.group().agree({.operation = operation,
                                               .config = concat("staging_bytes=", staging_bytes),
                                               .body = body_of(own),
                                               .under_way = true});
    int64_t most = 0;
    for (int p = 0; p < rank_.group().size(); ++p) most = std::max(most, item_of<int64_t>(all, p));
    for (int64_t first = 0; first < most; first += rows_per_part) {
      run_round(call, transfer, first, rows_per_part,
                rank_.group().wait_context(operation, all.sequence));
    }
  }

  // The largest number of rows that this rank sends to another.
  static int64_t most_rows(const RowTraffic& traffic) {
    int64_t most = 0;
    for (const RowTraffic::Part& part : traffic.parts) most = std::max(most, part.send_count);
    return most;
  }

  // Rows [first, first + rows_per_part) of every pair of ranks.
  void run_round(const GpuCall& call, const RowTransfer& transfer, int64_t first,
                 int64_t rows_per_part, const WaitContext& wait) {
    StagedSide send;
    StagedSide recv;
    for (const RowTraffic::Part& part : transfer.traffic.parts) {
      send.add(range_of_round(part.send_begin, part.send_count, first, rows_per_part),
               transfer.row_bytes);
      recv.add(range_of_round(part.recv_begin, part.recv_count, first, rows_per_part),
               transfer.row_bytes);
    }
    send.staging = lease_pinned_memory(send.offsets.back());
    recv.staging = lease_pinned_memory(recv.offsets.back());
    for (size_t p = 0; p < send.rows.size(); ++p) {
      copy(call, send.staging.data() + send.offsets[p],
           transfer.send + send.rows[p].begin * transfer.row_bytes,
           send.rows[p].count * transfer.row_bytes);
    }
    await_copies(call, send.staging);
    rank_.group().all_to_all_v(send.bytes(), send.offsets, recv.bytes(), recv.offsets, wait);
    for (size_t p = 0; p < recv.rows.size(); ++p) {
      copy(call, transfer.recv + recv.rows[p].begin * transfer.row_bytes,
           recv.staging.data() + recv.offsets[p], recv.rows[p].count * transfer.row_bytes);
    }
    await_copies(call, recv.staging);
  }

  // Waits until the device no longer uses the staging memory. On failure the memory is leaked.
  static void await_copies(const GpuCall& call, const Buffer& staging) {
    try {
      call.await();
    } catch (...) {
      leak(staging.owner());
      throw;
    }
  }

  static void copy(const GpuCall& call, void* to, const void* from, int64_t num_bytes) {
    if (num_bytes == 0) return;
    CROSSDOCK_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault,
                                   call.stream()));
  }

  CudaRank& rank_;
};

}  // namespace

std::unique_ptr<RowTransport> make_staged_copies(CudaRank& rank) {
  return std::make_unique<StagedCopies>(rank);
}

}  // namespace crossdock::cuda
