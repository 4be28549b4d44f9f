// Rows in fp8 have the bits of the CPU, and nothing else is written. More rows than blocks take at
// once are checked by `crossdock bench --scenario quantise-2gb`.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <vector>

#include "crossdock/fp8.hpp"
#include "dispatch/cuda/tensors.hpp"

namespace crossdock {
namespace {

class DeviceFp8 : public CudaTest {};

using Bytes = std::vector<std::byte>;

constexpr int64_t kGuard = 64;  // bytes before and after an output
constexpr uint8_t kUnwritten = 0xa5;

struct Fp8Case {
  DType dtype = DType::kBF16;  // of the wide rows
  int64_t T = 0;
  int64_t D = 0;
  DType scale_dtype = DType::kF32;
  Fp8Scale scale = Fp8Scale::kPow2;
  float amax_floor = 0.0f;
  int64_t offset = 0;  // of the tensors on the GPU, in elements
  Bytes x{};           // [T, D]

  Shape shape() const { return {T, D}; }
  Shape scale_shape() const {
    const int64_t group = fp8_group_size(scale_dtype);
    return {T, (D + group - 1) / group};
  }
  friend std::ostream& operator<<(std::ostream& out, const Fp8Case& c) {
    return out << name_of(c.dtype) << " " << c.shape().to_string() << ", " << name_of(c.scale_dtype)
               << " scales, " << name_of(c.scale) << ", floor " << c.amax_floor << ", offset "
               << c.offset;
  }
};

// An output on the GPU, between guards.
class Guarded {
 public:
  Guarded(DType dtype, const Shape& shape, int64_t offset, const RankStream& stream)
      : first_(kGuard + offset * size_of(dtype)),
        num_bytes_(shape.num_elements() * size_of(dtype)),
        memory_(device_tensor(DType::kU8, {first_ + num_bytes_ + kGuard}, stream)) {
    cuda_ok(cudaMemsetAsync(memory_.view.data, kUnwritten,
                            static_cast<size_t>(memory_.view.num_bytes()), stream.get()));
    view_ = TensorView(static_cast<std::byte*>(memory_.view.data) + first_, dtype, shape,
                       memory_.view.device);
  }

  const TensorView& view() const { return view_; }
  // Its bytes, without the guards, which must be unchanged.
  Bytes read(const RankStream& stream) const {
    const Bytes all = to_host(memory_.view, stream);
    for (int64_t i = 0; i < std::ssize(all); ++i) {
      if (i >= first_ && i < first_ + num_bytes_) continue;
      EXPECT_EQ(std::to_integer<int>(all[static_cast<size_t>(i)]), kUnwritten) << "byte " << i;
    }
    return {all.begin() + first_, all.begin() + first_ + num_bytes_};
  }

 private:
  int64_t first_;
  int64_t num_bytes_;
  OwnedTensor memory_;
  TensorView view_;
};

Bytes empty_bytes(DType dtype, const Shape& shape) {
  return Bytes(static_cast<size_t>(shape.num_elements() * size_of(dtype)));
}

void expect_bits_of_the_cpu(const Fp8Case& test, const RankStream& stream) {
  SCOPED_TRACE(test);
  const Shape shape = test.shape();
  Bytes values = empty_bytes(DType::kF8E4M3, shape);
  Bytes scales = empty_bytes(test.scale_dtype, test.scale_shape());
  const TensorView values_view(values.data(), DType::kF8E4M3, shape);
  const TensorView scales_view(scales.data(), test.scale_dtype, test.scale_shape());
  QuantiseRowsArgs args{.x = {test.x.data(), test.dtype, shape},
                        .values = values_view,
                        .scales = scales_view,
                        .scale = test.scale,
                        .amax_floor = test.amax_floor};
  quantise_rows(args);

  const Guarded x_there(test.dtype, shape, test.offset, stream);
  const Guarded values_there(DType::kF8E4M3, shape, test.offset, stream);
  const Guarded scales_there(test.scale_dtype, test.scale_shape(), test.offset, stream);
  cuda_ok(cudaMemcpyAsync(x_there.view().data, test.x.data(), test.x.size(), cudaMemcpyHostToDevice,
                          stream.get()));
  args.x = x_there.view();
  args.values = values_there.view();
  args.scales = scales_there.view();
  args.stream = stream.view();
  quantise_rows(args);
  ASSERT_EQ(values_there.read(stream), values);
  ASSERT_EQ(scales_there.read(stream), scales);

  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Bytes out = empty_bytes(dtype, shape);
    dequantise_rows(
        {.values = values_view, .scales = scales_view, .out = {out.data(), dtype, shape}});
    const Guarded out_there(dtype, shape, test.offset, stream);
    dequantise_rows({.values = values_there.view(),
                     .scales = scales_there.view(),
                     .out = out_there.view(),
                     .stream = stream.view()});
    ASSERT_EQ(out_there.read(stream), out) << "to " << name_of(dtype);
  }
}

// Every second group has any bits, with NaN and infinity; the others have numbers of one size.
Bytes random_rows(DType dtype, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Bytes bytes(static_cast<size_t>(count * size_of(dtype)));
  for (int64_t i = 0; i < count; ++i) {
    const auto any = static_cast<uint32_t>(random());
    const float drawn = normal(random);
    uint32_t bits = std::bit_cast<uint32_t>(drawn);
    if (dtype == DType::kBF16) bits = to_bf16(drawn).bits;
    if (dtype == DType::kF16) bits = to_f16(drawn).bits;
    if (i / 128 % 2 == 0) bits = any;
    const auto size = static_cast<size_t>(size_of(dtype));
    std::memcpy(bytes.data() + static_cast<size_t>(i) * size, &bits, size);
  }
  return bytes;
}

std::vector<Fp8Case> formats(const Fp8Case& test) {
  std::vector<Fp8Case> list(4, test);
  list[1].scale = Fp8Scale::kExact;
  list[2].scale = Fp8Scale::kExact;
  list[2].amax_floor = 1e-4f;
  list[3].scale_dtype = DType::kE8M0;
  return list;
}

TEST_F(DeviceFp8, HasTheBitsOfTheCpuForEveryBf16ValueInGroupsOfItsSize) {
  const RankStream stream;
  Bytes x;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {  // values of one group differ a little
    const auto value = static_cast<uint16_t>(bits);
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    x.insert(x.end(), first, first + 2);
  }
  for (const int64_t D : {128, 32, 8, 1}) {
    for (const Fp8Case& test : formats({.T = 0x10000 / D, .D = D, .x = x})) {
      expect_bits_of_the_cpu(test, stream);
    }
  }
}

TEST_F(DeviceFp8, HasTheBitsOfTheCpuForEveryTypeWidthAndAlignment) {
  const RankStream stream;
  uint32_t seed = 0;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t D : {1, 4, 7, 8, 31, 40, 127, 128, 129, 136, 300, 2880, 7168}) {
      for (const int64_t T : {1, 3, 17, 301}) {
        for (const int64_t offset : {0, 1, 4}) {
          const Fp8Case test{.dtype = dtype,
                             .T = T,
                             .D = D,
                             .offset = offset,
                             .x = random_rows(dtype, T * D, ++seed)};
          for (const Fp8Case& each : formats(test)) expect_bits_of_the_cpu(each, stream);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(DeviceFp8, EmptyRowsMayBeNull) {
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  quantise_rows({.x = {nullptr, DType::kBF16, {0, 200}, gpu},
                 .values = {nullptr, DType::kF8E4M3, {0, 200}, gpu},
                 .scales = {nullptr, DType::kF32, {0, 2}, gpu}});
}

TEST_F(DeviceFp8, RefusesTensorsOnDifferentDevices) {
  const RankStream stream;
  const OwnedTensor x = device_tensor(DType::kBF16, {1, 8}, stream);
  const OwnedTensor values = device_tensor(DType::kF8E4M3, {1, 8}, stream);
  float scale = 0.0f;
  EXPECT_THROW(quantise_rows({.x = x.view, .values = values.view, .scales = {&scale, {1, 1}}}),
               Error);
}

}  // namespace
}  // namespace crossdock
