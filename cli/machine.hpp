#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace crossdock::cli {

/// The hardware that this process may use.
struct Machine {
  int num_cores = 0;         // of the machine
  int num_usable_cores = 0;  // by this process
  int64_t memory_bytes = 0;
  std::string_view simd;  // "avx512", "avx2", "sse2", "neon" or "unknown"
};

Machine describe_machine();

/// The full path of a program on the PATH; empty if there is none.
std::string find_program(std::string_view name);

}  // namespace crossdock::cli
