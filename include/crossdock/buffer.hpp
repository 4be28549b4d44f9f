#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "crossdock/tensor.hpp"

namespace crossdock {

enum class BlockUse : uint8_t;

/// Owned memory on a device, 64-byte aligned, contents unspecified. Moves, does not copy.
///
/// `owner()` shares the ownership: whoever holds it keeps the memory alive, also after the Buffer
/// is gone. Engines hold it while a request that names this memory may still be under way.
class Buffer {
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
  std::span<std::byte> bytes() const { return {data_, static_cast<size_t>(num_bytes_)}; }

  /// The first elements of the buffer as a tensor; the buffer must be large enough.
  TensorView view(DType dtype, Shape shape) const;

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
  Device device_;
};

/// A tensor together with what keeps its memory alive: a pool buffer, a lease of a peer window, or
/// nothing when the caller gave the memory.
struct OwnedTensor {
  TensorView view;
  std::shared_ptr<const void> owner;
};

/// Host memory that is handed out again instead of being returned to the system, so that a step
/// does not pay for fresh pages. Holds hardly more than was ever in use at once. Thread-safe.
/// Buffers may outlive the pool.
class BufferPool {
 public:
  BufferPool();
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// A buffer of at least num_bytes, contents unspecified; returns to the pool when released.
  Buffer take(int64_t num_bytes);
  /// The same for something that is released before the operation ends: any block will do.
  Buffer take_scratch(int64_t num_bytes);
  OwnedTensor take(DType dtype, Shape shape);

  /// Bytes handed out now / bytes held in all (handed out or waiting).
  int64_t bytes_in_use() const;
  int64_t bytes_held() const;

 private:
  struct State;
  Buffer take(int64_t num_bytes, BlockUse use);
  std::shared_ptr<State> state_;
};

}  // namespace crossdock
