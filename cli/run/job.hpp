#pragma once

#include <cstdint>
#include <string>

#include "cli/commands.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/moe_layer.hpp"

namespace crossdock::cli {

/// The job of `crossdock run`, with all defaults filled in.
struct RunJob {
  std::string preset;          // empty: none
  std::string scaling;         // how the widths were scaled, in words; empty: they were not
  std::string communicator;    // "threads", "mpi" or "sockets"
  std::string device = "cpu";  // or "cuda"
  int overlap_sms = 0;         // DeviceOptions::max_begun_sms
  int num_ranks = 0;           // P
  int ranks_per_node = 0;
  MoeLayerConfig layer;
  bool with_biases = false;       // gate and experts have biases
  bool with_expert_bias = false;  // the choice of experts has a bias
  int64_t tokens_total = 0;
  int num_steps = 0;
  uint64_t seed = 0;
  bool with_backward = true;
  bool with_check = true;
  std::string trace_file;  // empty: none

  /// Tokens are divided into contiguous ranges of nearly equal size.
  int64_t first_token(int rank) const { return first_expert(tokens_total, num_ranks, rank); }
  int64_t num_tokens(int rank) const { return first_token(rank + 1) - first_token(rank); }
  bool is_on_gpus() const { return device == "cuda"; }
  DType dtype() const { return layer.experts.dtype; }
  DType sum_dtype() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
};

/// `processes`: those of the job to which this process belongs; null if it was started alone.
/// Throws ArgumentError.
RunJob make_job(const RunArgs& args, const Communicator* processes);

}  // namespace crossdock::cli
