#pragma once

#include <cstdint>
#include <string>

#include "cli/commands.hpp"
#include "crossdock/moe_layer.hpp"

namespace crossdock::cli {

/// What `crossdock run` is asked to do, with everything decided.
struct RunJob {
  std::string preset;   // empty: none
  std::string scaling;  // what was made smaller, in words; empty: nothing
  std::string engine;   // "threads" or "mpi"
  int num_ranks = 0;    // P
  int ranks_per_node = 0;
  MoeLayerConfig layer;
  bool with_biases = false;       // of gate and experts
  bool with_expert_bias = false;  // of the choice
  int64_t tokens_total = 0;
  int num_steps = 0;
  uint64_t seed = 0;
  bool with_backward = true;
  bool with_check = true;
  std::string trace_file;  // empty: none

  /// Tokens are spread contiguously, as evenly as can be.
  int64_t first_token(int rank) const { return first_expert(tokens_total, num_ranks, rank); }
  int64_t num_tokens(int rank) const { return first_token(rank + 1) - first_token(rank); }
  DType dtype() const { return layer.experts.dtype; }
  DType sum_dtype() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
};

/// `num_processes`: of mpirun; 0 if this process was not started by it. Throws ArgumentError.
RunJob make_job(const RunArgs& args, int num_processes);

}  // namespace crossdock::cli
