#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/plan.hpp"

namespace crossdock::bench {

enum class ScenarioKind : uint8_t {
  kMove,          // plan, dispatch and combine; with `backward` also their backward
  kCudaMove,      // kMove and its backward with all ranks on one GPU
  kExperts,       // the experts' products compared with plain BLAS calls, on one rank
  kLayer,         // a whole MoeLayer, forward and backward
  kCudaLayer,     // the same and its steps on a GPU, on one rank
  kCudaOverlap,   // dispatch beside experts of a layer on a GPU, on one rank
  kCudaProducts,  // the experts' products alone on a GPU, on one rank
  kCudaQuantise,  // quantise_rows and dequantise_rows on a GPU, on one rank
  kAgree          // Group::agree alone, which moves no rows
};

/// A measurement and its sizes. T is the number of tokens per rank.
struct Scenario {
  std::string name{};
  std::string purpose{};  // one line, for --list
  ScenarioKind kind = ScenarioKind::kMove;
  int ranks = 4;        // P
  int64_t tokens = 0;   // T
  int64_t width = 0;    // D
  int64_t top_k = 0;    // K
  int64_t experts = 0;  // E
  int64_t inner = 0;    // F, where experts compute
  DType dtype = DType::kF32;
  int max_sms = 0;  // per rank on a GPU (DeviceOptions); 0: no limit
  Copies copies = Copies::kAuto;
  bool backward = false;
  bool skewed = false;          // products: experts with many rows, few and none
  int64_t overlap_chunks = 1;   // of a layer
  bool is_default = false;      // run when no scenario is named
  std::string only_strategy{};  // if set, the only strategy it is run with

  bool runs_on_gpu() const {
    return kind == ScenarioKind::kCudaMove || kind == ScenarioKind::kCudaLayer ||
           kind == ScenarioKind::kCudaOverlap || kind == ScenarioKind::kCudaProducts ||
           kind == ScenarioKind::kCudaQuantise;
  }
  /// Whether the number of ranks is always 1.
  bool has_one_rank() const {
    return kind == ScenarioKind::kExperts || (runs_on_gpu() && kind != ScenarioKind::kCudaMove);
  }
  int64_t element_bytes() const { return size_of(dtype); }
  /// T * D and T * K * D elements of all ranks together, in bytes.
  int64_t token_bytes() const { return ranks * tokens * width * element_bytes(); }
  int64_t row_bytes() const { return token_bytes() * top_k; }
  /// W1 [2F, D] and W2 [D, F] of all experts, in bytes.
  int64_t parameter_bytes() const { return experts * 3 * inner * width * element_bytes(); }
};

/// Name of the baseline among the strategies (anchor_mpi_pack.cpp).
inline constexpr std::string_view kAnchorName = "anchor-mpi-pack";

const std::vector<Scenario>& scenarios();

/// The scenarios with these names; a name that ends in * stands for all with this prefix. No names:
/// the default scenarios. Throws Error(kInvalidArgument) for a name that matches none.
std::vector<Scenario> find_scenarios(const std::vector<std::string>& names);

/// Throws Error(kInvalidArgument): "<what> must be one of <known>; got <name>".
[[noreturn]] void throw_unknown_name(std::string_view what, std::string_view name,
                                     const std::vector<std::string>& known);

}  // namespace crossdock::bench
