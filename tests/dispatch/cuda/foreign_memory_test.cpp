// Rows in the caller's memory, which may be unreachable for GPUs of other ranks.

#include <cudaTypedefs.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/cuda/gpu_reach.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using cuda::MemoryKind;
using CudaForeignMemory = CudaTest;

constexpr comm::GpuPretences kApart{.peers_are_elsewhere = true};

template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cuda_ok(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (function == nullptr) throw std::runtime_error(std::string("no ") + name);
  return reinterpret_cast<Function>(function);
}

void driver_ok(CUresult status) {
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("CUDA driver error " + std::to_string(status));
}

/// Memory mapped by hand, as allocators with expandable segments do. Only the current GPU has
/// access.
std::shared_ptr<void> map_memory(size_t num_bytes) {
  const auto reserve =
      driver_function<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve", 10020);
  const auto create = driver_function<PFN_cuMemCreate_v10020>("cuMemCreate", 10020);
  const auto map = driver_function<PFN_cuMemMap_v10020>("cuMemMap", 10020);
  const auto set_access = driver_function<PFN_cuMemSetAccess_v10020>("cuMemSetAccess", 10020);
  constexpr size_t kUnit = size_t{2} << 20;
  const size_t size = (num_bytes + kUnit - 1) / kUnit * kUnit;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = current_gpu();
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0;
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  driver_ok(reserve(&address, size, 0, 0, 0));
  driver_ok(create(&handle, size, &properties, 0));
  driver_ok(map(address, size, 0, handle, 0));
  driver_ok(set_access(address, size, &access, 1));
  return {reinterpret_cast<void*>(address), [address, size, handle](void*) {
            driver_function<PFN_cuMemUnmap_v10020>("cuMemUnmap", 10020)(address, size);
            driver_function<PFN_cuMemRelease_v10020>("cuMemRelease", 10020)(handle);
            driver_function<PFN_cuMemAddressFree_v10020>("cuMemAddressFree", 10020)(address, size);
          }};
}

std::shared_ptr<void> allocate_plain(size_t num_bytes) {
  void* memory = nullptr;
  cuda_ok(cudaMalloc(&memory, num_bytes));
  return {memory, [](void* pointer) { cudaFree(pointer); }};
}

enum class Allocator { kMalloc, kMallocAsync, kMap };
constexpr std::pair<Allocator, const char*> kAllocators[] = {
    {Allocator::kMalloc, "cudaMalloc"},
    {Allocator::kMallocAsync, "cudaMallocAsync"},
    {Allocator::kMap, "cuMemMap"}};

OwnedTensor make_tensor(Allocator allocator, DType dtype, const Shape& shape,
                        const RankStream& stream) {
  if (allocator == Allocator::kMallocAsync) return device_tensor(dtype, shape, stream);
  const auto num_bytes = static_cast<size_t>(shape.num_elements() * size_of(dtype)) + 1;
  const std::shared_ptr<void> memory =
      allocator == Allocator::kMap ? map_memory(num_bytes) : allocate_plain(num_bytes);
  return {TensorView(memory.get(), dtype, shape, stream.device()), memory};
}

TEST_F(CudaForeignMemory, IsOfTheKindThatItsAllocatorMakes) {
  const RankStream stream;
  const std::pair<Allocator, MemoryKind> expected[] = {
      {Allocator::kMalloc, MemoryKind::kPlain},
      {Allocator::kMallocAsync, MemoryKind::kGranted},
      {Allocator::kMap, MemoryKind::kGranted}};
  for (const auto& [allocator, kind] : expected) {
    SCOPED_TRACE(kAllocators[static_cast<size_t>(allocator)].second);
    const OwnedTensor tensor = make_tensor(allocator, DType::kF32, {1000}, stream);
    const auto* last = static_cast<const float*>(tensor.view.data) + 999;
    EXPECT_EQ(cuda::kind_of(tensor.view.data), kind);
    EXPECT_EQ(cuda::kind_of(last), kind);
    if (kind == MemoryKind::kGranted) {
      EXPECT_TRUE(cuda::has_access(stream.device().index, last));
    }
  }
}

int64_t copied_bytes(Group& group) {
  int64_t bytes = 0;
  for (const Event& event : group.recorder().events()) {
    if (std::string(event.phase) == "copy of foreign rows") bytes += event.bytes;
  }
  return bytes;
}

// A dispatch into the caller's rows and a combine from them; `copies` is how many times the rows
// are copied for that.
void expect_copies(Allocator allocator, const GpuSetting& setting, int copies) {
  const DispatchCase the_case =
      random_case({.num_experts = 11, .top_k = 3, .width = 40}, {20, 30}, 80);
  run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& wanted) {
    const Plan plan = rank.plan();
    const OwnedTensor rows =
        make_tensor(allocator, DType::kF32, {plan.num_rows(), the_case.config.width}, rank.stream);
    rank.stream.synchronize();
    rank.group.agree({.operation = "allocated"});
    const int64_t before = copied_bytes(rank.group);
    rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .rows = rows.view});
    const OwnedTensor out = rank.dispatcher.combine(plan, rows.view);
    EXPECT_EQ(to_host(rows.view, rank.stream), wanted.rows);
    EXPECT_EQ(to_host(out.view, rank.stream), wanted.out);
    EXPECT_EQ(copied_bytes(rank.group) - before, copies * rows.view.num_bytes());
    rank.dispatcher.check();
    rank.group.agree({.operation = "done"});  // before memory is freed, which waits for the device
  });
}

TEST_F(CudaForeignMemory, IsCopiedForRanksOnOtherGpusIfTheyCannotReachIt) {
  for (const auto& [allocator, name] : kAllocators) {
    SCOPED_TRACE(name);
    expect_copies(allocator, {.pretences = kApart}, allocator == Allocator::kMalloc ? 0 : 2);
  }
}

TEST_F(CudaForeignMemory, IsUsedAsItIsByRanksOnTheSameGpu) {
  for (const auto& [allocator, name] : kAllocators) {
    SCOPED_TRACE(name);
    expect_copies(allocator, {.is_on_one_gpu = true}, 0);
  }
}

// Only memory that peers use is copied; for an exchange, rows are packed instead.
TEST_F(CudaForeignMemory, IsNotCopiedForAnExchangeOfPackedRows) {
  expect_copies(Allocator::kMallocAsync, {.strategy = "alltoall", .pretences = kApart}, 0);
}

TEST_F(CudaForeignMemory, OfTheLibraryNeedsNoCopy) {
  const DispatchCase the_case =
      random_case({.num_experts = 11, .top_k = 3, .width = 40}, {20, 30}, 81);
  run_on_gpu(the_case, {.pretences = kApart}, [&](GpuRank& rank, const StepBytes& wanted) {
    const int64_t before = copied_bytes(rank.group);
    const QueuedStep step(rank.dispatcher, rank.tensors);
    expect_same(step.wait(rank.stream), wanted);
    EXPECT_EQ(copied_bytes(rank.group), before);
  });
}

}  // namespace
}  // namespace crossdock
