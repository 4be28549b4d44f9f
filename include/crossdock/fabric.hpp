#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "crossdock/error.hpp"

namespace crossdock {

/// The links and the memory of one rank. Rates are the makers' figures, in bytes per second; those
/// of links are per direction.
struct Fabric {
  std::string_view name;
  double within_node_rate = 0;    // to the ranks of its node, all together
  double between_nodes_rate = 0;  // to all other ranks together
  double memory_rate = 0;         // read + written
  int64_t memory_bytes = 0;       // for buffers; 0: no limit is known
  int64_t send_queue_depth = 65535;
};

inline constexpr int64_t kGigabyte = 1'000'000'000;

inline constexpr std::array kFabricPresets = {
    Fabric{"h100-nvlink-400g", 450e9, 50e9, 3.35e12, 80 * kGigabyte},
    Fabric{"h200-nvlink-400g", 450e9, 50e9, 4.8e12, 141 * kGigabyte},
    Fabric{"gb200", 900e9, 50e9, 8e12, 186 * kGigabyte},      // a node is an NVLink domain
    Fabric{"efa", 450e9, 50e9, 3.35e12, 80 * kGigabyte},      // 3200 Gbit/s for 8 ranks
    Fabric{"ethernet", 25e9, 3.125e9, 2e12, 48 * kGigabyte},  // PCIe and 25 Gbit/s for a rank
};

/// Throws Error(kInvalidArgument) that lists the names.
inline const Fabric& find_fabric(std::string_view name) {
  std::string known;
  for (const Fabric& preset : kFabricPresets) {
    if (preset.name == name) return preset;
    known.append(known.empty() ? "" : ", ").append(preset.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "fabric must be one of " + known + "; got \"" + std::string(name) + "\"");
}

}  // namespace crossdock
