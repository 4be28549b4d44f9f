#pragma once

#include <cstdint>

#include "ops/cuda/unused_rows.hpp"

namespace crossdock::ops {

/// The threads of one of several workers.
struct ZeroWorker {
  int index;  // of num_workers
  int num_workers;
  int thread;  // of num_threads
  int num_threads;
};

/// REQUIRES: sizeof(Vector) divides row_bytes and the address of the rows.
template <typename Vector>
__device__ void zero_row_range(const UnusedRows& unused, int64_t begin, int64_t end, int thread,
                               int num_threads) {
  auto* const first = reinterpret_cast<Vector*>(unused.rows + begin * unused.row_bytes);
  const int64_t num_vectors =
      (end - begin) * unused.row_bytes / static_cast<int64_t>(sizeof(Vector));
  for (int64_t i = thread; i < num_vectors; i += num_threads) first[i] = Vector{};
}

/// Zeroes the unused rows together with the other workers: the gaps before the segments in turn,
/// then the rows after the last segment in turn.
template <typename Vector>
__device__ void zero_unused_rows(const UnusedRows& unused, const ZeroWorker& worker) {
  if (unused.rows == nullptr) return;
  const auto end_of = [&](int e) { return e < 0 ? 0 : unused.starts[e] + unused.counts[e]; };
  for (int e = worker.index; e < unused.num_experts; e += worker.num_workers) {
    zero_row_range<Vector>(unused, end_of(e - 1), unused.starts[e], worker.thread,
                           worker.num_threads);
  }
  const int64_t last = end_of(unused.num_experts - 1);
  for (int64_t row = last + worker.index; row < unused.R; row += worker.num_workers) {
    zero_row_range<Vector>(unused, row, row + 1, worker.thread, worker.num_threads);
  }
}

}  // namespace crossdock::ops
