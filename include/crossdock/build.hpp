#pragma once

#include <string_view>
#include <vector>

namespace crossdock {

/// A part of the library that a build may lack.
struct Feature {
  std::string_view name;  // "mpi", "cuda"
  bool is_built = false;
  std::string_view note;  // which one was found, or why there is none
};

/// What this library was built from and with. Strings that do not apply are empty.
struct BuildDescription {
  std::string_view version;     // "0.1.0"
  std::string_view revision;    // of the source
  std::string_view compiler;    // "GNU 12.2.0"
  std::string_view build_type;  // "Release"
  std::string_view sanitizers;  // "address,undefined"
  std::vector<Feature> features;
};

BuildDescription describe_build();

}  // namespace crossdock
