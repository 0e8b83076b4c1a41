#include "experts/gradient.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/memory.h"

namespace moegraft {
namespace {

constexpr int kGradientUnitsPerWorker = 4;
constexpr int kMaxPanels = 8;  // of a unit, which stay in a core's second-level cache
constexpr int kTermTokens = 256;  // of a linear layer

std::size_t line_bytes_of(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

typedef std::uint32_t Four __attribute__((vector_size(16)));
// Words 0 to 3 of the first vector and 4 to 7 of the second.
template <unsigned A, unsigned B, unsigned C, unsigned D>
Four chosen(Four first, Four second) {
#if defined(__clang__)
  return __builtin_shufflevector(first, second, A, B, C, D);
#else
  return __builtin_shuffle(first, second, Four{A, B, C, D});
#endif
}

// target (words, 32): word i of each of 32 rows, in squares of four words.
void transpose(const std::uint32_t* source, const int* rows, int words, std::uint32_t* target) {
  for (int lane = 0; lane < kBlockRows; lane += 4) {
    const std::uint32_t* from[4];
    for (int i = 0; i < 4; ++i) from[i] = source + static_cast<std::ptrdiff_t>(rows[lane + i]) * words;
    for (int word = 0; word < words; word += 4) {
      Four in[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&in[i], from[i] + word, sizeof in[i]);
      const Four ab = chosen<0, 4, 1, 5>(in[0], in[1]), cd = chosen<0, 4, 1, 5>(in[2], in[3]);
      const Four ef = chosen<2, 6, 3, 7>(in[0], in[1]), gh = chosen<2, 6, 3, 7>(in[2], in[3]);
      const Four out[4] = {chosen<0, 1, 4, 5>(ab, cd), chosen<2, 3, 6, 7>(ab, cd), chosen<0, 1, 4, 5>(ef, gh), chosen<2, 3, 6, 7>(ef, gh)};
      for (int i = 0; i < 4; ++i) std::memcpy(target + (word + i) * kBlockRows + lane, &out[i], sizeof out[i]);
    }
  }
}

// The values of an activation and its derivatives for count values, a multiple of 32; `curves` is scratch memory of as many.
struct Differentiated {
  const float* x;
  float* value;
  float* slope;
  float* curves;
  int count;
};

// All but those of pieces are functions of a sigmoid, which the kernels compute.
void differentiate_activation(const Kernels& kernels, Activation activation, float alpha, const Differentiated& out) {
  constexpr float kRoot = 0.79788456080286536f, kCubic = 0.044715f;  // of gelu_tanh: sqrt(2 / pi) * (x + 0.044715 x^3)
  const float* x = out.x;
  float *value = out.value, *slope = out.slope, *s = out.curves;
  const int count = out.count;
  const auto sigmoids = [&](auto argument) {
    for (int i = 0; i < count; ++i) s[i] = argument(x[i]);
    static const GateSpec kSigmoid{Activation::kSigmoid, 1.0};
    kernels.act({&kSigmoid, s, nullptr, nullptr, count / kBlockRows, true, s});
  };
  const auto fill = [&](auto both) {
    for (int i = 0; i < count; ++i) both(x[i], s[i], value[i], slope[i]);
  };
  switch (activation) {
    case Activation::kSilu:
      sigmoids([=](float v) { return alpha * v; });
      return fill([=](float v, float at, float& f, float& df) { f = v * at, df = at * (1.0f + alpha * v * (1.0f - at)); });
    case Activation::kGeluTanh:
      sigmoids([](float v) { return 2.0f * kRoot * (v + kCubic * v * v * v); });
      return fill([](float v, float at, float& f, float& df) {
        f = v * at, df = at + v * at * (1.0f - at) * 2.0f * kRoot * (1.0f + 3.0f * kCubic * v * v);
      });
    case Activation::kGelu:
      return fill([](float v, float, float& f, float& df) {
        const float below = 0.5f * (1.0f + std::erf(v * 0.70710678118654752f));
        f = v * below, df = below + v * 0.39894228040143268f * std::exp(-0.5f * v * v);
      });
    case Activation::kSigmoid:
      sigmoids([](float v) { return v; });
      return fill([](float, float at, float& f, float& df) { f = at, df = at * (1.0f - at); });
    case Activation::kTanh: return fill([](float v, float, float& f, float& df) { f = std::tanh(v), df = 1.0f - f * f; });
    case Activation::kRelu: return fill([](float v, float, float& f, float& df) { f = v < 0.0f ? 0.0f : v, df = v > 0.0f ? 1.0f : 0.0f; });
    case Activation::kRelu2:
      return fill([](float v, float, float& f, float& df) {
        const float positive = v < 0.0f ? 0.0f : v;
        f = positive * positive, df = 2.0f * positive;
      });
    case Activation::kIdentity: return fill([](float v, float, float& f, float& df) { f = v, df = 1.0f; });
  }
}

}  // namespace

TransposedWeights::TransposedWeights(const Kernels& kernels, WeightType source, ActivationType activations)
    : kernels_(kernels),
      source_(source),
      type_(activations == ActivationType::kBFloat16 ? WeightType::kBFloat16 : WeightType::kFloat32),
      format_(format_of(type_, activations)),
      step_(is_coded(source) ? std::max(1, coded_format(source).columns / kGroup) : 1),
      units_(kernels, source, format_of(source, activations), step_, step_ * kGroup) {
  for (int column = 0; column < step_ * kGroup; ++column) rows_.push_back(units_.row_of(column));
}

std::size_t TransposedWeights::scratch_bytes() const {
  Arrays arrays(nullptr);
  arrays.take<float>(static_cast<std::size_t>(units_.rows()) * kBlockRows);
  arrays.take<std::uint16_t>(static_cast<std::size_t>(units_.rows()) * kBlockRows);
  return arrays.bytes();
}

void TransposedWeights::write_units(std::uint32_t* words) {
  std::vector<float> values(static_cast<std::size_t>(step_ * kGroup * kGroup));
  for (int group = 0; group < step_; ++group) {
    std::fill(values.begin(), values.end(), 0.0f);
    for (int column = 0; column < kGroup; ++column) values[static_cast<std::size_t>((group * kGroup + column) * kGroup + column)] = 1.0f;
    units_.encode(values.data(), group, words);
  }
  records_ = words;
}

void TransposedWeights::expand(const std::byte* matrix, std::size_t bytes_of_block, int blocks, int first, std::byte* panels,
                               std::byte* scratch, ExpandedWeights& expanded) const {
  Arrays arrays(scratch);
  auto* const out = arrays.take<float>(static_cast<std::size_t>(units_.rows()) * kBlockRows);
  auto* const rounded = arrays.take<std::uint16_t>(static_cast<std::size_t>(units_.rows()) * kBlockRows);
  const bool halves = type_ == WeightType::kBFloat16;
  const int words = halves ? kGroup / 2 : kGroup;  // of 32 weights
  const std::size_t panel = panel_bytes(blocks * kBlockRows);
  // Blocks of some formats have 128 columns, and of two such blocks the second does not begin at a line.
  matrix += block_bytes(source_, kMostBlockGroups * kGroup) / static_cast<std::size_t>(kMostBlockGroups) * static_cast<std::size_t>(first);
  for (int block = 0; block < blocks; ++block, matrix += bytes_of_block) {
    const bool last = block + 1 == blocks;
    units_.multiply(matrix, last ? matrix : matrix + bytes_of_block, !last, records_, out, expanded);
    if (halves) kernels_.narrow(ActivationType::kBFloat16, out, rounded, units_.rows() * kBlockRows);
    const auto* values = reinterpret_cast<const std::uint32_t*>(halves ? static_cast<const void*>(rounded) : out);
    for (int step = 0; step < step_; ++step) {
      auto* const target = reinterpret_cast<std::uint32_t*>(panels + static_cast<std::size_t>(step) * panel);
      transpose(values, rows_.data() + step * kGroup, words, target + block * words * kBlockRows);
    }
  }
}

InputGradient::InputGradient(const Kernels& kernels, WeightType weights, ActivationType activations, int rows, int cols,
                             std::size_t bytes_of_block, int workers, Phase& phase)
    : kernels_(kernels),
      weights_(kernels, weights, activations),
      activations_(activations),
      groups_(round_up(rows, kGroup) / kGroup),
      cols_(cols),
      bytes_of_block_(bytes_of_block),
      unit_blocks_(round_up(std::clamp(round_up(cols, kGroup) / kGroup / (workers * kGradientUnitsPerWorker), 1, kMaxPanels),
                            weights_.blocks_at_once())),
      phase_(phase) {}

std::size_t InputGradient::words(int tokens) const {
  std::size_t words = 0;
  for (int part = 0; part < parts(); ++part) words += product(part, tokens).words();
  return words;
}

void InputGradient::write(int group, const float* gradients, int tokens, std::uint32_t* records) const {
  const int part = group / kPartGroups;
  for (int before = 0; before < part; ++before) records += product(before, tokens).words();
  product(part, tokens).encode(gradients, group % kPartGroups, records);
}

void InputGradient::prepare(std::vector<Term> terms, int tokens, std::byte* out, std::uint32_t* units) {
  terms_ = std::move(terms);
  tokens_ = tokens;
  out_ = out;
  longest_ = 0;
  for (const Term& term : terms_) longest_ = std::max(longest_, term.tokens);
  weights_.write_units(units);
  const int blocks = round_up(cols_, kGroup) / kGroup;
  phase_.reset((blocks + unit_blocks_ - 1) / unit_blocks_);
}

std::size_t InputGradient::scratch_bytes() const {
  Arrays arrays(nullptr);
  arrays.take<std::byte>(weights_.scratch_bytes());
  arrays.take<std::byte>(weights_.panel_bytes(groups_of(0) * kGroup) * static_cast<std::size_t>(unit_blocks_));
  arrays.take<float>(static_cast<std::size_t>(product(0, std::max(longest_, 1)).rows()) * kBlockRows);
  arrays.take<float>(static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(unit_blocks_ * kBlockRows));
  return arrays.bytes();
}

void InputGradient::run(int worker, std::byte* scratch, ExpandedWeights& expanded) const {
  int count = 0;
  for (int unit = phase_.take(worker); unit >= 0; unit = phase_.take(worker), ++count) compute(unit, scratch, expanded);
  phase_.finish(count);
  phase_.wait();
}

void InputGradient::compute(int unit, std::byte* scratch, ExpandedWeights& expanded) const {
  Arrays arrays(scratch);
  auto* const expansion = arrays.take<std::byte>(weights_.scratch_bytes());
  auto* const panels = arrays.take<std::byte>(weights_.panel_bytes(groups_of(0) * kGroup) * static_cast<std::size_t>(unit_blocks_));
  auto* const out = arrays.take<float>(static_cast<std::size_t>(product(0, std::max(longest_, 1)).rows()) * kBlockRows);
  auto* const sums = arrays.take<float>(static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(unit_blocks_ * kBlockRows));
  const int first_block = unit * unit_blocks_, blocks = std::min(unit_blocks_, round_up(cols_, kGroup) / kGroup - first_block);
  const int cols = blocks * kGroup;
  std::fill_n(sums, static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(cols), 0.0f);
  for (auto term = terms_.begin(); term != terms_.end();) {
    const auto end = std::find_if(term, terms_.end(), [&](const Term& other) { return other.matrix != term->matrix; });
    for (int part = 0; part < parts(); ++part) {
      const std::size_t panel = weights_.panel_bytes(groups_of(part) * kGroup);
      const std::byte* matrix = term->matrix + bytes_of_block_ * static_cast<std::size_t>(part * kPartGroups);
      for (int block = 0; block < blocks; block += weights_.blocks_at_once())
        weights_.expand(matrix, bytes_of_block_, groups_of(part), first_block + block, panels + static_cast<std::size_t>(block) * panel,
                        expansion, expanded);
      for (auto each = term; each != end; ++each) {
        const SegmentProduct segment = product(part, each->tokens);
        const std::uint32_t* records = each->records;
        for (int before = 0; before < part; ++before) records += product(before, each->tokens).words();
        for (int block = 0; block < blocks; ++block) {
          const std::byte* weights = panels + static_cast<std::size_t>(block) * panel;
          segment.multiply(weights, weights, false, records, out, expanded);
          for (int index = 0; index < segment.tiling().count(); ++index) {
            const Tile tile = segment.tiling()[index];
            const float* row = out + static_cast<std::size_t>(segment.first_row(index)) * kBlockRows;
            for (int i = tile.first; i < tile.first + tile.tokens; ++i, row += kBlockRows) {
              const int token = each->pairs != nullptr ? each->pairs[i].token : each->first_token + i;
              kernels_.accumulate(sums + static_cast<std::size_t>(token) * static_cast<std::size_t>(cols) + block * kGroup, row, nullptr,
                                  1.0f);
            }
          }
        }
      }
    }
    term = end;
  }
  const int present = std::min(cols, cols_ - first_block * kGroup);
  for (int token = 0; token < tokens_; ++token) {
    const auto element = static_cast<std::size_t>(token) * static_cast<std::size_t>(cols_) + static_cast<std::size_t>(first_block * kGroup);
    kernels_.narrow(activations_, sums + static_cast<std::size_t>(token) * static_cast<std::size_t>(cols),
                    out_ + element_bytes(activations_) * element, present);
  }
}

struct ExpertsGradientJob::Worker {
  Worker(const ExpertsGradientJob& job, std::byte* memory) {
    Arrays arrays(memory);
    const auto rows = static_cast<std::size_t>(job.rows_) * kBlockRows, pairs = static_cast<std::size_t>(job.pairs_) * kBlockRows;
    hidden = arrays.take<std::uint32_t>(job.hidden_words_);
    gradient = arrays.take<std::uint32_t>(job.gradient_words_);
    widened = arrays.take<float>(static_cast<std::size_t>(job.hidden_groups_) * kGroup);
    for (float*& out : gate_up) out = arrays.take<float>(rows);
    down = arrays.take<float>(rows);
    for (float** values : {&gate, &up, &value, &slope, &curves}) *values = arrays.take<float>(pairs);
    expansion = arrays.take<std::byte>(job.down_.scratch_bytes());
    panels = arrays.take<std::byte>(job.down_.panel_bytes(job.layout_.down_blocks * kBlockRows) *
                                    static_cast<std::size_t>(job.down_.blocks_at_once()));
    bytes = arrays.bytes();
  }
  std::size_t bytes;
  std::uint32_t *hidden, *gradient;  // the records of one segment, tile by tile
  float* widened;  // a token
  float* gate_up[2];  // (rows, 32) of the products with one or two blocks
  float* down;  // (rows, 32) of the product with a panel: the gradients of neurons
  float *gate, *up, *value, *slope, *curves;  // (pairs, 32)
  std::byte *expansion, *panels;
  int gathered_segment = -1;
  ExpandedWeights expanded;
};

ExpertsGradientJob::ExpertsGradientJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, int workers,
                                       const ExpertsPhases& phases)
    : kernels_(kernels),
      experts_(experts),
      layout_(experts.layout()),
      activations_(activations),
      format_(format_of(experts.types().gate_up, activations)),
      phases_(phases),
      hidden_groups_(round_up(experts.shape().hidden, kGroup) / kGroup),
      neuron_groups_(layout_.neurons / kGroup),
      segment_pairs_(moegraft::segment_pairs(kernels, format_, hidden_groups_)),
      down_(kernels, experts.types().down, activations),
      input_(kernels, experts.types().gate_up, activations, layout_.gate_up_blocks * kBlockRows, experts.shape().hidden,
             layout_.gate_up_block_bytes, workers, *phases.rows),
      hidden_(kernels, format_, hidden_groups_),
      gradient_(kernels, down_.format(), hidden_groups_),
      workers_(workers) {}

SegmentProduct ExpertsGradientJob::gate_up_of(const Segment& segment) const {
  return {kernels_, experts_.types().gate_up, format_, hidden_groups_, segment.pairs};
}

void ExpertsGradientJob::prepare(const GradientBatch& batch, const ExpertsScratch& scratch) {
  batch_ = batch;
  scratch_ = scratch;
  hidden_.begin(batch.tokens);
  gradient_.begin(batch.tokens);
  hidden_words_ = gradient_words_ = 0;
  rows_ = pairs_ = 0;
  starts_.clear();
  const std::vector<Segment>& segments = batch.routing->segments();
  std::size_t words = 0;
  for (const Segment& segment : segments) {
    const SegmentProduct gate_up = gate_up_of(segment), down = down_of(segment);
    hidden_.serve(gate_up);
    gradient_.serve(down);
    hidden_words_ = std::max(hidden_words_, gate_up.words());
    gradient_words_ = std::max(gradient_words_, down.words());
    rows_ = std::max({rows_, gate_up.rows(), down.rows()});
    pairs_ = std::max(pairs_, segment.pairs);
    starts_.push_back(words);
    words += line_bytes_of(input_.words(segment.pairs) * 4) / 4;
  }
  const std::size_t hidden_bytes = line_bytes_of(hidden_.words() * 4);
  scratch.records->reserve(hidden_bytes + gradient_.words() * 4);
  hidden_.place(reinterpret_cast<std::uint32_t*>(scratch.records->data()));
  gradient_.place(reinterpret_cast<std::uint32_t*>(scratch.records->data() + hidden_bytes));
  scratch.neurons->reserve(words * 4);
  scratch.lanes->reserve((down_.unit_words() + input_.weights().unit_words()) * 4);
  auto* const units = reinterpret_cast<std::uint32_t*>(scratch.lanes->data());
  down_.write_units(units);
  std::vector<InputGradient::Term> terms;
  for (std::size_t i = 0; i < segments.size(); ++i)
    terms.push_back({experts_.expert(segments[i].expert), reinterpret_cast<const std::uint32_t*>(scratch.neurons->data()) + starts_[i],
                     batch.routing->pairs().data() + segments[i].first_pair, 0, segments[i].pairs});
  input_.prepare(std::move(terms), batch.tokens, batch.hidden_gradient, units + down_.unit_words());
  const std::size_t bytes = std::max(Worker(*this, nullptr).bytes, input_.scratch_bytes());
  for (int worker = 0; worker < workers_; ++worker) scratch.workers[worker].reserve(bytes);
  chunks_ = neuron_groups_ / down_.blocks_at_once();
  shares_.resize(static_cast<std::size_t>(chunks_) * batch.routing->pairs().size());
  phases_.encode->reset(batch.tokens);
  phases_.neurons->reset(static_cast<int>(segments.size()) * chunks_);
}

void ExpertsGradientJob::run(int worker) noexcept {
  std::byte* const memory = scratch_.workers[worker].data();
  Worker mine(*this, memory);
  const MatrixUse use(kernels_, kernels_.matrix.begin != nullptr);
  const auto work = [&](Phase& phase, void (ExpertsGradientJob::*compute)(int, Worker&)) {
    int count = 0;
    for (int unit = phase.take(worker); unit >= 0; unit = phase.take(worker), ++count) (this->*compute)(unit, mine);
    phase.finish(count);
    phase.wait();
  };
  work(*phases_.encode, &ExpertsGradientJob::encode_token);
  work(*phases_.neurons, &ExpertsGradientJob::compute_neurons);
  input_.run(worker, memory, mine.expanded);
}

void ExpertsGradientJob::encode_token(int token, Worker& mine) {
  const int hidden = experts_.shape().hidden;
  std::memset(mine.widened + hidden, 0, sizeof(float) * static_cast<std::size_t>(hidden_groups_ * kGroup - hidden));
  const std::size_t offset = element_bytes(activations_) * static_cast<std::size_t>(token) * static_cast<std::size_t>(hidden);
  kernels_.widen(activations_, batch_.hidden_states + offset, mine.widened, hidden);
  hidden_.encode(token, mine.widened);
  kernels_.widen(activations_, batch_.gradient + offset, mine.widened, hidden);
  gradient_.encode(token, mine.widened);
}

void ExpertsGradientJob::compute_neurons(int unit, Worker& mine) {
  const auto index = static_cast<std::size_t>(unit / chunks_);
  const int chunk = unit % chunks_, groups = down_.blocks_at_once(), hidden = experts_.shape().hidden;
  const Segment& segment = batch_.routing->segments()[index];
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const std::byte* expert = experts_.expert(segment.expert);
  if (mine.gathered_segment != static_cast<int>(index)) {
    const SegmentProduct gate_up = gate_up_of(segment), down = down_of(segment);
    gate_up.gather(hidden_.of(gate_up), pairs, mine.hidden);
    down.gather(gradient_.of(down), pairs, mine.gradient);
    mine.gathered_segment = static_cast<int>(index);
  }
  float* shares = shares_.data() + static_cast<std::size_t>(chunk) * batch_.routing->pairs().size() + segment.first_pair;
  std::fill_n(shares, segment.pairs, 0.0f);
  if (experts_.shape().bias && chunk == 0) {
    const auto* bias = reinterpret_cast<const float*>(expert + layout_.down_bias_offset);
    for (int i = 0; i < segment.pairs; ++i) {
      const std::size_t offset = element_bytes(activations_) * static_cast<std::size_t>(pairs[i].token) * static_cast<std::size_t>(hidden);
      kernels_.widen(activations_, batch_.gradient + offset, mine.widened, hidden);
      for (int column = 0; column < hidden; ++column) shares[i] += mine.widened[column] * bias[column];
    }
  }
  down_.expand(expert + layout_.down_offset, layout_.down_block_bytes, layout_.down_blocks, chunk * groups, mine.panels, mine.expansion,
               mine.expanded);
  const std::size_t panel = down_.panel_bytes(layout_.down_blocks * kBlockRows);
  for (int i = 0; i < groups; ++i)
    differentiate(chunk * groups + i, index, mine.panels + static_cast<std::size_t>(i) * panel, shares, mine);
}

// From the gradients of a group's neurons, which the product with `panel` gives, those of its gate and up rows.
void ExpertsGradientJob::differentiate(int group, std::size_t index, const std::byte* panel, float* shares, Worker& mine) {
  const Segment& segment = batch_.routing->segments()[index];
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const ExpertsShape& shape = experts_.shape();
  const GateSpec& spec = experts_.gate();
  const std::byte* expert = experts_.expert(segment.expert);
  const int blocks = shape.gated ? 2 : 1, width = kGroup / blocks, count = segment.pairs * kGroup;
  const SegmentProduct product = gate_up_of(segment), down = down_of(segment);
  for (int b = 0; b < blocks; ++b) {
    const int block = group * blocks + b;
    const std::byte* at = expert + layout_.gate_up_block_bytes * static_cast<std::size_t>(block);
    const bool last = block + 1 == layout_.gate_up_blocks;
    product.multiply(at, last ? at : at + layout_.gate_up_block_bytes, !last, mine.hidden, mine.gate_up[b], mine.expanded);
    if (batch_.terms.gate_up != nullptr) add_terms(batch_.terms.gate_up, shape, product, pairs, segment.pairs, block, mine.gate_up[b]);
  }
  down.multiply(panel, panel, false, mine.gradient, mine.down, mine.expanded);

  static constexpr float kNone[kGroup] = {};
  const auto bias_at = [&](std::size_t offset) {
    return shape.bias ? reinterpret_cast<const float*>(expert + offset) + group * kGroup : kNone;
  };
  const float *gate_bias = shape.gated ? bias_at(layout_.gate_bias_offset) : kNone, *up_bias = bias_at(layout_.up_bias_offset);
  const auto gate_limit = static_cast<float>(spec.gate_limit), act_limit = static_cast<float>(spec.act_limit);
  const auto up_limit = static_cast<float>(spec.up_limit), up_offset = static_cast<float>(spec.up_offset);
  for (int i = 0; i < segment.pairs; ++i) {
    const std::size_t row = static_cast<std::size_t>(product.row_of(i)) * kBlockRows;
    for (int b = 0; b < blocks; ++b) {
      const float* rows = mine.gate_up[b] + row;
      float *gate = mine.gate + i * kGroup + b * width, *up = mine.up + i * kGroup + b * width, *x = mine.value + i * kGroup + b * width;
      for (int n = 0; n < width; ++n) up[n] = rows[n + kGroup - width] + up_bias[b * width + n];
      for (int n = 0; n < width; ++n) gate[n] = rows[n] + gate_bias[b * width + n];
      for (int n = 0; n < width; ++n) x[n] = shape.gated ? std::min(gate[n], gate_limit) : up[n];
    }
  }
  differentiate_activation(kernels_, spec.activation, static_cast<float>(spec.alpha),
                           {mine.value, mine.value, mine.slope, mine.curves, count});

  const int present = std::min(kGroup, shape.intermediate - group * kGroup);
  for (int i = 0; i < segment.pairs; ++i) {
    float* given = mine.down + static_cast<std::size_t>(down.row_of(i)) * kBlockRows;
    std::fill(given + present, given + kGroup, 0.0f);
    const AdapterTerms terms = batch_.terms.from(static_cast<std::size_t>(pairs[i].slot), shape.intermediate * blocks, shape.intermediate);
    if (terms.activation_gradients != nullptr)
      for (int n = 0; n < present; ++n) given[n] += terms.activation_gradients[group * kGroup + n];
    float *gate = mine.gate + i * kGroup, *up = mine.up + i * kGroup;
    const float *value = mine.value + i * kGroup, *slope = mine.slope + i * kGroup, weight = pairs[i].weight;
    float activations[kGroup], products[kGroup];
    for (int n = 0; n < kGroup; ++n) {
      const float of_neuron = given[n] * weight;
      if (!shape.gated) {
        activations[n] = value[n];
        products[n] = given[n] * value[n];
        up[n] = of_neuron * slope[n];
        continue;
      }
      const float factor = std::max(-up_limit, std::min(up_limit, up[n])) + up_offset, acted = std::min(value[n], act_limit);
      activations[n] = acted * factor;
      products[n] = given[n] * acted * factor;
      gate[n] = value[n] <= act_limit && gate[n] <= gate_limit ? of_neuron * factor * slope[n] : 0.0f;
      up[n] = std::fabs(up[n]) <= up_limit ? of_neuron * acted : 0.0f;
    }
    for (const float product_of_neuron : products) shares[i] += product_of_neuron;
    if (terms.activations != nullptr) std::copy_n(activations, present, terms.activations + group * kGroup);
    if (terms.gate_up_gradients != nullptr) {
      float* rows = terms.gate_up_gradients + group * kGroup;
      if (shape.gated) std::copy_n(gate, present, rows);
      std::copy_n(up, present, rows + (shape.gated ? shape.intermediate : 0));
    }
  }
  // Gate and up rows stand in blocks of 16 and 16, as they are packed.
  auto* const records = reinterpret_cast<std::uint32_t*>(scratch_.neurons->data()) + starts_[index];
  if (!shape.gated) return input_.write(group, mine.up, segment.pairs, records);
  for (int b = 0; b < 2; ++b) {
    for (int i = 0; i < segment.pairs; ++i) {
      std::memcpy(mine.value + i * kGroup, mine.gate + i * kGroup + b * kLanes, sizeof(float) * kLanes);
      std::memcpy(mine.value + i * kGroup + kLanes, mine.up + i * kGroup + b * kLanes, sizeof(float) * kLanes);
    }
    input_.write(group * 2 + b, mine.value, segment.pairs, records);
  }
}

void ExpertsGradientJob::finish() const {
  const std::vector<Pair>& pairs = batch_.routing->pairs();
  for (std::size_t i = 0; i < pairs.size(); ++i)
    for (int chunk = 0; chunk < chunks_; ++chunk)
      batch_.weight_gradients[pairs[i].slot] += shares_[static_cast<std::size_t>(chunk) * pairs.size() + i];
}

LinearGradientJob::LinearGradientJob(const Kernels& kernels, const PackedLinear& linear, ActivationType activations, int workers,
                                     Phase& encode, Phase& rows)
    : kernels_(kernels),
      linear_(linear),
      activations_(activations),
      workers_(workers),
      encode_(encode),
      input_(kernels, linear.type(), activations, linear.rows(), linear.cols(), block_bytes(linear.type(), linear.cols()), workers, rows) {}

void LinearGradientJob::prepare(const std::byte* gradient, std::byte* out, int tokens, AlignedMemory& records, AlignedMemory& units,
                                AlignedMemory* workers) {
  gradient_ = gradient;
  scratch_ = workers;
  segments_ = Tiling(tokens, kTermTokens);
  segment_words_ = line_bytes_of(input_.words(segments_[0].tokens) * 4) / 4;
  records.reserve(segment_words_ * static_cast<std::size_t>(segments_.count()) * 4);
  records_ = reinterpret_cast<std::uint32_t*>(records.data());
  units.reserve(input_.weights().unit_words() * 4);
  std::vector<InputGradient::Term> terms;
  for (int i = 0; i < segments_.count(); ++i)
    terms.push_back(
        {linear_.block(0), records_ + segment_words_ * static_cast<std::size_t>(i), nullptr, segments_[i].first, segments_[i].tokens});
  input_.prepare(std::move(terms), tokens, out, reinterpret_cast<std::uint32_t*>(units.data()));
  const std::size_t bytes = std::max(input_.scratch_bytes(), sizeof(float) * kTermTokens * kGroup);
  for (int worker = 0; worker < workers_; ++worker) workers[worker].reserve(bytes);
  encode_.reset(segments_.count() * linear_.blocks());
}

void LinearGradientJob::run(int worker) noexcept {
  std::byte* const memory = scratch_[worker].data();
  const MatrixUse use(kernels_, kernels_.matrix.begin != nullptr);
  ExpandedWeights expanded;
  int count = 0;
  for (int unit = encode_.take(worker); unit >= 0; unit = encode_.take(worker), ++count)
    encode_group(unit, reinterpret_cast<float*>(memory));
  encode_.finish(count);
  encode_.wait();
  input_.run(worker, memory, expanded);
}

void LinearGradientJob::encode_group(int unit, float* values) {
  const int segment = unit / linear_.blocks(), group = unit % linear_.blocks(), present = std::min(kGroup, linear_.rows() - group * kGroup);
  const Tile tokens = segments_[segment];
  std::fill_n(values, static_cast<std::size_t>(tokens.tokens) * kGroup, 0.0f);
  for (int i = 0; i < tokens.tokens; ++i) {
    const std::size_t element =
        static_cast<std::size_t>(tokens.first + i) * static_cast<std::size_t>(linear_.rows()) + static_cast<std::size_t>(group * kGroup);
    kernels_.widen(activations_, gradient_ + element_bytes(activations_) * element, values + static_cast<std::size_t>(i) * kGroup, present);
  }
  input_.write(group, values, tokens.tokens, records_ + segment_words_ * static_cast<std::size_t>(segment));
}

}  // namespace moegraft
