// The small operations of a program. Elementwise functions work on strips: operands are widened to float32, or to int64 where all are
// integers, computed, and rounded once to the result's type, as PyTorch does.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "program/program.h"

namespace moegraft {
namespace {

constexpr int kStrip = 1024;
constexpr std::size_t kMostOperands = 4;

template <class Value>
Value read(const std::byte* p) {
  Value value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class Stored, class Value>
void load_as(const std::byte* p, std::int64_t stride, int count, Value* out) {
  for (int i = 0; i < count; ++i) out[i] = static_cast<Value>(read<Stored>(p + i * stride * static_cast<std::int64_t>(sizeof(Stored))));
}

void load_floats(const Kernels& kernels, ElementType type, const std::byte* p, std::int64_t stride, int count, float* out) {
  switch (type) {
    case ElementType::kInt64: return load_as<std::int64_t>(p, stride, count, out);
    case ElementType::kInt32: return load_as<std::int32_t>(p, stride, count, out);
    case ElementType::kBool: return load_as<std::uint8_t>(p, stride, count, out);
    case ElementType::kFloat32:
      if (stride != 1) return load_as<float>(p, stride, count, out);
      [[fallthrough]];
    default: break;
  }
  if (stride == 1) return kernels.widen(activation_of(type), p, out, count);
  const auto bytes = static_cast<std::int64_t>(bytes_of(type));
  if (stride == 0) {
    kernels.widen(activation_of(type), p, out, 1);
    std::fill_n(out + 1, count - 1, out[0]);
    return;
  }
  for (int i = 0; i < count; ++i) kernels.widen(activation_of(type), p + i * stride * bytes, out + i, 1);
}

void load_integers(ElementType type, const std::byte* p, std::int64_t stride, int count, std::int64_t* out) {
  if (type == ElementType::kInt64) load_as<std::int64_t>(p, stride, count, out);
  else if (type == ElementType::kInt32) load_as<std::int32_t>(p, stride, count, out);
  else load_as<std::uint8_t>(p, stride, count, out);
}

template <class Stored, class Value>
void store_as(const Value* values, std::byte* p, std::int64_t stride, int count) {
  for (int i = 0; i < count; ++i) {
    const Stored stored = static_cast<Stored>(values[i]);
    std::memcpy(p + i * stride * static_cast<std::int64_t>(sizeof(Stored)), &stored, sizeof stored);
  }
}

template <class Value>
void store_bools(const Value* values, std::byte* p, std::int64_t stride, int count) {
  for (int i = 0; i < count; ++i) p[i * stride] = std::byte{values[i] != Value(0)};
}

void store_floats(const Kernels& kernels, const float* values, ElementType type, std::byte* p, std::int64_t stride, int count) {
  switch (type) {
    case ElementType::kInt64: return store_as<std::int64_t>(values, p, stride, count);
    case ElementType::kInt32: return store_as<std::int32_t>(values, p, stride, count);
    case ElementType::kBool: return store_bools(values, p, stride, count);
    default: break;
  }
  if (stride == 1) return kernels.narrow(activation_of(type), values, p, count);
  const auto bytes = static_cast<std::int64_t>(bytes_of(type));
  for (int i = 0; i < count; ++i) kernels.narrow(activation_of(type), values + i, p + i * stride * bytes, 1);
}

void store_integers(const std::int64_t* values, ElementType type, std::byte* p, std::int64_t stride, int count) {
  if (type == ElementType::kInt64) store_as<std::int64_t>(values, p, stride, count);
  else if (type == ElementType::kInt32) store_as<std::int32_t>(values, p, stride, count);
  else store_bools(values, p, stride, count);
}

struct Function {
  const char* name;
  Elementwise code;
  int arguments;
};

// Not a map of strings, which takes much longer to compile.
constexpr Function kFunctions[] = {
    {"copy", Elementwise::kCopy, 1},
    {"neg", Elementwise::kNeg, 1},
    {"abs", Elementwise::kAbs, 1},
    {"exp", Elementwise::kExp, 1},
    {"log", Elementwise::kLog, 1},
    {"log1p", Elementwise::kLog1p, 1},
    {"sin", Elementwise::kSin, 1},
    {"cos", Elementwise::kCos, 1},
    {"sqrt", Elementwise::kSqrt, 1},
    {"rsqrt", Elementwise::kRsqrt, 1},
    {"reciprocal", Elementwise::kReciprocal, 1},
    {"sigmoid", Elementwise::kSigmoid, 1},
    {"silu", Elementwise::kSilu, 1},
    {"gelu", Elementwise::kGelu, 1},
    {"gelu_tanh", Elementwise::kGeluTanh, 1},
    {"relu", Elementwise::kRelu, 1},
    {"tanh", Elementwise::kTanh, 1},
    {"floor", Elementwise::kFloor, 1},
    {"sign", Elementwise::kSign, 1},
    {"not", Elementwise::kNot, 1},
    {"add", Elementwise::kAdd, 2},
    {"sub", Elementwise::kSub, 2},
    {"mul", Elementwise::kMul, 2},
    {"div", Elementwise::kDiv, 2},
    {"maximum", Elementwise::kMaximum, 2},
    {"minimum", Elementwise::kMinimum, 2},
    {"pow", Elementwise::kPow, 2},
    {"floor_div", Elementwise::kFloorDiv, 2},
    {"eq", Elementwise::kEq, 2},
    {"ne", Elementwise::kNe, 2},
    {"lt", Elementwise::kLt, 2},
    {"le", Elementwise::kLe, 2},
    {"gt", Elementwise::kGt, 2},
    {"ge", Elementwise::kGe, 2},
    {"and", Elementwise::kAnd, 2},
    {"or", Elementwise::kOr, 2},
    {"xor", Elementwise::kXor, 2},
    {"where", Elementwise::kWhere, 3},
    {"softplus", Elementwise::kSoftplus, 3},
};

bool has_integer_form(Elementwise code) {
  switch (code) {
    case Elementwise::kCopy:
    case Elementwise::kNeg:
    case Elementwise::kAbs:
    case Elementwise::kNot:
    case Elementwise::kAdd:
    case Elementwise::kSub:
    case Elementwise::kMul:
    case Elementwise::kMaximum:
    case Elementwise::kMinimum:
    case Elementwise::kFloorDiv:
    case Elementwise::kEq:
    case Elementwise::kNe:
    case Elementwise::kLt:
    case Elementwise::kLe:
    case Elementwise::kGt:
    case Elementwise::kGe:
    case Elementwise::kAnd:
    case Elementwise::kOr:
    case Elementwise::kXor:
    case Elementwise::kWhere: return true;
    default: return false;
  }
}

std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  if (b == 0) refuse("an integer division by zero");
  const std::int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

std::int64_t compute_integer(Elementwise code, std::int64_t a, std::int64_t b, std::int64_t c) {
  switch (code) {
    case Elementwise::kNeg: return -a;
    case Elementwise::kAbs: return a < 0 ? -a : a;
    case Elementwise::kNot: return a == 0;
    case Elementwise::kAdd: return a + b;
    case Elementwise::kSub: return a - b;
    case Elementwise::kMul: return a * b;
    case Elementwise::kMaximum: return std::max(a, b);
    case Elementwise::kMinimum: return std::min(a, b);
    case Elementwise::kFloorDiv: return floor_divide(a, b);
    case Elementwise::kEq: return a == b;
    case Elementwise::kNe: return a != b;
    case Elementwise::kLt: return a < b;
    case Elementwise::kLe: return a <= b;
    case Elementwise::kGt: return a > b;
    case Elementwise::kGe: return a >= b;
    case Elementwise::kAnd: return a != 0 && b != 0;
    case Elementwise::kOr: return a != 0 || b != 0;
    case Elementwise::kXor: return (a != 0) != (b != 0);
    case Elementwise::kWhere: return a != 0 ? b : c;
    default: return a;
  }
}

// The result is operand 0; all operands have its sizes, broadcast ones with strides of 0.
class ElementwiseOperation final : public SmallOperation {
 public:
  ElementwiseOperation(Function function, std::vector<Operand> operands)
      : SmallOperation(std::move(operands)), function_(function), integers_(has_integer_form(function.code)) {
    if (operands_.size() != static_cast<std::size_t>(function.arguments) + 1)
      refuse("an elementwise function has another number of operands");
    if (operands_[0].buffer < 0) refuse("the result of an elementwise function is a number");
    for (const Operand& operand : operands_) {
      if (operand.buffer >= 0 && operand.dims != operands_[0].dims) refuse("the operands of an elementwise function differ in dimensions");
      integers_ = integers_ && (operand.buffer < 0 ? std::floor(operand.number) == operand.number : is_integer(operand.type));
    }
    // A plain copy between equal types moves bytes.
    moves_ = function.code == Elementwise::kCopy && operands_[1].buffer >= 0 && operands_[0].type == operands_[1].type;
  }

  // Joins dimensions that all operands step through as one, so that strips are long.
  void resolved() override {
    dims_ = 0;
    elements_ = views_[0].elements();
    for (int dim = 0; dim < views_[0].dims; ++dim) {
      const std::int64_t size = views_[0].sizes[static_cast<std::size_t>(dim)];
      for (const View& view : views_)
        if (view.data != nullptr && view.sizes[static_cast<std::size_t>(dim)] != size)
          refuse("the operands of an elementwise function differ in size");
      if (size == 1) continue;
      bool joined = dims_ > 0;
      for (std::size_t i = 0; i < views_.size() && joined; ++i)
        joined = strides_[i][static_cast<std::size_t>(dims_ - 1)] == stride_of(i, dim) * size;
      if (!joined) sizes_[static_cast<std::size_t>(dims_++)] = 1;
      sizes_[static_cast<std::size_t>(dims_ - 1)] *= size;
      for (std::size_t i = 0; i < views_.size(); ++i) strides_[i][static_cast<std::size_t>(dims_ - 1)] = stride_of(i, dim);
    }
    if (dims_ == 0) {
      sizes_[0] = 1;
      for (std::size_t i = 0; i < views_.size(); ++i) strides_[i][0] = 0;
      strides_[0][0] = 1;
      dims_ = 1;
    }
  }

  void run(const Kernels& kernels) override {
    if (elements_ == 0) return;
    const std::size_t last = static_cast<std::size_t>(dims_ - 1);
    std::array<std::int64_t, kMaxDims> at{};
    while (true) {
      for (std::int64_t first = 0; first < sizes_[last]; first += kStrip)
        strip(kernels, at, first, static_cast<int>(std::min<std::int64_t>(kStrip, sizes_[last] - first)));
      int dim = dims_ - 2;
      while (dim >= 0 && ++at[static_cast<std::size_t>(dim)] == sizes_[static_cast<std::size_t>(dim)])
        at[static_cast<std::size_t>(dim--)] = 0;
      if (dim < 0) return;
    }
  }

 private:
  std::int64_t stride_of(std::size_t operand, int dim) const {
    return views_[operand].data == nullptr ? 0 : views_[operand].strides[static_cast<std::size_t>(dim)];
  }

  std::byte* address(std::size_t operand, const std::array<std::int64_t, kMaxDims>& at, std::int64_t first) const {
    const std::size_t last = static_cast<std::size_t>(dims_ - 1);
    std::int64_t element = first * strides_[operand][last];
    for (std::size_t dim = 0; dim < last; ++dim) element += at[dim] * strides_[operand][dim];
    return views_[operand].data + element * static_cast<std::int64_t>(bytes_of(views_[operand].type));
  }

  void strip(const Kernels& kernels, const std::array<std::int64_t, kMaxDims>& at, std::int64_t first, int count) {
    const std::size_t last = static_cast<std::size_t>(dims_ - 1);
    std::byte* const out = address(0, at, first);
    const std::int64_t out_stride = strides_[0][last];
    if (moves_ && out_stride == 1 && strides_[1][last] == 1) {
      std::memmove(out, address(1, at, first), static_cast<std::size_t>(count) * bytes_of(views_[0].type));
      return;
    }
    const std::size_t arguments = views_.size() - 1;
    if (integers_) {
      alignas(64) std::int64_t values[3][kStrip];
      for (std::size_t i = 0; i < arguments; ++i) {
        const View& view = views_[i + 1];
        if (view.data == nullptr) std::fill_n(values[i], count, static_cast<std::int64_t>(view.number));
        else load_integers(view.type, address(i + 1, at, first), strides_[i + 1][last], count, values[i]);
      }
      for (int i = 0; i < count; ++i)
        values[0][i] = compute_integer(function_.code, values[0][i], arguments > 1 ? values[1][i] : 0, arguments > 2 ? values[2][i] : 0);
      store_integers(values[0], views_[0].type, out, out_stride, count);
      return;
    }
    alignas(64) float values[3][kStrip];
    const float* given[3] = {values[0], values[1], values[2]};
    for (std::size_t i = 0; i < arguments; ++i) {
      const View& view = views_[i + 1];
      const std::int64_t stride = strides_[i + 1][last];
      if (view.data == nullptr) std::fill_n(values[i], count, static_cast<float>(view.number));
      else if (view.type == ElementType::kFloat32 && stride == 1) given[i] = reinterpret_cast<const float*>(address(i + 1, at, first));
      else load_floats(kernels, view.type, address(i + 1, at, first), stride, count, values[i]);
    }
    const bool direct = views_[0].type == ElementType::kFloat32 && out_stride == 1;
    float* const target = direct ? reinterpret_cast<float*>(out) : values[0];
    kernels.elementwise({function_.code, given[0], given[1], given[2], target, count});
    if (!direct) store_floats(kernels, target, views_[0].type, out, out_stride, count);
  }

  const Function function_;
  bool integers_;
  bool moves_;
  int dims_ = 1;
  std::int64_t elements_ = 0;
  std::array<std::int64_t, kMaxDims> sizes_{};
  std::array<std::array<std::int64_t, kMaxDims>, kMostOperands> strides_{};
};

// Operations along the last dimension: the others of all operands are the same, and are stepped through row by row.
class RowOperation : public SmallOperation {
 public:
  using SmallOperation::SmallOperation;
  void resolved() override {
    for (const View& view : views_) {
      if (view.data == nullptr || view.dims != views_[0].dims || view.dims < 1) refuse("an operation along rows has another form");
      for (int dim = 0; dim + 1 < view.dims; ++dim)
        if (view.sizes[static_cast<std::size_t>(dim)] != views_[0].sizes[static_cast<std::size_t>(dim)])
          refuse("an operation along rows has operands of different sizes");
    }
    check();
  }
  void run(const Kernels& kernels) override {
    const int outer = views_[0].dims - 1;
    std::array<std::int64_t, kMaxDims> at{};
    for (int dim = 0; dim < outer; ++dim)
      if (views_[0].sizes[static_cast<std::size_t>(dim)] == 0) return;
    std::vector<std::byte*> rows(views_.size());
    while (true) {
      for (std::size_t i = 0; i < views_.size(); ++i) {
        std::int64_t element = 0;
        for (int dim = 0; dim < outer; ++dim)
          element += at[static_cast<std::size_t>(dim)] * views_[i].strides[static_cast<std::size_t>(dim)];
        rows[i] = views_[i].data + element * static_cast<std::int64_t>(bytes_of(views_[i].type));
      }
      compute(kernels, rows);
      int dim = outer - 1;
      while (dim >= 0 && ++at[static_cast<std::size_t>(dim)] == views_[0].sizes[static_cast<std::size_t>(dim)])
        at[static_cast<std::size_t>(dim--)] = 0;
      if (dim < 0) return;
    }
  }

 protected:
  virtual void check() const {}
  virtual void compute(const Kernels& kernels, const std::vector<std::byte*>& rows) = 0;

  std::int64_t size(std::size_t operand) const { return views_[operand].sizes[static_cast<std::size_t>(views_[operand].dims - 1)]; }
  std::int64_t stride(std::size_t operand) const { return views_[operand].strides[static_cast<std::size_t>(views_[operand].dims - 1)]; }
  const float* floats(const Kernels& kernels, const std::vector<std::byte*>& rows, std::size_t operand) {
    values_.resize(static_cast<std::size_t>(size(operand)));
    load_floats(kernels, views_[operand].type, rows[operand], stride(operand), static_cast<int>(size(operand)), values_.data());
    return values_.data();
  }
  void store(const Kernels& kernels, const float* values, std::byte* row, std::size_t operand) const {
    store_floats(kernels, values, views_[operand].type, row, stride(operand), static_cast<int>(size(operand)));
  }
  std::int64_t index_at(std::byte* row, std::size_t operand, std::int64_t place) const {
    return read<std::int64_t>(row + 8 * place * stride(operand));
  }
  void set_index(std::byte* row, std::size_t operand, std::int64_t place, std::int64_t value) const {
    std::memcpy(row + 8 * place * stride(operand), &value, sizeof value);
  }

  std::vector<float> values_;
};

class SoftmaxOperation final : public RowOperation {  // out, x
 public:
  using RowOperation::RowOperation;

 private:
  void check() const override {
    if (views_.size() != 2 || size(0) != size(1)) refuse("softmax has another form");
  }
  void compute(const Kernels& kernels, const std::vector<std::byte*>& rows) override {
    floats(kernels, rows, 1);
    float largest = -std::numeric_limits<float>::infinity(), sum = 0.0f;
    for (const float value : values_) largest = value > largest ? value : largest;
    for (float& value : values_) sum += value = std::exp(value - largest);
    for (float& value : values_) value /= sum;
    store(kernels, values_.data(), rows[0], 0);
  }
};

enum class Reduction { kSum, kMean, kMax };

class ReduceOperation final : public RowOperation {  // out (..., 1), x
 public:
  ReduceOperation(Reduction kind, std::vector<Operand> operands) : RowOperation(std::move(operands)), kind_(kind) {}

 private:
  void check() const override {
    if (views_.size() != 2 || size(0) != 1 || (kind_ == Reduction::kMax && size(1) == 0)) refuse("a reduction has another form");
    if (is_integer(views_[1].type) && kind_ == Reduction::kMean) refuse("a mean of integers");
  }
  void compute(const Kernels& kernels, const std::vector<std::byte*>& rows) override {
    if (is_integer(views_[0].type) && is_integer(views_[1].type)) {
      std::int64_t total = kind_ == Reduction::kMax ? std::numeric_limits<std::int64_t>::min() : 0, value;
      for (std::int64_t i = 0; i < size(1); ++i) {
        load_integers(views_[1].type, rows[1] + i * stride(1) * static_cast<std::int64_t>(bytes_of(views_[1].type)), 1, 1, &value);
        total = kind_ == Reduction::kMax ? std::max(total, value) : total + value;
      }
      return store_integers(&total, views_[0].type, rows[0], 1, 1);
    }
    floats(kernels, rows, 1);
    double sum = 0.0;
    float largest = -std::numeric_limits<float>::infinity();
    for (const float value : values_) {
      sum += value;
      if (value > largest || value != value) largest = value;  // nothing is larger than a NaN
    }
    const float found = kind_ == Reduction::kMax
                            ? largest
                            : static_cast<float>(kind_ == Reduction::kMean ? sum / static_cast<double>(values_.size()) : sum);
    store(kernels, &found, rows[0], 0);
  }
  const Reduction kind_;
};

// values, ids, x. NaN is the largest. Equal values are chosen as PyTorch's kernel chooses them, which partially sorts pairs of values and
// ids where few are wanted, and partitions them otherwise: neither is stable.
class TopkOperation final : public RowOperation {
 public:
  TopkOperation(std::vector<Operand> operands, const std::vector<double>& numbers)
      : RowOperation(std::move(operands)), largest_(numbers.at(0) != 0.0), sorted_(numbers.at(1) != 0.0) {}

 private:
  void check() const override {
    if (views_.size() != 3 || size(0) != size(1) || size(0) > size(2) || views_[1].type != ElementType::kInt64)
      refuse("topk has another form");
  }
  void compute(const Kernels& kernels, const std::vector<std::byte*>& rows) override {
    if (size(0) == 0) return;
    floats(kernels, rows, 2);
    pairs_.resize(values_.size());
    for (std::size_t i = 0; i < pairs_.size(); ++i) pairs_[i] = {values_[i], static_cast<std::int64_t>(i)};
    const auto larger = [](const Pair& a, const Pair& b) { return (a.first != a.first && b.first == b.first) || a.first > b.first; };
    const auto smaller = [](const Pair& a, const Pair& b) { return (a.first == a.first && b.first != b.first) || a.first < b.first; };
    if (largest_) choose(larger);
    else choose(smaller);
    values_.resize(static_cast<std::size_t>(size(0)));
    for (std::int64_t i = 0; i < size(0); ++i) {
      values_[static_cast<std::size_t>(i)] = pairs_[static_cast<std::size_t>(i)].first;
      set_index(rows[1], 1, i, pairs_[static_cast<std::size_t>(i)].second);
    }
    store(kernels, values_.data(), rows[0], 0);
  }

  using Pair = std::pair<float, std::int64_t>;
  template <class Before>
  void choose(const Before& before) {
    const auto wanted = static_cast<std::ptrdiff_t>(size(0));
    if (wanted * 64 <= static_cast<std::ptrdiff_t>(pairs_.size())) {
      std::partial_sort(pairs_.begin(), pairs_.begin() + wanted, pairs_.end(), before);
      return;
    }
    std::nth_element(pairs_.begin(), pairs_.begin() + wanted - 1, pairs_.end(), before);
    if (sorted_) std::sort(pairs_.begin(), pairs_.begin() + wanted - 1, before);
  }

  const bool largest_, sorted_;
  std::vector<Pair> pairs_;
};

class GatherOperation final : public RowOperation {  // out, x, index
 public:
  using RowOperation::RowOperation;

 private:
  void check() const override {
    if (views_.size() != 3 || size(0) != size(2) || views_[0].type != views_[1].type || views_[2].type != ElementType::kInt64)
      refuse("gather has another form");
  }
  void compute(const Kernels&, const std::vector<std::byte*>& rows) override {
    const auto bytes = static_cast<std::int64_t>(bytes_of(views_[0].type));
    for (std::int64_t i = 0; i < size(0); ++i) {
      const std::int64_t place = index_at(rows[2], 2, i);
      if (place < 0 || place >= size(1)) refuse("gather: index " + std::to_string(place) + " is out of range");
      std::memcpy(rows[0] + i * stride(0) * bytes, rows[1] + place * stride(1) * bytes, static_cast<std::size_t>(bytes));
    }
  }
};

class ScatterOperation final : public RowOperation {  // out, index, and values if there is no number; out has its other elements already
 public:
  ScatterOperation(std::vector<Operand> operands, const std::vector<double>& numbers)
      : RowOperation(std::move(operands)),
        number_(numbers.empty() ? 0.0f : static_cast<float>(numbers[0])),
        has_number_(!numbers.empty()) {}

 private:
  void check() const override {
    if (views_.size() != (has_number_ ? 2u : 3u) || views_[1].type != ElementType::kInt64 ||
        (!has_number_ && (size(2) < size(1) || views_[2].type != views_[0].type)))
      refuse("scatter has another form");
  }
  void compute(const Kernels& kernels, const std::vector<std::byte*>& rows) override {
    const auto bytes = static_cast<std::int64_t>(bytes_of(views_[0].type));
    for (std::int64_t i = 0; i < size(1); ++i) {
      const std::int64_t place = index_at(rows[1], 1, i);
      if (place < 0 || place >= size(0)) refuse("scatter: index " + std::to_string(place) + " is out of range");
      std::byte* target = rows[0] + place * stride(0) * bytes;
      if (has_number_) store_floats(kernels, &number_, views_[0].type, target, 1, 1);
      else std::memcpy(target, rows[2] + i * stride(2) * bytes, static_cast<std::size_t>(bytes));
    }
  }
  const float number_;
  const bool has_number_;
};

class CumsumOperation final : public RowOperation {  // out, x
 public:
  using RowOperation::RowOperation;

 private:
  void check() const override {
    if (views_.size() != 2 || size(0) != size(1) || (is_integer(views_[0].type) && !is_integer(views_[1].type)))
      refuse("cumsum has another form");
  }
  void compute(const Kernels& kernels, const std::vector<std::byte*>& rows) override {
    if (is_integer(views_[0].type)) {
      std::vector<std::int64_t> values(static_cast<std::size_t>(size(1)));
      load_integers(views_[1].type, rows[1], stride(1), static_cast<int>(size(1)), values.data());
      for (std::size_t i = 1; i < values.size(); ++i) values[i] += values[i - 1];
      return store_integers(values.data(), views_[0].type, rows[0], stride(0), static_cast<int>(size(0)));
    }
    floats(kernels, rows, 1);
    double sum = 0.0;
    for (float& value : values_) value = static_cast<float>(sum += value);
    store(kernels, values_.data(), rows[0], 0);
  }
};

class ArangeOperation final : public SmallOperation {  // out (N); start and step are numbers
 public:
  using SmallOperation::SmallOperation;
  void resolved() override {
    if (views_.size() != 3 || views_[0].dims != 1 || views_[1].data != nullptr || views_[2].data != nullptr)
      refuse("arange has another form");
  }
  void run(const Kernels& kernels) override {
    const View& out = views_[0];
    const std::int64_t bytes = static_cast<std::int64_t>(bytes_of(out.type)) * out.strides[0];
    for (std::int64_t i = 0; i < out.sizes[0]; ++i) {
      const double value = views_[1].number + views_[2].number * static_cast<double>(i);
      if (is_integer(out.type)) {
        const auto integer = static_cast<std::int64_t>(value);
        store_integers(&integer, out.type, out.data + i * bytes, 1, 1);
      } else {
        const auto number = static_cast<float>(value);
        store_floats(kernels, &number, out.type, out.data + i * bytes, 1, 1);
      }
    }
  }
};

class EmbeddingOperation final : public SmallOperation {  // out (..., C), weight (R, C), index (...)
 public:
  using SmallOperation::SmallOperation;
  void resolved() override {
    const View &out = views_[0], &weight = views_.at(1), &index = views_.at(2);
    if (views_.size() != 3 || out.data == nullptr || weight.dims != 2 || !out.contiguous() || !index.contiguous() ||
        out.type != weight.type || (index.type != ElementType::kInt64 && index.type != ElementType::kInt32) ||
        (weight.sizes[1] > 1 && weight.strides[1] != 1) || out.elements() != index.elements() * weight.sizes[1])
      refuse("embedding has another form");
  }
  void run(const Kernels&) override {
    const View &out = views_[0], &weight = views_[1], &index = views_[2];
    const auto bytes = static_cast<std::int64_t>(bytes_of(out.type));
    const std::int64_t row_bytes = weight.sizes[1] * bytes;
    for (std::int64_t i = 0; i < index.elements(); ++i) {
      std::int64_t row;
      load_integers(index.type, index.data + i * static_cast<std::int64_t>(bytes_of(index.type)), 1, 1, &row);
      if (row < 0 || row >= weight.sizes[0]) refuse("embedding: index " + std::to_string(row) + " is out of range");
      std::memcpy(out.data + i * row_bytes, weight.data + row * weight.strides[0] * bytes, static_cast<std::size_t>(row_bytes));
    }
  }
};

// out, x, cos, sin (..., D): x cos + r sin, where r has the negated second half of x's columns before the first (RoFormer: Su et al. 2021,
// arXiv:2104.09864, in the order of GPT-NeoX). All products and sums are rounded to x's type, as separate operations would be.
class RotaryOperation final : public SmallOperation {
 public:
  using SmallOperation::SmallOperation;
  void resolved() override {
    if (views_.size() != 4) refuse("a rotary embedding has another number of operands");
    const View& out = views_[0];
    for (const View& view : views_)
      if (view.data == nullptr || is_integer(view.type) || view.dims != out.dims || out.dims < 1 || view.sizes != out.sizes ||
          view.strides[static_cast<std::size_t>(out.dims - 1)] != 1)
        refuse("a rotary embedding has another form");
    cols_ = out.sizes[static_cast<std::size_t>(out.dims - 1)];
    if (cols_ % 2 != 0 || cols_ > kStrip || out.type != views_[1].type) refuse("a rotary embedding has another form");
  }
  void run(const Kernels& kernels) override {
    if (views_[0].elements() == 0) return;
    const int outer = views_[0].dims - 1;
    std::array<std::int64_t, kMaxDims> at{};
    Strip strip;
    for (bool more = true; more;) {
      strip.rows = 0;
      while (more && strip.rows < kMostRows && (strip.rows + 1) * cols_ <= kStrip) {
        for (std::size_t i = 0; i < 4; ++i) {
          std::int64_t element = 0;
          for (int dim = 0; dim < outer; ++dim)
            element += at[static_cast<std::size_t>(dim)] * views_[i].strides[static_cast<std::size_t>(dim)];
          strip.place[i] = views_[i].data + element * static_cast<std::int64_t>(bytes_of(views_[i].type));
        }
        load(kernels, strip);
        int dim = outer - 1;
        while (dim >= 0 && ++at[static_cast<std::size_t>(dim)] == views_[0].sizes[static_cast<std::size_t>(dim)])
          at[static_cast<std::size_t>(dim--)] = 0;
        more = dim >= 0;
      }
      compute(kernels, strip);
    }
  }

 private:
  static constexpr int kMostRows = 16;
  struct Strip {  // some rows, side by side
    int rows;
    std::byte* place[4];  // of the operands of the last row
    std::byte* out[kMostRows];
    const std::byte* factors[kMostRows][2] = {};  // whose values the arrays below have, of each row
    alignas(64) float x[kStrip], turned[kStrip], cos[kStrip], sin[kStrip];
    alignas(64) std::byte rounded[kStrip * sizeof(float)];
  };

  void load(const Kernels& kernels, Strip& strip) const {
    const int row = strip.rows++, cols = static_cast<int>(cols_), half = cols / 2;
    float* const x = strip.x + row * cols;
    kernels.widen(activation_of(views_[1].type), strip.place[1], x, cols);
    for (int i = 0; i < half; ++i) strip.turned[row * cols + i] = -x[half + i];
    std::copy_n(x, half, strip.turned + row * cols + half);
    for (int i = 0; i < 2; ++i) {
      float* const values = (i == 0 ? strip.cos : strip.sin) + row * cols;
      const std::byte* const source = strip.place[2 + i];
      if (strip.factors[row][i] == source) continue;  // of the strip before
      if (row > 0 && strip.factors[row - 1][i] == source) std::copy_n(values - cols, cols, values);
      else kernels.widen(activation_of(views_[static_cast<std::size_t>(2 + i)].type), source, values, cols);
      strip.factors[row][i] = source;
    }
    strip.out[row] = strip.place[0];
  }

  void compute(const Kernels& kernels, Strip& strip) const {
    const ActivationType type = activation_of(views_[0].type);
    const int count = strip.rows * static_cast<int>(cols_);
    const auto product = [&](float* values, const float* factors) {
      kernels.elementwise({Elementwise::kMul, values, factors, nullptr, values, count});
      if (type == ActivationType::kFloat32) return;
      kernels.narrow(type, values, strip.rounded, count);
      kernels.widen(type, strip.rounded, values, count);
    };
    product(strip.x, strip.cos);
    product(strip.turned, strip.sin);
    kernels.elementwise({Elementwise::kAdd, strip.x, strip.turned, nullptr, strip.x, count});
    for (int row = 0; row < strip.rows; ++row) kernels.narrow(type, strip.x + row * cols_, strip.out[row], static_cast<int>(cols_));
  }

  std::int64_t cols_ = 0;
};

}  // namespace

std::unique_ptr<SmallOperation> make_small_operation(const std::string& name, std::vector<Operand> operands, std::vector<double> numbers) {
  if (operands.empty() || operands.size() > kMostOperands) refuse("a small operation has 1 to 4 operands");
  for (const Function& function : kFunctions)
    if (name == function.name) return std::make_unique<ElementwiseOperation>(function, std::move(operands));
  if (name == "softmax") return std::make_unique<SoftmaxOperation>(std::move(operands));
  if (name == "sum") return std::make_unique<ReduceOperation>(Reduction::kSum, std::move(operands));
  if (name == "mean") return std::make_unique<ReduceOperation>(Reduction::kMean, std::move(operands));
  if (name == "amax") return std::make_unique<ReduceOperation>(Reduction::kMax, std::move(operands));
  if (name == "topk") return std::make_unique<TopkOperation>(std::move(operands), numbers);
  if (name == "gather") return std::make_unique<GatherOperation>(std::move(operands));
  if (name == "scatter") return std::make_unique<ScatterOperation>(std::move(operands), numbers);
  if (name == "cumsum") return std::make_unique<CumsumOperation>(std::move(operands));
  if (name == "arange") return std::make_unique<ArangeOperation>(std::move(operands));
  if (name == "embedding") return std::make_unique<EmbeddingOperation>(std::move(operands));
  if (name == "rotary") return std::make_unique<RotaryOperation>(std::move(operands));
  refuse("unknown operation '" + name + "'");
}

}  // namespace moegraft
