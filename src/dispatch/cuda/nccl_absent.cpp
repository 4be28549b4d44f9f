// NCCL in a build without its header.
#include "core/check.hpp"
#include "dispatch/cuda/row_transport.hpp"

namespace crossdock::cuda {

std::unique_ptr<RowTransport> make_nccl_transport(CudaRank& /*rank*/, void* nccl_comm) {
  const char* need = nccl_comm == nullptr
                         ? ", and ranks on several nodes cannot reach each other's GPU memory"
                         : "";
  throw Error(ErrorCode::kUnsupported,
              concat("this build has no NCCL", need,
                     "; configure with CROSSDOCK_WITH_NCCL=ON where nccl.h is installed"));
}

}  // namespace crossdock::cuda
