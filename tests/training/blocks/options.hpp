#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trainer.hpp"

namespace train {

enum class CommunicatorKind : uint8_t { kThreads, kMpi, kSockets };
inline constexpr std::array<std::string_view, 3> kCommunicatorNames = {"threads", "mpi", "sockets"};

struct CommandOptions {
  TrainConfig training{};
  CommunicatorKind communicator = CommunicatorKind::kThreads;
  int ranks_per_node = 0;  // of simulated nodes; 0: as found
  bool check = false;      // compare with training on one rank
  bool help = false;
};

/// Throws std::invalid_argument for an unknown option or value.
CommandOptions parse_options(const std::vector<std::string>& arguments);

/// All options, one per line.
std::string help_text();

}  // namespace train
