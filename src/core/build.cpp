#include "core/build_info.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock {

BuildDescription describe_build() {
  return {.version = build_info::kVersion,
          .revision = build_info::kRevision,
          .compiler = build_info::kCompiler,
          .build_type = build_info::kBuildType,
          .sanitizers = build_info::kSanitizers,
          .features = {{"mpi", build_info::kWithMpi, build_info::kMpiNote},
                       {"cuda", build_info::kWithCuda, build_info::kCudaNote}}};
}

}  // namespace crossdock
