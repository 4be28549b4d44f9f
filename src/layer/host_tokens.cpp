#include "layer/host_tokens.hpp"

#include "router/backend.hpp"

namespace crossdock {
namespace {

std::vector<std::byte> read(const ConstTensorView& tensor, Stream stream) {
  std::vector<std::byte> bytes(tensor.given() ? static_cast<size_t>(tensor.num_bytes()) : 0);
  if (!bytes.empty()) router::read_device(tensor, bytes, stream);
  return bytes;
}

}  // namespace

HostTokens::HostTokens(const LocalTokens& on_gpu, Stream stream)
    : x_(read(on_gpu.x, stream)), mask_(read(on_gpu.mask, stream)), tokens_(on_gpu) {
  tokens_.x = {x_.data(), on_gpu.x.dtype, on_gpu.x.shape};
  if (on_gpu.mask.given()) tokens_.mask = {mask_.data(), on_gpu.mask.dtype, on_gpu.mask.shape};
}

}  // namespace crossdock
