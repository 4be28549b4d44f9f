#pragma once

#include <memory>
#include <string_view>

#include "bench/workload.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::bench {

/// One rank's input.
struct MoverInputs {
  const Workload& workload;
  Group& group;
  ConstTensorView x;         // [T, D]
  ConstTensorView grad_out;  // [T, D]; given with scenario.backward
};

/// Moves one rank's rows: the library with one of its strategies, or a baseline. The result of a
/// step is kept until the step runs again.
class Mover {
 public:
  virtual ~Mover() = default;

  virtual void plan() = 0;
  virtual void dispatch() = 0;
  virtual void combine() = 0;
  /// (optional) Called only in scenarios with backward.
  virtual void combine_backward() {}
  virtual void dispatch_backward() {}

  /// Whether combine gives the exact bits of the contract: fma in slot order.
  virtual bool sums_exactly() const { return true; }

  /// [R, D] in expert order: input of combine and dispatch_backward. Valid after plan.
  virtual TensorView y() = 0;

  virtual ConstTensorView rows() const = 0;                 // [R, D] of dispatch
  virtual ConstTensorView out() const = 0;                  // [T, D] of combine
  virtual ConstTensorView grad_rows() const { return {}; }  // [R, D] of combine_backward
  virtual ConstTensorView grad_x() const { return {}; }     // [T, D] of dispatch_backward
};

/// A strategy of the library.
std::unique_ptr<Mover> make_library_mover(const MoverInputs& inputs, std::string_view strategy);

/// Pack, MPI_Alltoallv, regroup. REQUIRES: MPI is initialised and the group is its world. Throws
/// Error(kUnsupported) in builds without MPI.
std::unique_ptr<Mover> make_anchor_mover(const MoverInputs& inputs);

}  // namespace crossdock::bench
