#include "parameter.hpp"

#include <random>

namespace train {

template <typename Real>
std::vector<Real> random_values(const std::string& name, int64_t count, double scale) {
  std::seed_seq seed(name.begin(), name.end());
  std::mt19937_64 generator(seed);
  std::vector<Real> values(static_cast<size_t>(count));
  for (Real& value : values) {
    const double in_unit = static_cast<double>(generator() >> 11) * 0x1p-53;  // [0, 1)
    value = static_cast<Real>(scale * (2.0 * in_unit - 1.0));
  }
  return values;
}

template std::vector<float> random_values(const std::string&, int64_t, double);
template std::vector<double> random_values(const std::string&, int64_t, double);

}  // namespace train
