#pragma once

#include <string>

#include "crossdock/dtype.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::cli {

/// A case of `crossdock eval` (docs/case_format.md): a layer and how to run it. Values are rounded
/// to the dtype, so that library and reference start from the same numbers.
struct EvalCase {
  std::string strategy;
  std::string communicator = "threads";  // or "sockets" or "mpi"
  int ranks_per_node = 0;                // 0: all ranks on one node
  DType dtype = DType::kF32;
  reference::LayerInput layer;

  int num_ranks() const { return static_cast<int>(layer.ranks.size()); }
  DType weight_dtype() const { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
};

/// Throws Error(kInvalidArgument) if the text is not a valid case. Expert ids, the strategy's name
/// and the placement are checked by the library later.
EvalCase parse_case(const std::string& text);

}  // namespace crossdock::cli
