// A baseline without this library, as one would write it in an hour with MPI: sort the routes by
// expert, pack, MPI_Alltoallv, regroup by expert; then the way back with a weighted sum. Simple but
// not needlessly slow: buffers are allocated once, rows are copied with memcpy, a row is one MPI
// element.

#include "bench/mover.hpp"
#include "crossdock/error.hpp"

#if defined(CROSSDOCK_BENCH_CALLS_MPI)

#include <mpi.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace crossdock::bench {
namespace {

class AnchorMover final : public Mover {
 public:
  explicit AnchorMover(const MoverInputs& inputs)
      : in_(inputs),
        rank_(inputs.group.rank()),
        P_(inputs.group.size()),
        T_(inputs.workload.scenario().tokens),
        K_(inputs.workload.scenario().top_k),
        D_(inputs.workload.scenario().width),
        E_(inputs.workload.scenario().experts) {
    if (in_.x.dtype != DType::kF32) {
      throw Error(ErrorCode::kUnsupported,
                  "anchor-mpi-pack supports only fp32 rows, the scenario has " +
                      std::string(name_of(in_.x.dtype)));
    }
    MPI_Type_contiguous(static_cast<int>(D_), MPI_FLOAT, &row_type_);
    MPI_Type_commit(&row_type_);
    out_.resize(static_cast<size_t>(T_ * D_));
  }
  ~AnchorMover() override { MPI_Type_free(&row_type_); }
  AnchorMover(const AnchorMover&) = delete;
  AnchorMover& operator=(const AnchorMover&) = delete;

  void plan() override {
    const std::vector<int32_t>& ids = in_.workload.expert_ids(rank_);
    std::vector<int> send_counts(static_cast<size_t>(E_), 0);
    for (const int32_t e : ids) ++send_counts[static_cast<size_t>(e)];

    // Position of every route in the send buffer: by expert (hence by rank), then token, then slot.
    std::vector<int64_t> next(static_cast<size_t>(E_), 0);
    std::exclusive_scan(send_counts.begin(), send_counts.end(), next.begin(), int64_t{0});
    position_.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) position_[i] = next[static_cast<size_t>(ids[i])]++;

    // Rows from every rank for each expert of this rank, [source][local expert].
    std::vector<int> expert_counts(static_cast<size_t>(P_));
    std::vector<int> expert_offsets(static_cast<size_t>(P_ + 1), 0);
    for (int r = 0; r < P_; ++r) {
      expert_offsets[size_t(r) + 1] = static_cast<int>(first_expert(E_, P_, r + 1));
      expert_counts[size_t(r)] = expert_offsets[size_t(r) + 1] - expert_offsets[size_t(r)];
    }
    const int local = expert_counts[size_t(rank_)];
    recv_counts_.resize(static_cast<size_t>(P_) * static_cast<size_t>(local));
    num_local_experts_ = local;
    const std::vector<int> same(static_cast<size_t>(P_), local);
    std::vector<int> places(static_cast<size_t>(P_));
    for (int r = 0; r < P_; ++r) places[size_t(r)] = r * local;
    MPI_Alltoallv(send_counts.data(), expert_counts.data(), expert_offsets.data(), MPI_INT,
                  recv_counts_.data(), same.data(), places.data(), MPI_INT, MPI_COMM_WORLD);

    to_rank_.assign(static_cast<size_t>(P_), 0);
    from_rank_.assign(static_cast<size_t>(P_), 0);
    for (int r = 0; r < P_; ++r) {
      for (int e = expert_offsets[size_t(r)]; e < expert_offsets[size_t(r) + 1]; ++e) {
        to_rank_[size_t(r)] += send_counts[size_t(e)];
      }
      for (int e = 0; e < local; ++e) from_rank_[size_t(r)] += recv_count(r, e);
    }
    to_offsets_ = offsets_of(to_rank_);
    from_offsets_ = offsets_of(from_rank_);
    const auto num_sent = static_cast<int64_t>(ids.size());
    num_rows_ = std::accumulate(from_rank_.begin(), from_rank_.end(), int64_t{0});
    home_.resize(static_cast<size_t>(num_sent * D_));
    away_.resize(static_cast<size_t>(num_rows_ * D_));
    rows_.resize(static_cast<size_t>(num_rows_ * D_));
    y_.resize(static_cast<size_t>(num_rows_ * D_));
  }

  void dispatch() override {
    const auto* x = static_cast<const float*>(in_.x.data);
    for (int64_t t = 0; t < T_; ++t) {
      for (int64_t k = 0; k < K_; ++k) {
        copy(&home_[static_cast<size_t>(position_[size_t(t * K_ + k)] * D_)], x + t * D_, 1);
      }
    }
    MPI_Alltoallv(home_.data(), to_rank_.data(), to_offsets_.data(), row_type_, away_.data(),
                  from_rank_.data(), from_offsets_.data(), row_type_, MPI_COMM_WORLD);
    for_each_block([&](int64_t arrival, int64_t row, int64_t count) {
      copy(&rows_[static_cast<size_t>(row * D_)], &away_[static_cast<size_t>(arrival * D_)], count);
    });
  }

  void combine() override {
    for_each_block([&](int64_t arrival, int64_t row, int64_t count) {
      copy(&away_[static_cast<size_t>(arrival * D_)], &y_[static_cast<size_t>(row * D_)], count);
    });
    MPI_Alltoallv(away_.data(), from_rank_.data(), from_offsets_.data(), row_type_, home_.data(),
                  to_rank_.data(), to_offsets_.data(), row_type_, MPI_COMM_WORLD);
    const std::vector<float>& weights = in_.workload.weights(rank_);
    for (int64_t t = 0; t < T_; ++t) {
      float* out = &out_[static_cast<size_t>(t * D_)];
      std::memset(out, 0, static_cast<size_t>(D_) * sizeof(float));
      for (int64_t k = 0; k < K_; ++k) {
        const float weight = weights[size_t(t * K_ + k)];
        const float* row = &home_[static_cast<size_t>(position_[size_t(t * K_ + k)] * D_)];
        for (int64_t d = 0; d < D_; ++d) out[d] += weight * row[d];
      }
    }
  }

  bool sums_exactly() const override { return false; }
  TensorView y() override { return {y_.data(), {num_rows_, D_}}; }
  ConstTensorView rows() const override { return {rows_.data(), {num_rows_, D_}}; }
  ConstTensorView out() const override { return {out_.data(), {T_, D_}}; }

 private:
  int recv_count(int source, int local_expert) const {
    const auto E_local = static_cast<size_t>(num_local_experts_);
    return recv_counts_[static_cast<size_t>(source) * E_local + static_cast<size_t>(local_expert)];
  }

  static std::vector<int> offsets_of(const std::vector<int>& counts) {
    std::vector<int> offsets(counts.size(), 0);
    std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), 0);
    return offsets;
  }

  void copy(float* to, const float* from, int64_t num_rows) const {
    std::memcpy(to, from, static_cast<size_t>(num_rows * D_) * sizeof(float));
  }

  // Rows arrive ordered by (source, expert) and are needed ordered by (expert, source).
  template <typename Body>
  void for_each_block(const Body& body) const {
    int64_t row = 0;
    for (int e = 0; e < num_local_experts_; ++e) {
      for (int r = 0; r < P_; ++r) {
        int64_t arrival = from_offsets_[size_t(r)];
        for (int before = 0; before < e; ++before) {
          arrival += recv_count(r, before);
        }
        const int64_t count = recv_count(r, e);
        body(arrival, row, count);
        row += count;
      }
    }
  }

  MoverInputs in_;
  int rank_;
  int P_;
  int64_t T_, K_, D_, E_;
  MPI_Datatype row_type_{};
  std::vector<int64_t> position_;                                     // [T, K] in the send buffer
  std::vector<int> recv_counts_;                                      // [P, E_local]
  std::vector<int> to_rank_, to_offsets_, from_rank_, from_offsets_;  // [P] in rows
  int num_local_experts_ = 0;
  int64_t num_rows_ = 0;
  std::vector<float> home_;  // [S, D] by destination
  std::vector<float> away_;  // [R, D] by source
  std::vector<float> rows_, y_, out_;
};

}  // namespace

std::unique_ptr<Mover> make_anchor_mover(const MoverInputs& inputs) {
  return std::make_unique<AnchorMover>(inputs);
}

}  // namespace crossdock::bench

#else

namespace crossdock::bench {

std::unique_ptr<Mover> make_anchor_mover(const MoverInputs& /*inputs*/) {
  throw Error(ErrorCode::kUnsupported,
              "anchor-mpi-pack needs a command that is linked with MPI, and this one is not");
}

}  // namespace crossdock::bench

#endif
