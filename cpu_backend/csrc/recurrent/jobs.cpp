// The loops for the least of a machine's CPUs are compiled here, and the checks of operands.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "recurrent/jobs.h"
#include "recurrent/loops.h"

namespace moegraft {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

bool is_shaped(const StridedView& view, std::initializer_list<std::int64_t> sizes) {
  if (!view || view.dims != static_cast<int>(sizes.size())) return false;
  int dim = 0;
  for (const std::int64_t size : sizes)
    if (view.sizes[static_cast<std::size_t>(dim++)] != size) return false;
  return true;
}

bool has_rows(const StridedView& view) {
  const auto last = static_cast<std::size_t>(view.dims - 1);
  return view.sizes[last] <= 1 || view.strides[last] == 1;
}

bool is_state(const StridedView& view, const std::array<std::int64_t, 4>& sizes) {
  std::int64_t stride = 1;
  if (view.dims != 4 || view.sizes != sizes || view.type != ActivationType::kFloat32) return false;
  for (int dim = 3; dim >= 0; --dim) {
    const auto i = static_cast<std::size_t>(dim);
    if (view.sizes[i] != 1 && view.strides[i] != stride) return false;
    stride *= view.sizes[i];
  }
  return true;
}

// Of rules whose states are float32: one state for each token but the last, each in memory of its own.
void require_past(const std::vector<StridedView>& past, std::int64_t tokens, const StridedView& state, const StridedView& before) {
  require(past.empty() || static_cast<std::int64_t>(past.size()) == tokens - 1, "the past states are not one for each token but the last");
  for (std::size_t i = 0; i < past.size(); ++i) {
    require(is_state(past[i], state.sizes), "a past state has another form than the state");
    require(past[i].data != state.data && past[i].data != before.data, "a past state is in the memory of another state");
    for (std::size_t j = 0; j < i; ++j) require(past[i].data != past[j].data, "a past state is in the memory of another state");
  }
}

float number(double value) { return static_cast<float>(value); }

// Of a unit of the convolution: writes the columns up to earlier tokens, and moves the state's columns on by the tokens of x.
template <class Element>
void shift_columns(const ShortConvArgs& args, std::int64_t unit) {
  const std::int64_t all = args.x.sizes[1], blocks = (all + kConvChannels - 1) / kConvChannels;
  const std::int64_t sequence = unit / blocks, channel = unit % blocks * kConvChannels;
  const auto channels = static_cast<int>(std::min<std::int64_t>(all - channel, kConvChannels));
  const auto past = static_cast<std::int64_t>(args.past.size());
  for (std::int64_t p = 0; p < past; ++p) {
    const StridedView& kept = args.past[static_cast<std::size_t>(p)];
    const std::int64_t columns = kept.sizes[2], first = args.x.sizes[2] - past + p - columns;  // of x; below 0: of the state
    for (int c = 0; c < channels; ++c)
      for (std::int64_t column = 0; column < columns; ++column) {
        const std::int64_t at = first + column;
        Element value = 0;
        if (at >= 0) std::memcpy(&value, args.x.at(sequence, channel + c, at), sizeof value);
        else if (args.state) std::memcpy(&value, args.state.at(sequence, channel + c, columns + at), sizeof value);
        std::memcpy(kept.at(sequence, channel + c, column), &value, sizeof value);
      }
  }
  if (!args.state) return;
  const std::int64_t columns = args.state.sizes[2], tokens = args.x.sizes[2], kept = std::max<std::int64_t>(columns - tokens, 0);
  const std::int64_t step = args.state.strides[2], x_step = args.x.strides[2];
  auto* state = reinterpret_cast<Element*>(args.state.at(sequence, channel));
  const auto* x = reinterpret_cast<const Element*>(args.x.at(sequence, channel)) + (tokens - columns + kept) * x_step;
  for (int c = 0; c < channels; ++c, state += args.state.strides[1], x += args.x.strides[1]) {
    Element* to = state;
    for (std::int64_t column = 0; column < kept; ++column, to += step) *to = to[tokens * step];
    const Element* from = x;
    for (std::int64_t column = kept; column < columns; ++column, to += step, from += x_step) *to = *from;
  }
}

}  // namespace

void DeltaRuleArgs::check() const {
  require(value.dims == 4 && key.dims == 4, "delta_rule: key and value have four dimensions");
  const std::int64_t batch = value.sizes[0], tokens = value.sizes[1], heads = value.sizes[2], columns = value.sizes[3];
  const std::int64_t key_heads = key.sizes[2], keys = key.sizes[3];
  require(is_shaped(key, {batch, tokens, key_heads, keys}) && is_shaped(query, {batch, tokens, key_heads, keys}) &&
              is_shaped(out, {batch, tokens, heads, columns}) && is_shaped(beta, {batch, tokens, heads}) &&
              (is_shaped(decay, {batch, tokens, heads}) || is_shaped(decay, {batch, tokens, heads, keys})),
          "delta_rule: the operands' shapes do not fit together");
  require(tokens > 0, "delta_rule: no tokens");
  require_past(past, tokens, state, before);
  require(key_heads > 0 && heads % key_heads == 0, "delta_rule: the heads are not a multiple of the key heads");
  require(keys <= kMostKeyColumns, "delta_rule: a head has too many key columns");
  require(is_state(state, {batch, heads, keys, columns}) && (!before || is_state(before, {batch, heads, keys, columns})),
          "delta_rule: a state is not (batch, heads, key columns, value columns) float32, contiguous");
  require(has_rows(query) && has_rows(key) && has_rows(value) && has_rows(out) && (decay.dims == 3 || has_rows(decay)),
          "delta_rule: the last dimension of an operand is not contiguous");
}

void ShortConvArgs::check() const {
  require(x.dims == 3 && weight.dims == 2, "short_conv: x has three dimensions, weight two");
  const std::int64_t batch = x.sizes[0], channels = x.sizes[1], tokens = x.sizes[2];
  require(is_shaped(out, {batch, channels, tokens}) && weight.sizes[0] == channels && (!bias || is_shaped(bias, {channels})) &&
              (!state || is_shaped(state, {batch, channels, state.sizes[2]})),
          "short_conv: the operands' shapes do not fit together");
  require(weight.sizes[1] >= 1 && weight.sizes[1] <= kMostTaps, "short_conv: a weight has no or too many taps");
  require(!state || state.type == x.type, "short_conv: the state and x differ in dtype");
  require(past.empty() || static_cast<std::int64_t>(past.size()) < tokens, "short_conv: more past states than tokens before the last");
  for (const StridedView& each : past) {
    const bool fits = each.dims == 3 && each.sizes[0] == batch && each.sizes[1] == channels && each.type == x.type;
    require(fits && (!state || each.sizes[2] == state.sizes[2]), "short_conv: a past state has another form than the state");
    require(each.data != state.data && each.data != x.data, "short_conv: a past state is in the memory of another operand");
  }
}

void SelectiveScanArgs::check() const {
  require(x.dims == 4 && b.dims == 4, "selective_scan: x and b have four dimensions");
  const std::int64_t batch = x.sizes[0], tokens = x.sizes[1], heads = x.sizes[2], channels = x.sizes[3];
  const std::int64_t groups = b.sizes[2], columns = b.sizes[3];
  require(is_shaped(b, {batch, tokens, groups, columns}) && is_shaped(c, {batch, tokens, groups, columns}) &&
              is_shaped(out, {batch, tokens, heads, channels}) && is_shaped(dt, {batch, tokens, heads}) &&
              (is_shaped(a, {heads}) || is_shaped(a, {heads, columns})) && (!d || is_shaped(d, {heads})) &&
              (!dt_bias || is_shaped(dt_bias, {heads})) && (!z || is_shaped(z, {batch, tokens, heads, channels})),
          "selective_scan: the operands' shapes do not fit together");
  require(tokens > 0, "selective_scan: no tokens");
  require_past(past, tokens, state, before);
  require(groups > 0 && heads % groups == 0, "selective_scan: the heads are not a multiple of the groups");
  require(columns <= kMostStateColumns, "selective_scan: a state has too many columns");
  require(is_state(state, {batch, heads, channels, columns}) && (!before || is_state(before, {batch, heads, channels, columns})),
          "selective_scan: a state is not (batch, heads, channels, columns) float32, contiguous");
  require(has_rows(b) && has_rows(c) && (a.dims == 1 || has_rows(a)), "selective_scan: the last dimension of an operand is not contiguous");
}

const RecurrentKernels& recurrent_kernels(const Kernels& kernels) {
#if defined(__x86_64__) && !defined(MOEGRAFT_SCALAR_ONLY)
  if (std::strncmp(kernels.isa, "avx512", 6) == 0 || std::strncmp(kernels.isa, "amx", 3) == 0) return avx512_recurrent();
  if (std::strncmp(kernels.isa, "avx2", 4) == 0) return avx2_recurrent();
#else
  (void)kernels;
#endif
  return kLoops;
}

RecurrentJob::RecurrentJob(const Kernels& kernels, const std::string& name, const std::vector<double>& numbers, int workers)
    : kernels_(kernels), loops_(recurrent_kernels(kernels)), phase_(workers) {
  const auto require_numbers = [&](std::size_t count) {
    if (numbers.size() != count) throw std::invalid_argument(name + ": expected " + std::to_string(count) + " numbers");
    for (const double value : numbers) require(!std::isnan(value), "a number of a recurrent layer is not a number");
  };
  if (name == "delta_rule") {
    require_numbers(2);
    rule_ = Rule::kDelta;
    delta_.scale = number(numbers[0]);
    delta_.epsilon = number(numbers[1]);
  } else if (name == "short_conv") {
    require_numbers(1);
    rule_ = Rule::kConv;
    conv_.silu = numbers[0] != 0.0;
  } else if (name == "selective_scan") {
    require_numbers(3);
    rule_ = Rule::kScan;
    scan_.softplus = numbers[0] != 0.0;
    scan_.least = number(numbers[1]);
    scan_.most = number(numbers[2]);
  } else {
    throw std::invalid_argument("unknown rule of a recurrent layer '" + name + "'");
  }
}

std::size_t RecurrentJob::operands() const { return rule_ == Rule::kDelta ? 8 : rule_ == Rule::kConv ? 5 : 11; }

void RecurrentJob::set(const std::vector<StridedView>& given, std::vector<StridedView> past) {
  require(given.size() == operands(), "a recurrent layer has another number of operands");
  std::size_t next = 0;
  const auto fill = [&](auto&... members) { ((members = given[next++]), ...); };
  if (rule_ == Rule::kDelta) {
    DeltaRuleArgs& d = delta_;
    fill(d.out, d.state, d.query, d.key, d.value, d.decay, d.beta, d.before);
    d.past = std::move(past);
    d.check();
    units_ = d.units();
  } else if (rule_ == Rule::kConv) {
    ShortConvArgs& c = conv_;
    fill(c.out, c.state, c.x, c.weight, c.bias);
    c.past = std::move(past);
    c.check();
    units_ = c.units();
  } else {
    SelectiveScanArgs& s = scan_;
    fill(s.out, s.state, s.x, s.dt, s.a, s.b, s.c, s.d, s.dt_bias, s.z, s.before);
    s.past = std::move(past);
    s.check();
    units_ = s.units();
  }
  require(units_ <= std::numeric_limits<int>::max(), "a recurrent layer is too large");
}

void RecurrentJob::run(int worker) noexcept {
  int count = 0;
  for (int unit = phase_.take(worker); unit >= 0; unit = phase_.take(worker), ++count) {
    if (rule_ == Rule::kDelta) loops_.delta_rule(kernels_, delta_, unit);
    else if (rule_ == Rule::kScan) loops_.selective_scan(kernels_, scan_, unit);
    else {
      loops_.short_conv(kernels_, conv_, unit);
      if (conv_.x.type == ActivationType::kFloat32) shift_columns<std::uint32_t>(conv_, unit);
      else shift_columns<std::uint16_t>(conv_, unit);
    }
  }
  phase_.finish(count);
  phase_.wait();
}

}  // namespace moegraft
