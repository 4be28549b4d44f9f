#include <algorithm>
#include <cmath>
#include <set>

#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

// [P], each [R, width]
PerRank zero_rows(const Layout& layout, int64_t width) {
  PerRank rows;
  for (int r = 0; r < layout.num_ranks(); ++r) {
    rows.emplace_back(static_cast<size_t>(layout.num_rows(r) * width), 0.0);
  }
  return rows;
}

// [P], each [T, width]
PerRank zero_tokens(const Layout& layout, int64_t width) {
  PerRank tokens;
  for (int r = 0; r < layout.num_ranks(); ++r) {
    tokens.emplace_back(static_cast<size_t>(layout.num_tokens(r) * width), 0.0);
  }
  return tokens;
}

// Calls visit(rank, token, slot, place) for every kept route, slots ascending within a token.
template <typename Visit>
void for_each_route(const Layout& layout, const Visit& visit) {
  for (int r = 0; r < layout.num_ranks(); ++r) {
    for (int64_t t = 0; t < layout.num_tokens(r); ++t) {
      for (int64_t k = 0; k < layout.K; ++k) {
        const RowPlace& place =
            layout.places[static_cast<size_t>(r)][static_cast<size_t>(t * layout.K + k)];
        if (place.is_kept()) visit(static_cast<size_t>(r), t, k, place);
      }
    }
  }
}

// The start of row `index` in an array of rows of this width.
template <typename Values>
auto row_of(Values& values, int64_t index, int64_t width) {
  return values.begin() + index * width;
}

void round_all(DType dtype, PerRank& ranks) {
  for (std::vector<double>& values : ranks) {
    for (double& value : values) value = round_to(dtype, value);
  }
}

// Sums in `Accumulator`, by fma from +0, slots ascending.
template <typename Accumulator>
PerRank sum_in_slot_order(const Layout& layout, int64_t width, const PerRank& rows,
                          const PerRank* weights) {
  PerRank sums = zero_tokens(layout, width);
  for_each_route(layout, [&](size_t r, int64_t t, int64_t k, const RowPlace& place) {
    const auto row = row_of(rows[static_cast<size_t>(place.rank)], place.row, width);
    const auto sum = row_of(sums[r], t, width);
    const double weight = weights ? (*weights)[r][static_cast<size_t>(t * layout.K + k)] : 1.0;
    for (int64_t d = 0; d < width; ++d) {
      sum[d] = std::fma(static_cast<Accumulator>(weight), static_cast<Accumulator>(row[d]),
                        static_cast<Accumulator>(sum[d]));
    }
  });
  return sums;
}

}  // namespace

PerRank dispatch(const Layout& layout, int64_t width, const PerRank& tokens) {
  PerRank rows = zero_rows(layout, width);
  for_each_route(layout, [&](size_t r, int64_t t, int64_t, const RowPlace& place) {
    const auto token = row_of(tokens[r], t, width);
    std::copy(token, token + width,
              row_of(rows[static_cast<size_t>(place.rank)], place.row, width));
  });
  return rows;
}

PerRank dispatch_routes(const Layout& layout, const PerRank& routes) {
  PerRank rows = zero_rows(layout, 1);
  for_each_route(layout, [&](size_t r, int64_t t, int64_t k, const RowPlace& place) {
    rows[static_cast<size_t>(place.rank)][static_cast<size_t>(place.row)] =
        routes[r][static_cast<size_t>(t * layout.K + k)];
  });
  return rows;
}

PerRank collect_routes(const Layout& layout, const PerRank& rows) {
  PerRank routes = zero_tokens(layout, layout.K);
  for_each_route(layout, [&](size_t r, int64_t t, int64_t k, const RowPlace& place) {
    routes[r][static_cast<size_t>(t * layout.K + k)] =
        rows[static_cast<size_t>(place.rank)][static_cast<size_t>(place.row)];
  });
  return routes;
}

PerRank combine(const Layout& layout, int64_t width, const PerRank& rows, const PerRank* weights) {
  return sum_in_slot_order<double>(layout, width, rows, weights);
}

PerRank combine_exact(const Layout& layout, int64_t width, DType dtype, const PerRank& rows,
                      const PerRank* weights) {
  if (dtype == DType::kF64) return combine(layout, width, rows, weights);
  PerRank sums = sum_in_slot_order<float>(layout, width, rows, weights);
  round_all(dtype, sums);
  return sums;
}

PerRank combine_partial(const Layout& layout, int64_t width, const PartialGroups& groups,
                        const PerRank& rows, const PerRank* weights) {
  PerRank sums = zero_tokens(layout, width);
  const std::set<int> ascending(groups.group_of_rank.begin(), groups.group_of_rank.end());
  for (const int group : ascending) {
    Layout part = layout;  // without the routes to other groups
    for (auto& places : part.places) {
      for (RowPlace& place : places) {
        if (place.is_kept() && groups.group_of_rank[static_cast<size_t>(place.rank)] != group) {
          place = {};
        }
      }
    }
    const PerRank partial =
        combine_exact(part, width, partial_dtype(groups.sums, groups.rows), rows, weights);
    for (size_t r = 0; r < sums.size(); ++r) {
      for (size_t i = 0; i < sums[r].size(); ++i) {
        sums[r][i] = groups.rows == DType::kF64
                         ? sums[r][i] + partial[r][i]
                         : static_cast<float>(sums[r][i]) + static_cast<float>(partial[r][i]);
      }
    }
  }
  round_all(groups.rows, sums);
  return sums;
}

CombineGradients combine_backward(const Layout& layout, int64_t width, const PerRank& grad_out,
                                  const PerRank& y, const PerRank& weights) {
  CombineGradients grads{zero_rows(layout, width), zero_tokens(layout, layout.K)};
  for_each_route(layout, [&](size_t r, int64_t t, int64_t k, const RowPlace& place) {
    const auto route = static_cast<size_t>(t * layout.K + k);
    const auto g = row_of(grad_out[r], t, width);
    const auto y_row = row_of(y[static_cast<size_t>(place.rank)], place.row, width);
    const auto grad_row = row_of(grads.rows[static_cast<size_t>(place.rank)], place.row, width);
    for (int64_t d = 0; d < width; ++d) {
      grad_row[d] = weights[r][route] * g[d];
      grads.weights[r][route] += y_row[d] * g[d];
    }
  });
  return grads;
}

}  // namespace crossdock::reference
