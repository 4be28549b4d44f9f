#include "sequence/row_forms.hpp"

#include "core/check.hpp"
#include "core/sizes.hpp"
#include "core/tensor_check.hpp"

namespace crossdock::sequence {
namespace {

bool begins_with(const Shape& shape, const Shape& first) {
  if (shape.rank() < first.rank()) return false;
  for (int i = 0; i < first.rank(); ++i) {
    if (shape[i] != first[i]) return false;
  }
  return true;
}

// Bytes of a row, if the first token_dims dimensions are tokens.
int64_t row_bytes(std::string_view name, const ConstTensorView& tensor, int token_dims) {
  const auto dim = [&](int i) { return i < tensor.shape.rank() ? tensor.shape[i] : 1; };
  const auto bytes = product_within(kMaxBytes, {dim(token_dims), dim(token_dims + 1),
                                                dim(token_dims + 2), size_of(tensor.dtype)});
  CROSSDOCK_CHECK(bytes, name, " of shape ", tensor.shape.to_string(),
                  " has rows that are too large");
  return *bytes;
}

bool have_common_form(const RowForms& a, const RowForms& b) {
  const auto has = [&](int64_t bytes) {
    return bytes >= 0 && (bytes == b.full || bytes == b.flat);
  };
  return has(a.full) || has(a.flat);
}

}  // namespace

RowForms row_forms(std::string_view name, const ConstTensorView& tensor, const Shape& tokens) {
  RowForms forms;
  if (begins_with(tensor.shape, tokens)) forms.full = row_bytes(name, tensor, tokens.rank());
  if (tensor.given() && tensor.shape[0] == tokens.num_elements()) {
    forms.flat = row_bytes(name, tensor, 1);
  }
  CROSSDOCK_CHECK(forms != RowForms{}, name, " must have the dimensions ", tokens.to_string(),
                  " or [", tokens.num_elements(), "], followed by those of a row, got ",
                  describe(tensor));
  return forms;
}

void check_tokens(const SequenceShard& shard, std::string_view local_name,
                  const ConstTensorView& local, const ConstTensorView& global) {
  const RowForms local_forms = row_forms(local_name, local, shard.shape());
  const RowForms global_forms = row_forms("global", global, shard.global_shape());
  CROSSDOCK_CHECK(local.dtype == global.dtype && have_common_form(local_forms, global_forms),
                  "the tokens of ", local_name, " (", describe(local), ") and of global (",
                  describe(global), ") must have the same dtype and width");
  CROSSDOCK_CHECK(local.device == global.device, local_name,
                  " and global must be on the same device");
  check_not_null(local_name, local);
  check_not_null("global", global);
}

}  // namespace crossdock::sequence
