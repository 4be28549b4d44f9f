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
#include <utility>
#include <vector>

#include "crossdock/dtype.hpp"

// Letters for dimensions, used in all shapes:
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

/// Work queue of a device: a cudaStream_t, or null on the CPU, where calls run synchronously.
struct Stream {
  void* handle = nullptr;
};

/// A shape of up to 4 dimensions, row-major and contiguous.
class CROSSDOCK_API Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims);

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

/// A non-owning view of memory with a dtype, a shape and a device. `Void` is void or const void.
/// The pointer may be null if num_elements() is 0. A default-constructed view is unset: given() is
/// false.
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

  /// Converts a mutable view to a const one.
  template <typename Other>
  requires(std::is_const_v<Void> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT: implicit by design
      : data(other.data), dtype(other.dtype), shape(other.shape), device(other.device) {}

  /// Deleted: a temporary OwnedTensor may free its memory at the end of the statement. Keep the
  /// owner.
  template <std::same_as<OwnedView> View>
  BasicTensorView(const View&& of_temporary) = delete;
  template <std::same_as<OwnedView> View>
  BasicTensorView& operator=(const View&& of_temporary) = delete;

  bool given() const { return shape.rank() > 0; }
  int64_t num_elements() const { return shape.num_elements(); }
  int64_t num_bytes() const;
  /// Size of the first dimension.
  int64_t num_rows() const { return shape.rank() > 0 ? shape[0] : 0; }
  /// Bytes per index of the first dimension, even if there are no rows.
  int64_t row_bytes() const;

  /// The elements as T. Throws Error(kInvalidArgument) if the dtype differs. REQUIRES: host memory.
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

  /// REQUIRES: segments in host memory.
  int64_t num_rows() const { return num_segments > 0 ? starts[num_segments] : 0; }
};

/// Owned memory on a device, 64-byte aligned, contents unspecified. Movable, not copyable; a
/// moved-from buffer is empty.
///
/// `owner()` shares ownership: its holder keeps the memory alive even after the Buffer is gone.
/// Communicators hold it while a request that refers to this memory may still be pending.
class CROSSDOCK_API Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t num_bytes, Device device = {});
  /// Memory allocated elsewhere (a pool, a window); `owner` frees it.
  Buffer(std::shared_ptr<void> owner, std::byte* data, int64_t num_bytes, Device device);

  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }
  Device device() const { return device_; }
  std::shared_ptr<const void> owner() const { return owner_; }
  std::span<std::byte> bytes() const& { return {data_, static_cast<size_t>(num_bytes_)}; }
  std::span<std::byte> bytes() const&& = delete;  // the memory may be freed with the buffer

  /// The start of the buffer as a tensor. Throws Error(kInvalidArgument) if it is too small.
  [[nodiscard]] TensorView view(DType dtype, Shape shape) const&;
  TensorView view(DType dtype, Shape shape) const&& = delete;

 private:
  void swap(Buffer& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    std::swap(device_, other.device_);
  }

  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
  Device device_;
};

/// The view of an OwnedTensor: a TensorView that cannot be copied out of a temporary owner.
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
  friend struct OwnedTensor;  // moves its view together with its owner
  OwnedView(OwnedView&&) = default;
  OwnedView& operator=(OwnedView&&) = default;
};

/// A tensor and the owner of its memory: a pool buffer, a lease of a peer window, or null if the
/// caller provided the memory. Keep it alive as long as its view is in use.
struct OwnedTensor {
  OwnedView view{};
  std::shared_ptr<const void> owner{};
};

/// Reuses host memory instead of returning it to the system, so steps do not pay for fresh pages.
/// Holds little more memory than the peak use. Thread-safe. Buffers may outlive the pool.
class CROSSDOCK_API BufferPool {
 public:
  BufferPool();
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// A buffer of num_bytes, contents unspecified; its memory returns to the pool when released.
  [[nodiscard]] Buffer take(int64_t num_bytes);
  /// As take, for memory that is released before the operation ends; may use a far larger block.
  [[nodiscard]] Buffer take_scratch(int64_t num_bytes);
  [[nodiscard]] OwnedTensor take(DType dtype, Shape shape);

  /// Bytes in use now / bytes held in total (in use or free).
  int64_t bytes_in_use() const;
  int64_t bytes_held() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace crossdock
