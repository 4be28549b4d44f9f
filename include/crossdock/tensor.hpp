#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "crossdock/dtype.hpp"

// The legend of letters, used beside every tensor in this library:
//   T tokens here · K routes per token · E experts in all · E_local here · P ranks · D token width
//   F expert inner width · S rows sent · R rows received · B batch · L sequence length

namespace crossdock {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  bool is_cpu() const { return kind == DeviceKind::kCpu; }
  friend bool operator==(const Device&, const Device&) = default;
};

/// Work queue of a device: a cudaStream_t, or nothing on the CPU, where calls run at once.
struct Stream {
  void* handle = nullptr;
};

/// A shape of up to 4 dimensions, row-major and contiguous.
class CROSSDOCK_API Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t num_elements() const;   // throws Error(kInvalidArgument) beyond 2^63 - 1
  std::string to_string() const;  // "[3, 4]"
  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

class OwnedView;

/// Borrowed memory with a dtype, a shape and a device; never owns. `Void` is void or const void.
/// A null pointer is legal where num_elements() is 0. A default-made view means "not given".
template <typename Void>
struct CROSSDOCK_API BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  Device device;

  BasicTensorView() = default;
  BasicTensorView(Void* data_in, DType dtype_in, Shape shape_in, Device device_in = {})
      : data(data_in), dtype(dtype_in), shape(shape_in), device(device_in) {}

  /// From a typed pointer: TensorView(x.data(), {T, D}).
  template <typename T>
  requires(!std::is_void_v<T> && (std::is_const_v<Void> || !std::is_const_v<T>))
      BasicTensorView(T* typed, Shape shape_in, Device device_in = {})
      : data(typed),
        dtype(DTypeOf<std::remove_const_t<T>>::value),
        shape(shape_in),
        device(device_in) {}

  /// A mutable view is also a const one.
  template <typename Other>
  requires(std::is_const_v<Void> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT: implicit by design
      : data(other.data), dtype(other.dtype), shape(other.shape), device(other.device) {}

  /// Not the view of a temporary OwnedTensor, whose memory ends with the statement: keep the owner.
  template <std::same_as<OwnedView> View>
  BasicTensorView(const View&& of_temporary) = delete;
  template <std::same_as<OwnedView> View>
  BasicTensorView& operator=(const View&& of_temporary) = delete;

  bool given() const { return shape.rank() > 0; }
  int64_t num_elements() const { return shape.num_elements(); }
  int64_t num_bytes() const;
  /// Size of the first dimension.
  int64_t num_rows() const { return shape.rank() > 0 ? shape[0] : 0; }
  /// Bytes of one index of the first dimension, also when there are no rows.
  int64_t row_bytes() const;

  /// The memory as T; the dtype must be T's. Host memory only, as nothing else can be read here.
  template <typename T>
  std::span<std::conditional_t<std::is_const_v<Void>, const T, T>> as() const {
    require_dtype(DTypeOf<T>::value);
    using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return {static_cast<Element*>(data), static_cast<size_t>(num_elements())};
  }

 private:
  void require_dtype(DType wanted) const;
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

extern template struct BasicTensorView<void>;
extern template struct BasicTensorView<const void>;

/// Rows grouped by local expert. Rows [starts[e], starts[e] + counts[e]) are expert e's; rows from
/// there to starts[e + 1] are pad rows (zero, weight 0). The arrays live on `device`.
struct Segments {
  const int64_t* starts = nullptr;  // [num_segments + 1]; the last entry is the number of rows, R
  const int64_t* counts = nullptr;  // [num_segments]
  int64_t num_segments = 0;         // E_local
  Device device{};

  /// Host segments only.
  int64_t num_rows() const { return num_segments > 0 ? starts[num_segments] : 0; }
};

/// Owned memory on a device, 64-byte aligned, contents unspecified. Moves, does not copy.
///
/// `owner()` shares the ownership: whoever holds it keeps the memory alive, also after the Buffer
/// is gone. Engines hold it while a request that names this memory may still be under way.
class CROSSDOCK_API Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t num_bytes, Device device = {});
  /// Memory that came from somewhere else (a pool, a window); `owner` frees it.
  Buffer(std::shared_ptr<void> owner, std::byte* data, int64_t num_bytes, Device device);

  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(Buffer&&) noexcept = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }
  Device device() const { return device_; }
  std::shared_ptr<const void> owner() const { return owner_; }
  std::span<std::byte> bytes() const& { return {data_, static_cast<size_t>(num_bytes_)}; }
  std::span<std::byte> bytes() const&& = delete;  // the memory may end with the buffer

  /// The first elements of the buffer as a tensor; the buffer must be large enough.
  [[nodiscard]] TensorView view(DType dtype, Shape shape) const&;
  TensorView view(DType dtype, Shape shape) const&& = delete;

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
  Device device_;
};

/// The view of an OwnedTensor: a TensorView that cannot be taken out of a temporary owner.
/// `TensorView rows = dispatcher.dispatch(plan, args).rows.view;` does not compile.
class OwnedView : public TensorView {
 public:
  OwnedView() = default;
  OwnedView(const TensorView& view) : TensorView(view) {}  // NOLINT: implicit by design
  OwnedView(const OwnedView&) = default;
  OwnedView& operator=(const OwnedView&) = default;
  OwnedView& operator=(const TensorView& view) { return *this = OwnedView(view); }

  template <typename T>
  std::span<T> as() const& {
    return TensorView::as<T>();
  }
  template <typename T>
  std::span<T> as() const&& = delete;

 private:
  friend struct OwnedTensor;  // which moves its view together with its owner
  OwnedView(OwnedView&&) = default;
  OwnedView& operator=(OwnedView&&) = default;
};

/// A tensor together with what keeps its memory alive: a pool buffer, a lease of a peer window, or
/// nothing when the caller gave the memory. Keep it as long as its view is used.
struct OwnedTensor {
  OwnedView view{};
  std::shared_ptr<const void> owner{};
};

/// Host memory that is handed out again instead of being returned to the system, so that a step
/// does not pay for fresh pages. Holds hardly more than was ever in use at once. Thread-safe.
/// Buffers may outlive the pool.
class CROSSDOCK_API BufferPool {
 public:
  BufferPool();
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// A buffer of at least num_bytes, contents unspecified; returns to the pool when released.
  [[nodiscard]] Buffer take(int64_t num_bytes);
  /// The same for something that is released before the operation ends: any block will do.
  [[nodiscard]] Buffer take_scratch(int64_t num_bytes);
  [[nodiscard]] OwnedTensor take(DType dtype, Shape shape);

  /// Bytes handed out now / bytes held in all (handed out or waiting).
  int64_t bytes_in_use() const;
  int64_t bytes_held() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Rows of fp8 with their scales, as a dispatch delivers them, made into bf16.
/// `out` must not overlap the others.
/// out[r, d] = round(rows[r, d] * scale of d's group in row r): the product in fp32, one rounding.
struct Fp8ToBf16Args {
  ConstTensorView rows{};    // [R, D] fp8 e4m3
  ConstTensorView scales{};  // [R, ceil(D/128)] fp32, or [R, ceil(D/32)] e8m0 (MXFP8)
  TensorView out{};          // [R, D] bf16
  Stream stream{};           // for tensors on a GPU; all three are on one device
};
CROSSDOCK_API void fp8_to_bf16(const Fp8ToBf16Args& args);

/// Values that share a scale: 128 with fp32 scales, 32 with e8m0.
/// Throws Error(kInvalidArgument) for other dtypes.
[[nodiscard]] CROSSDOCK_API int64_t fp8_group_size(DType scale_dtype);

}  // namespace crossdock
