// Drives the kernel without Python, for builds with sanitizers and for other architectures: every weight type, instruction set and path,
// against the scalar kernels; several threads, tickets, errors, a shutdown with work pending, and the schedules. Prints nothing and returns 0
// on success.
//
// With arguments, these are the instruction sets that the CPU is expected to have. Their kernels alone are compared, and of matrix kernels
// those of the last one.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/float_conversion.h"
#include "core/names.h"
#include "core/runtime.h"
#include "scheduler/scheduler.h"
#include "simd/isa.h"

using namespace moegraft;

namespace moegraft {
double optimum(const LayerProblem& given);  // tests/support/optimum.cpp
}

namespace {

std::vector<std::uint8_t> random_blocks(WeightType type, int rows, int cols, unsigned seed) {
  std::vector<std::uint8_t> blocks(file_row_bytes(type, cols) * static_cast<std::size_t>(rows));
  moegraft::random_blocks(type, blocks.data(), rows, cols, seed);
  return blocks;
}

constexpr WeightType kPlainTypes[] = {WeightType::kFloat32, WeightType::kFloat16, WeightType::kBFloat16, WeightType::kInt8,
                                      WeightType::kInt4};

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Deterministic values in (-1, 1).
std::vector<float> values(std::size_t count, unsigned seed) {
  std::vector<float> all(count);
  for (float& value : all) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int>(seed >> 8) % 2001 - 1000) / 1000.0f;
  }
  return all;
}

std::unique_ptr<PackedExperts> make_experts(const ExpertsShape& shape, WeightTypes types, LayoutKind kind = LayoutKind::kDense) {
  auto experts = std::make_unique<PackedExperts>(shape, GateSpec{}, types, kind);
  for (int expert = 0; expert < shape.num_experts; ++expert) {
    for (const Part part : {Part::kGate, Part::kUp, Part::kDown}) {
      if (part == Part::kGate && !shape.gated) continue;
      const int rows = experts->rows_of(part), cols = experts->cols_of(part);
      const auto matrix = values(static_cast<std::size_t>(rows) * cols, static_cast<unsigned>(expert * 3 + static_cast<int>(part)));
      if (is_stored(experts->type_of(part))) {
        const auto blocks = random_blocks(experts->type_of(part), rows, cols, static_cast<unsigned>(expert));
        experts->pack_blocks(expert, part, {blocks.data(), rows, cols});
      } else {
        experts->pack(expert, part, {matrix.data(), WeightType::kFloat32, rows, cols});
      }
      if (shape.bias) experts->pack_bias(expert, part, matrix.data(), rows);
      std::vector<float> seen(matrix.size());
      experts->unpack(expert, part, seen.data());
    }
  }
  return experts;
}

// Heap arrays of exactly the right size, so that every access beyond their end is detected.
struct Call {
  Call(const PackedExperts& experts, int tokens, int top_k)
      : hidden(values(static_cast<std::size_t>(tokens) * experts.shape().hidden, 7)),
        ids(static_cast<std::size_t>(tokens) * top_k),
        weights(values(ids.size(), 9)),
        out(hidden.size(), NAN) {
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7 % (experts.shape().num_experts + 2)) - 1;
    args = {&experts, hidden.data(), ids.data(), weights.data(), out.data(), ActivationType::kFloat32, tokens, top_k, 0.0f};
  }

  std::vector<float> hidden;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
  std::vector<float> out;
  ForwardArgs args;
};

// What adapters add to a call, and what they need of it.
struct Added {
  explicit Added(const Call& call)
      : gate_up(values(call.ids.size() * rows_of(call), 15)),
        activation_gradients(values(call.ids.size() * neurons_of(call), 17)),
        activations(activation_gradients.size()),
        gate_up_gradients(gate_up.size()) {}
  static std::size_t neurons_of(const Call& call) { return static_cast<std::size_t>(call.args.experts->shape().intermediate); }
  static std::size_t rows_of(const Call& call) { return neurons_of(call) * (call.args.experts->shape().gated ? 2 : 1); }
  AdapterTerms terms() { return {gate_up.data(), activation_gradients.data(), activations.data(), gate_up_gradients.data()}; }

  std::vector<float> gate_up, activation_gradients, activations, gate_up_gradients;
};

// The gradients of a call's inputs, from values as those of its output.
struct Gradients {
  explicit Gradients(const Call& call, ActivationType activations = ActivationType::kFloat32)
      : of_output(values(call.hidden.size(), 13)), of_hidden(call.hidden.size(), NAN), of_weights(call.ids.size(), NAN) {
    const ForwardArgs& given = call.args;
    args = {given.experts,    given.hidden_states, given.top_k_index, given.top_k_weights, of_output.data(),
            of_hidden.data(), of_weights.data(),   activations,       given.tokens,        given.top_k};
  }

  std::vector<float> of_output;
  std::vector<float> of_hidden;
  std::vector<float> of_weights;
  ExpertsGradientArgs args;
};

// Gradients multiply a format's blocks by its own kernels, which are compared without them: a few kinds of blocks stand for all.
bool has_gradients(WeightType type) {
  for (const char* name : {"q4_k", "fp8", "iq2_xs"})
    if (type == parse_weight_type(name)) return true;
  return !is_stored(type);
}

void sparse_paths(const std::string& isa) {
  Runtime runtime(3, isa);
  for (const WeightType type : kPlainTypes) {
    for (const bool gated : {true, false}) {
      const auto experts = make_experts({3, 41, 37, gated, true}, {type, type}, LayoutKind::kSparse);
      for (const int tokens : {0, 1, 13, 300}) {  // the last in two passes
        for (const float threshold : {0.0f, 0.4f, 1e9f}) {
          Call call(*experts, tokens, 2);
          std::vector<std::int64_t> counts(2, 0);
          std::vector<float> acted(call.ids.size() * 37);
          call.args.threshold = threshold;
          call.args.neuron_counts = counts.data();
          call.args.acted = acted.data();
          runtime.forward(call.args);
          for (const float value : call.out) expect(std::isfinite(value), "finite output of the sparse layout");
          std::int64_t pairs = 0;
          for (const std::int64_t id : call.ids) pairs += id >= 0 && id < 3;
          expect(counts[1] == pairs * 37, "all neurons are counted");
          expect(threshold == 0.4f || counts[0] == (threshold == 0.0f ? counts[1] : 0), "active neurons are counted");
        }
      }
    }
  }
}

void every_path(const std::string& isa) {
  Runtime runtime(3, isa);
  for (int type = 0; type < kWeightTypes; ++type) {
    const auto weights = static_cast<WeightType>(type);
    const bool plain = !is_stored(weights);
    for (const bool gated : {true, false}) {
      const ExpertsShape shape = {3, plain ? 41 : 256, 37, gated, true};
      const auto experts = make_experts(shape, {weights, plain ? weights : WeightType::kInt8});
      for (const int tokens : {0, 1, 2, 13, 70}) {
        Call call(*experts, tokens, 2);
        runtime.forward(call.args);
        for (const float value : call.out) expect(std::isfinite(value), "finite output");
        if (has_gradients(weights) && (plain || (gated && tokens == 13))) {
          Gradients gradients(call), halves(call, ActivationType::kBFloat16);
          runtime.experts_gradient(gradients.args);
          for (const auto* found : {&gradients.of_hidden, &gradients.of_weights})
            for (const float value : *found) expect(std::isfinite(value), "finite gradients");
          if (plain) runtime.experts_gradient(halves.args);
          Added added(call);
          call.args.terms = gradients.args.terms = added.terms();
          runtime.forward(call.args);
          for (const float value : call.out) expect(std::isfinite(value), "finite output with adapters");
          runtime.experts_gradient(gradients.args);
          for (const auto* found : {&gradients.of_hidden, &gradients.of_weights, &added.activations, &added.gate_up_gradients})
            for (const float value : *found) expect(std::isfinite(value), "finite gradients with adapters");
          call.args.terms = {};
        }
        call.args.activations =
            ActivationType::kBFloat16;  // the arrays are twice as long as needed when read as halves; only crashes matter here
        call.args.tokens = tokens;
        runtime.forward(call.args);
      }
    }
    const int cols = plain ? 70 : 512;
    PackedLinear linear(45, cols, weights);
    const auto matrix = values(45 * static_cast<std::size_t>(cols), 5);
    if (plain) {
      linear.pack({matrix.data(), WeightType::kFloat32, 45, cols});
    } else {
      linear.pack_blocks({random_blocks(weights, 45, cols, 1).data(), 45, cols});
    }
    linear.pack_bias(matrix.data(), 45);
    for (const int tokens : {1, 19}) {
      const auto input = values(static_cast<std::size_t>(tokens) * cols, 3);
      std::vector<float> out(static_cast<std::size_t>(tokens) * 45);
      runtime.linear({&linear, input.data(), out.data(), ActivationType::kFloat32, tokens});
      if (tokens == 1 || !has_gradients(weights)) continue;
      std::vector<float> of_input(input.size(), NAN);
      runtime.linear_gradient({&linear, out.data(), of_input.data(), ActivationType::kFloat32, tokens});
      for (const float value : of_input) expect(std::isfinite(value), "finite gradients of a linear layer");
    }
  }
}

// Formats of files for down, whose input is the neurons.
void stored_down(const std::string& isa) {
  Runtime runtime(3, isa);
  for (const WeightTypes types : {parse_weight_types("q4_k+q6_k"), parse_weight_types("int4+mxfp4")}) {
    const auto experts = make_experts({3, 256, 256, true, false}, types);
    for (const int tokens : {0, 1, 13, 70}) {
      Call call(*experts, tokens, 2);
      runtime.forward(call.args);
      for (const float value : call.out) expect(std::isfinite(value), "finite output of stored formats");
    }
  }
}

void tickets_and_errors() {
  const auto experts = make_experts({4, 64, 64, true, false}, {WeightType::kInt8, WeightType::kInt8});
  Runtime runtime(3, "scalar");
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<std::uint64_t> tickets;
  for (int i = 0; i < 20; ++i) {
    calls.push_back(std::make_unique<Call>(*experts, 1 + i % 5, 2));
    if (i == 7) calls.back()->ids[0] = 99;
    tickets.push_back(runtime.submit(calls.back()->args));
  }
  int refused = 0;
  for (const std::uint64_t ticket : tickets) {
    try {
      runtime.wait(ticket);
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  expect(refused == 1, "one refused call");
}

// On two memory nodes, with the results of one.
void callers_take_turns() {
  const auto experts = make_experts({4, 64, 64, true, false}, {WeightType::kInt4, WeightType::kInt4});
  Runtime runtime(4, "scalar", false, std::nullopt, 2), one_node(4, "scalar", false, std::nullopt, 1);
  Call reference(*experts, 6, 2);
  one_node.forward(reference.args);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      Call call(*experts, 6, 2);
      for (int round = 0; round < 20; ++round) runtime.forward(call.args);
      expect(call.out == reference.out, "equal results");
    });
  }
  for (auto& caller : callers) caller.join();
}

void workers_kept_awake() {
  const auto experts = make_experts({4, 64, 64, true, false}, {WeightType::kInt4, WeightType::kInt4});
  Runtime runtime(4, "scalar");
  Call reference(*experts, 6, 2);
  runtime.forward(reference.args);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&, i] {
      Call call(*experts, 6, 2);
      for (int round = 0; round < 8; ++round) {
        runtime.keep_awake();
        runtime.forward(call.args);
        std::this_thread::sleep_for(std::chrono::microseconds(i * 1500));  // less and more than workers wait without work
        runtime.forward(call.args);
        runtime.let_sleep();
      }
      expect(call.out == reference.out, "equal results of workers that are kept awake");
    });
  }
  for (auto& caller : callers) caller.join();
  runtime.keep_awake();
}

void shutdown_with_work_pending() {
  const auto experts = make_experts({4, 64, 64, true, false}, {WeightType::kFloat32, WeightType::kFloat32});
  std::vector<std::unique_ptr<Call>> calls;
  Runtime runtime(3, "scalar");
  for (int i = 0; i < 30; ++i) {
    calls.push_back(std::make_unique<Call>(*experts, 8, 2));
    runtime.submit(calls.back()->args);
  }
}

void schedules() {
  Planner planner;
  for (unsigned seed = 0; seed < 500; ++seed) {
    const int experts = seed % 25 == 24 ? 64 : static_cast<int>(seed % 11);
    const auto random = values(static_cast<std::size_t>(experts) * 3 + 2, seed);
    std::vector<std::int32_t> loads(static_cast<std::size_t>(experts));
    std::vector<double> cpu_ms(loads.size()), gpu_ms(loads.size()), arrival_ms(loads.size()), gains_ms(loads.size());
    for (std::size_t i = 0; i < loads.size(); ++i) {
      loads[i] = static_cast<std::int32_t>(1 + std::abs(random[3 * i]) * 20);
      cpu_ms[i] = i % 13 == 12 ? HUGE_VAL : loads[i] * 0.1;
      gpu_ms[i] = std::abs(random[3 * i + 1]);
      arrival_ms[i] = i % 3 == 0 ? 0.0 : i % 8 == 5 ? 1.0 + random[3 * i + 2] : HUGE_VAL;
    }
    const LayerProblem problem = {experts, loads.data(), cpu_ms.data(), gpu_ms.data(), arrival_ms.data(),         0.3,
                                  0.1,     0.0,          0.2,           0.0,           static_cast<int>(seed % 7)};
    check(problem);
    const double best_ms = optimum(problem);
    for (const char* name : {"all_cpu", "fixed", "on_demand", "greedy", "two_threshold"}) {
      const LayerPlan plan = planner.plan(problem, parse_schedule(name));
      expect(plan.makespan_ms >= best_ms * (1.0 - 1e-9) && plan.transfer_count <= problem.max_transfers, "a plan within its bounds");
      const std::vector<std::uint8_t> on_cpu(plan.on_cpu, plan.on_cpu + experts);
      const double makespan_ms = plan.makespan_ms;
      expect(planner.makespan(problem, on_cpu.data()) == makespan_ms, "the plan's own makespan");
      planner.gains(problem, parse_schedule(name), gains_ms.data());
    }
  }
}

// Values in a type, on the heap in exactly the right size.
std::vector<std::byte> typed(ActivationType type, std::size_t count, unsigned seed) {
  const std::vector<float> drawn = values(count, seed);
  std::vector<std::byte> all(count * element_bytes(type));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t half = type == ActivationType::kFloat16 ? f16_from_float(drawn[i]) : bf16_from_float(drawn[i]);
    if (type == ActivationType::kFloat32) std::memcpy(all.data() + 4 * i, &drawn[i], 4);
    else std::memcpy(all.data() + 2 * i, &half, 2);
  }
  return all;
}

std::vector<std::byte> attention_of(Runtime& runtime, ActivationType type, int queries, MaskKind kind) {
  const int heads = 6, kv_heads = 2, keys = 141, dim = 35, value_dim = 21;
  const auto view = [](const std::vector<std::byte>& data, int of_heads, int rows, int columns) {
    return HeadsView{data.data(), static_cast<std::int64_t>(of_heads) * rows * columns, static_cast<std::int64_t>(rows) * columns, columns};
  };
  const auto count = [](int a, int b, int c, int d) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b) * static_cast<std::size_t>(c) * static_cast<std::size_t>(d);
  };
  const auto query = typed(type, count(2, heads, queries, dim), 1), key = typed(type, count(2, kv_heads, keys, dim), 2);
  const auto value = typed(type, count(2, kv_heads, keys, value_dim), 3), added = typed(type, count(1, 1, queries, keys), 4);
  std::vector<std::byte> shown(count(1, 1, queries, keys));
  for (std::size_t i = 0; i < shown.size(); ++i) shown[i] = std::byte{i % 3 != 0};
  std::vector<std::byte> out(count(2, queries, heads, value_dim) * element_bytes(type));
  const std::vector<float> sinks = values(static_cast<std::size_t>(heads), 5);
  const MaskView mask = {kind, kind == MaskKind::kBool ? shown.data() : added.data(), 0, 0, keys, 1};
  runtime.attention({type, view(query, heads, queries, dim), view(key, kv_heads, keys, dim), view(value, kv_heads, keys, value_dim),
                     out.data(), mask, sinks.data(), 2, heads, kv_heads, queries, keys, dim, value_dim, 0.2f, 0.0f});
  return out;
}

void attention_paths(const std::string& isa) {
  Runtime runtime(3, isa, false);
  for (const ActivationType type : {ActivationType::kFloat32, ActivationType::kFloat16, ActivationType::kBFloat16})
    for (const int queries : {1, 3, 50})
      for (const MaskKind kind : {MaskKind::kNone, MaskKind::kCausal, MaskKind::kBool, MaskKind::kAdded})
        attention_of(runtime, type, queries, kind);
}

std::vector<std::byte> elements(ActivationType type, const std::vector<float>& source) {
  std::vector<std::byte> all(element_bytes(type) * source.size());
  scalar_kernels().narrow(type, source.data(), all.data(), static_cast<int>(source.size()));
  return all;
}

// Norms of rows on one thread and on several, and routers of one token and of many, with tails that fill no vector.
void small_parts(const std::string& isa) {
  Runtime runtime(3, isa);
  for (const ActivationType type : {ActivationType::kFloat32, ActivationType::kFloat16, ActivationType::kBFloat16}) {
    for (const std::int64_t rows : {1, 700}) {
      const int cols = 77;
      const auto x = elements(type, values(static_cast<std::size_t>(rows) * cols, 1)), weight = elements(type, values(cols, 2));
      std::vector<std::byte> out(x.size());
      runtime.norm({x.data(), weight.data(), out.data(), type, rows, cols, {1e-5f, 1.0f, true}});
      runtime.norm({x.data(), nullptr, out.data(), type, rows, cols, {1e-5f, 0.0f, false}});
    }
    for (const std::int64_t inner : {0, 5}) {  // without inner values, neither matrix has an address
      const std::int64_t rows = 3, cols = 70;
      auto values_of = [&](std::int64_t count) {
        return inner == 0 ? std::vector<std::byte>() : elements(type, values(static_cast<std::size_t>(count), 6));
      };
      auto a = values_of(rows * inner), b = values_of(inner * cols);
      std::vector<std::byte> out(element_bytes(type) * rows * cols, std::byte{1});
      const MatrixView left = {a.data(), 0, inner, 1}, right = {b.data(), 0, cols, 1}, product = {out.data(), 0, cols, 1};
      runtime.matmul({type, left, right, product, 1, rows, inner, cols});
      const bool zeros = std::all_of(out.begin(), out.end(), [](std::byte value) { return value == std::byte{0}; });
      expect(zeros == (inner == 0), "a product");
    }
    for (const std::int64_t tokens : {1, 11}) {
      const int hidden = 45, experts = 12, top_k = 3;
      const auto x = elements(type, values(static_cast<std::size_t>(tokens) * hidden, 3)),
                 weight = elements(type, values(std::size_t{experts} * hidden, 4));
      const auto bias = values(experts, 5);
      const Selection selection = {Score::kSigmoid, experts, top_k, bias.data(), 4, 2, GroupScore::kTwoLargest, true, 2.5f};
      std::vector<std::byte> logits(static_cast<std::size_t>(tokens) * experts * element_bytes(type));
      std::vector<float> weights(static_cast<std::size_t>(tokens) * top_k);
      std::vector<std::int64_t> index(weights.size());
      runtime.route({x.data(), weight.data(), bias.data(), type, tokens, hidden, true, selection, logits.data(), type,
                     reinterpret_cast<std::byte*>(weights.data()), ActivationType::kFloat32, index.data()});
      for (std::size_t i = 0; i < index.size(); ++i) expect(index[i] >= 0 && index[i] < experts && weights[i] > 0.0f, "a router's choice");
    }
  }
}

// The matrix kernels of an instruction set, from one token on, against its vector tiles. A build with MOEGRAFT_EMULATED_AMX runs the AMX
// kernels over emulated tiles here.
void matrix_paths(const std::string& isa) {
  const Kernels& kernels = select_kernels(detect_cpu(), isa);
  for (int format = 0; format < kFormats; ++format) {
    if (kernels.matrix.multiply[format] == nullptr) continue;
    expect(matrix_is_right(kernels, static_cast<Format>(format)), "a matrix kernel against sums in double");
    Kernels wrong = kernels;
    wrong.matrix.multiply[format] = [](const MatrixArgs& args) { args.out[0] = 0.0f; };
    expect(!matrix_is_right(wrong, static_cast<Format>(format)), "the self-test finds a wrong kernel");
  }
  if (kernels.matrix.begin == nullptr) return;
  Runtime matrix(3, isa, false, 1), tiles(3, isa, false, 0);
  const auto close = [](const std::vector<float>& found, const std::vector<float>& expected) {
    double errors = 0.0, squares = 0.0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      errors += std::pow(static_cast<double>(found[i]) - expected[i], 2);
      squares += std::pow(static_cast<double>(expected[i]), 2);
    }
    return errors <= 4e-4 * squares;  // 2 %: tiles round activations to 8 bits
  };
  const std::pair<WeightTypes, int> cases[] = {{{WeightType::kBFloat16, WeightType::kBFloat16}, 72},
                                               {{WeightType::kInt8, WeightType::kInt4}, 104},
                                               {parse_weight_types("q4_k+q6_k"), 256},
                                               {parse_weight_types("mxfp4+iq4_nl"), 288},
                                               {parse_weight_types("q3_k+q2_k"), 256},
                                               {parse_weight_types("q5_0+q5_1"), 64}};
  for (const auto& [types, size] : cases) {
    const auto experts = make_experts({2, size, size, true, true}, types);
    for (const int tokens : {1, 37, 90}) {
      Call call(*experts, tokens, 2), expected(*experts, tokens, 2);
      matrix.forward(call.args);
      tiles.forward(expected.args);
      expect(close(call.out, expected.out), "experts by the matrix kernel");
      if (kernels.matrix.own_records && is_coded(types.gate_up)) expect(call.out == expected.out, "the bits of the tiles");
    }
  }
  for (const WeightType type : {WeightType::kBFloat16, WeightType::kInt8, WeightType::kInt4}) {
    const auto experts = make_experts({2, 600, 104, true, true}, {type, type}, LayoutKind::kSparse);
    for (const int tokens : {37, 90}) {
      Call call(*experts, tokens, 2), expected(*experts, tokens, 2);
      matrix.forward(call.args);
      tiles.forward(expected.args);
      expect(close(call.out, expected.out), "the sparse layout by the matrix kernel");
    }
  }
  // A token's result does not depend on the others: in one pass of each width and in several.
  for (const char* name : {"bfloat16", "int8", "int4", "q4_k", "q6_k", "mxfp4"}) {
    const WeightType type = parse_weight_type(name);
    const int size = 256;
    const auto experts = make_experts({1, size, size, true, false}, {type, type});
    std::vector<float> alone;
    for (const int tokens : {1, 16, 33, 65, 100}) {
      Call call(*experts, tokens, 1);
      std::fill(call.ids.begin(), call.ids.end(), 0);
      std::fill(call.weights.begin(), call.weights.end(), 1.0f);
      const auto place = static_cast<std::ptrdiff_t>(tokens / 2) * size;  // the first token of the first call, among others
      std::copy_n(values(size, 77).begin(), size, call.hidden.begin() + place);
      matrix.forward(call.args);
      const std::vector<float> found(call.out.begin() + place, call.out.begin() + place + size);
      if (tokens == 1) alone = found;
      expect(found == alone, "the bits of a token beside others");
    }
  }
  const int cols = 2048 + 45;  // two parts
  PackedLinear linear(45, cols, WeightType::kInt8);
  const auto weights = values(45 * static_cast<std::size_t>(cols), 5), x = values(20 * static_cast<std::size_t>(cols), 3);
  linear.pack({weights.data(), WeightType::kFloat32, 45, cols});
  std::vector<float> out(20 * 45), expected(out.size());
  matrix.linear({&linear, x.data(), out.data(), ActivationType::kFloat32, 20});
  tiles.linear({&linear, x.data(), expected.data(), ActivationType::kFloat32, 20});
  expect(close(out, expected), "a linear layer by the matrix kernel");
  const auto floats = [](const std::vector<std::byte>& halves) {
    std::vector<float> all(halves.size() / 2);
    scalar_kernels().widen(ActivationType::kBFloat16, halves.data(), all.data(), static_cast<int>(all.size()));
    return all;
  };
  for (const MaskKind kind : {MaskKind::kNone, MaskKind::kCausal})
    expect(close(floats(attention_of(matrix, ActivationType::kBFloat16, 50, kind)),
                 floats(attention_of(tiles, ActivationType::kBFloat16, 50, kind))),
           "attention by the matrix kernel");
}

std::string asserted;  // what is compared, for messages

// Relative to the norm of what is expected. Where a value is not finite, the other has to be the same.
void expect_close(const float* found, const float* expected, std::size_t count, double limit, const char* what) {
  double errors = 0.0, squares = 0.0;
  bool same = true;
  for (std::size_t i = 0; i < count; ++i) {
    if (!std::isfinite(expected[i]) || !std::isfinite(found[i])) {
      same = same && (found[i] == expected[i] || (std::isnan(found[i]) && std::isnan(expected[i])));
      continue;
    }
    errors += std::pow(static_cast<double>(found[i]) - expected[i], 2);
    squares += std::pow(static_cast<double>(expected[i]), 2);
  }
  if (same && std::sqrt(errors) <= limit * std::sqrt(squares)) return;
  std::fprintf(stderr, "%s: %s: relative error %g, limit %g%s\n", asserted.c_str(), what, std::sqrt(errors / squares), limit,
               same ? "" : ", and values that are not finite differ");
  std::exit(1);
}
void expect_close(const std::vector<float>& found, const std::vector<float>& expected, double limit, const char* what) {
  expect(found.size() == expected.size(), "equal sizes");
  expect_close(found.data(), expected.data(), found.size(), limit, what);
}

// Tiles of every number of tokens, and records, of one format.
void tiles_agree(const Kernels& kernels, Format format) {
  const int index = static_cast<int>(format);
  const WeightType type = weights_of(format);
  const int cols = is_stored(type) ? 512 : 224, groups = cols / kGroup, words = group_words(format);
  PackedLinear linear(kBlockRows, cols, type);
  const auto matrix = values(static_cast<std::size_t>(kBlockRows * cols), 11);
  if (is_stored(type)) linear.pack_blocks({random_blocks(type, kBlockRows, cols, 3).data(), kBlockRows, cols});
  else linear.pack({matrix.data(), WeightType::kFloat32, kBlockRows, cols});
  for (int tokens = 1; tokens <= kernels.max_tokens[index]; ++tokens) {
    std::vector<std::uint32_t> records(static_cast<std::size_t>(groups * tokens * words));
    std::vector<float> out(static_cast<std::size_t>(tokens * kBlockRows));
    std::vector<std::vector<std::uint32_t>> rows;
    for (int token = 0; token < tokens; ++token) {
      auto x = values(static_cast<std::size_t>(cols), static_cast<unsigned>(20 + token));
      std::fill_n(x.begin(), token == 1 ? kGroup : 0, 0.0f);  // a group without a scale
      rows.emplace_back(static_cast<std::size_t>(groups * words));
      scalar_kernels().encode[index](x.data(), groups, rows.back().data(), static_cast<std::size_t>(words));
      kernels.encode[index](x.data(), groups, records.data() + token * words, static_cast<std::size_t>(tokens * words));
      for (int group = 0; group < groups; ++group)
        expect(std::equal(rows.back().begin() + group * words, rows.back().begin() + (group + 1) * words,
                          records.begin() + (group * tokens + token) * words),
               "the bits of a record");
    }
    TileArgs args{linear.block(0), records.data(), groups, tokens, out.data(), linear.block(0), 0, 0};
    kernels.tile[index](args);
    for (int token = 0; token < tokens; ++token) {
      float alone[kBlockRows], expected[kBlockRows];
      TileArgs one{linear.block(0), rows[static_cast<std::size_t>(token)].data(), groups, 1, expected, linear.block(0), 0, 0};
      scalar_kernels().tile[index](one);
      one.out = alone;
      kernels.tile[index](one);
      expect_close(out.data() + token * kBlockRows, expected, kBlockRows, 2e-6, "a tile");
      expect(std::equal(alone, alone + kBlockRows, out.data() + token * kBlockRows), "a token beside others");
    }
  }
}

// Gates, sums, conversions, softmax and norms, with values that are not finite where the kernels accept them.
void small_kernels_agree(const Kernels& kernels) {
  const Kernels& scalar = scalar_kernels();
  std::vector<float> rows = values(std::size_t{5} * kBlockRows, 31);
  for (float& value : rows) value *= 12.0f;
  const std::vector<float> tame = rows;
  rows[3] = NAN, rows[20] = NAN, rows[40] = HUGE_VALF, rows[41] = -HUGE_VALF, rows[70] = 300.0f, rows[71] = -300.0f;
  const auto bias = values(kBlockRows, 32);
  const auto compare = [&](const char* what, double limit, auto run) {
    std::vector<float> found(rows.size(), 0.5f), expected = found;
    run(kernels, found.data());
    run(scalar, expected.data());
    expect_close(found, expected, limit, what);
  };
  for (int activation = 0; activation < kActivations; ++activation)
    for (const double limit : {2.0, HUGE_VAL})
      for (const float* biases : {bias.data(), static_cast<const float*>(nullptr)}) {
        const GateSpec spec = {static_cast<Activation>(activation), 1.7, limit, limit, limit, limit == 2.0 ? 1.0 : 0.0};
        for (const bool gated : {true, false})
          compare("a gate", 2e-6, [&](const Kernels& set, float* out) { set.gate({&spec, rows.data(), biases, biases, 5, gated, out}); });
        compare("gates alone", 2e-6, [&](const Kernels& set, float* out) { set.act({&spec, rows.data(), biases, nullptr, 5, true, out}); });
      }
  for (const float* biases : {bias.data(), static_cast<const float*>(nullptr)})
    compare("a weighted sum", 1e-6, [&](const Kernels& set, float* out) { set.accumulate(out, tame.data(), biases, 0.3f); });

  std::vector<std::uint16_t> halves(65536 + 5);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  for (const ActivationType type : {ActivationType::kFloat32, ActivationType::kFloat16, ActivationType::kBFloat16}) {
    const int count = type == ActivationType::kFloat32 ? 30000 : static_cast<int>(halves.size());
    std::vector<float> found(halves.size()), expected(halves.size());
    kernels.widen(type, halves.data(), found.data(), count);
    scalar.widen(type, halves.data(), expected.data(), count);
    for (std::size_t i = 0; i < found.size(); ++i)
      expect(std::memcmp(&found[i], &expected[i], 4) == 0 || (std::isnan(found[i]) && std::isnan(expected[i])), "a widened value");
    std::vector<float> exact(100003);
    for (std::size_t i = 0; i < exact.size(); ++i) exact[i] = float_from_bits(static_cast<std::uint32_t>(i) * 42949u + 7u);
    std::vector<std::uint32_t> narrow(exact.size()), wanted(exact.size());
    kernels.narrow(type, exact.data(), narrow.data(), static_cast<int>(exact.size()));
    scalar.narrow(type, exact.data(), wanted.data(), static_cast<int>(exact.size()));
    const auto* found_bytes = reinterpret_cast<const std::byte*>(narrow.data());
    const auto* wanted_bytes = reinterpret_cast<const std::byte*>(wanted.data());
    for (std::size_t i = 0; i < exact.size(); ++i)  // of a NaN, the kernels keep different bits
      expect(std::isnan(exact[i]) ||
                 std::memcmp(found_bytes + element_bytes(type) * i, wanted_bytes + element_bytes(type) * i, element_bytes(type)) == 0,
             "a narrowed value");

    const int cols = 77;
    const auto x = typed(type, cols, 33), weight = typed(type, cols, 34);
    for (const bool rounds_first : {true, false}) {
      std::vector<std::byte> norm(x.size()), reference(x.size());
      kernels.norm({x.data(), rounds_first ? weight.data() : nullptr, norm.data(), type, cols, {1e-5f, 1.0f, rounds_first}});
      scalar.norm({x.data(), rounds_first ? weight.data() : nullptr, reference.data(), type, cols, {1e-5f, 1.0f, rounds_first}});
      std::vector<float> norm_values(cols), reference_values(cols);
      scalar.widen(type, norm.data(), norm_values.data(), cols);
      scalar.widen(type, reference.data(), reference_values.data(), cols);
      expect_close(norm_values, reference_values, type == ActivationType::kFloat32 ? 2e-6 : 2e-3, "a norm");
    }
  }

  constexpr int kApart = 40;  // from a group of scores to the next
  for (const float softcap : {0.0f, 5.0f})
    for (const int hidden : {0, 5, 64})  // scores of minus infinity
      for (const bool nan : {false, true}) {
        const auto softmax = [&](const Kernels& set) {
          std::vector<float> scores(tame.begin(), tame.begin() + kApart + kGroup), found(64);
          for (int i = 0; i < hidden; ++i) scores[static_cast<std::size_t>(i / kGroup * kApart + i % kGroup)] = -HUGE_VALF;
          if (nan) scores[kApart + 28] = NAN;
          SoftmaxArgs args = {scores.data(), kApart, found.data(), 64, 0.3f, softcap, hidden == 64 ? -HUGE_VALF : 1.0f, 0.7f};
          found.push_back(set.attention.softmax(args));
          found.push_back(args.sum);
          return found;
        };
        expect_close(softmax(kernels), softmax(scalar), 2e-6, "a softmax");
      }
  const auto fold = [&](const Kernels& set) {
    std::vector<float> sums(tame.begin(), tame.begin() + 3 * kApart);
    const float factors[] = {0.25f, 0.0f, 1.0f};
    set.attention.fold(sums.data(), kApart, tame.data() + kBlockRows, factors, 3);
    return sums;
  };
  expect_close(fold(kernels), fold(scalar), 1e-6, "sums with factors");
}

std::vector<float> floats_of(ActivationType type, const std::vector<std::byte>& elements) {
  std::vector<float> all(elements.size() / element_bytes(type));
  scalar_kernels().widen(type, elements.data(), all.data(), static_cast<int>(all.size()));
  return all;
}

// The kernels of an instruction set and what is computed with them, by vector tiles, against the scalar kernels.
void agrees_with_scalar(const std::string& isa) {
  if (isa == "scalar") return;
  const Kernels& kernels = select_kernels(detect_cpu(), isa);
  for (int format = 0; format < kFormats; ++format) {
    asserted = isa + ", " + name_of(weights_of(static_cast<Format>(format)));
    tiles_agree(kernels, static_cast<Format>(format));
  }
  asserted = isa;
  small_kernels_agree(kernels);
  Runtime vector(2, isa, false, 0), scalar(2, "scalar", false, 0);
  const auto same = [&](const PackedExperts& experts, int tokens, float threshold, double limit) {
    asserted = isa + ", " + name_of(experts.types());
    Call call(experts, tokens, 2), expected(experts, tokens, 2);
    call.args.threshold = expected.args.threshold = threshold;
    vector.forward(call.args);
    scalar.forward(expected.args);
    expect_close(call.out, expected.out, limit, "experts");
    if (experts.kind() == LayoutKind::kSparse || !has_gradients(experts.types().gate_up)) return;
    Gradients gradients(call), expected_gradients(expected);
    vector.experts_gradient(gradients.args);
    scalar.experts_gradient(expected_gradients.args);
    expect_close(gradients.of_hidden, expected_gradients.of_hidden, limit, "gradients of hidden states");
    expect_close(gradients.of_weights, expected_gradients.of_weights, limit, "gradients of routing weights");
    Added added(call), expected_added(expected);
    call.args.terms = gradients.args.terms = added.terms();
    expected.args.terms = expected_gradients.args.terms = expected_added.terms();
    vector.forward(call.args);
    scalar.forward(expected.args);
    expect_close(call.out, expected.out, limit, "experts with adapters");
    vector.experts_gradient(gradients.args);
    scalar.experts_gradient(expected_gradients.args);
    expect_close(added.activations, expected_added.activations, limit, "activations with adapters");
    expect_close(added.gate_up_gradients, expected_added.gate_up_gradients, limit, "gradients of gate and up");
  };
  for (int index = 0; index < kWeightTypes; ++index) {
    const auto type = static_cast<WeightType>(index);
    const bool plain = !is_stored(type);
    // Where neurons are rounded to 8 bits, a difference in their last bits may round them to another code.
    same(*make_experts({3, plain ? 41 : 256, 37, true, true}, {type, plain ? type : WeightType::kInt8}), 13, 0.0f,
         is_coded(type) ? 5e-3 : 2e-6);
  }
  for (const WeightType type : kPlainTypes)
    for (const bool gated : {true, false})
      for (const int tokens : {13, 70})  // in the second case most products are needed, and rows become blocks, which rounds codes again
        same(*make_experts({3, 600, 37, gated, true}, {type, type}, LayoutKind::kSparse), tokens, tokens == 13 ? 0.4f : 0.1f,
             tokens == 13 || !is_quantized(type) ? 1e-2 : 2e-2);
  for (const ActivationType type : {ActivationType::kFloat32, ActivationType::kFloat16, ActivationType::kBFloat16})
    for (const int queries : {1, 20}) {
      const auto found = attention_of(vector, type, queries, MaskKind::kCausal);
      asserted = isa + ", attention";
      expect_close(floats_of(type, found), floats_of(type, attention_of(scalar, type, queries, MaskKind::kCausal)),
                   type == ActivationType::kFloat32 ? 2e-6 : 1e-2, "attention");
    }
}

// Layers whose experts are in a file, more than fit into the frames: jobs of several threads wait for readers, a router predicts, another
// thread copies, and a damaged expert is an error that leaves nothing behind.
void experts_in_frames() {
  asserted = "frames";
  constexpr int kLayers = 3, kExperts = 9;
  const ExpertsShape shape = {kExperts, 41, 37, true, true};
  const WeightTypes types = {WeightType::kInt8, WeightType::kInt8};
  const char* const folder = std::getenv("TMPDIR");
  const std::string path = std::string(folder != nullptr ? folder : "/tmp") + "/moegraft-frames-" + std::to_string(getpid());
  const auto router = values(static_cast<std::size_t>(kExperts) * 41, 3);
  std::vector<std::unique_ptr<PackedExperts>> in_memory, in_file;
  for (int layer = 0; layer < kLayers; ++layer) in_memory.push_back(make_experts(shape, types));
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  expect(file != nullptr, "a file for experts");
  for (const auto& experts : in_memory) std::fwrite(experts->data(), 1, experts->bytes(), file);
  std::fclose(file);
  const std::size_t bytes = in_memory[0]->layout().expert_bytes;
  const auto frames = std::make_shared<ExpertFrames>(3);
  for (int layer = 0; layer < kLayers; ++layer) {
    in_file.push_back(make_experts(shape, types));
    std::memset(in_file.back()->data(), 0, in_file.back()->bytes());  // what is computed with comes from the file
    std::vector<std::uint32_t> checksums;
    if (layer == 2) checksums.assign(kExperts, 1);  // of other experts
    const ExpertsInFile place = {path, in_memory[0]->bytes() * static_cast<std::size_t>(layer), bytes, kExperts, checksums};
    in_file.back()->use_frames(frames, frames->add(place));
    frames->set_router(layer, {router.data(), ActivationType::kFloat32, 41, {}, {}});
  }
  frames->open(ExpertFrames::frame_bytes_for(bytes) * static_cast<std::size_t>(frames->least_frames()));
  Runtime runtime(3, "scalar", false);
  std::atomic<bool> ended{false};
  std::thread copies([&] {
    std::vector<std::byte> found(bytes);
    for (int i = 0; !ended; ++i) {
      frames->copy(i % 2, i % kExperts, 0, bytes, found.data());
      expect(std::memcmp(found.data(), in_memory[static_cast<std::size_t>(i % 2)]->expert(i % kExperts), bytes) == 0, "a copied expert");
    }
  });
  for (int step = 0; step < 30; ++step)
    for (std::size_t layer = 0; layer < 2; ++layer) {
      const int tokens = step % 7 == 0 ? 40 : 1 + step % 3;
      Call call(*in_file[layer], tokens, 2), expected(*in_memory[layer], tokens, 2);
      for (std::size_t i = 0; i < call.ids.size(); ++i)
        call.ids[i] = expected.ids[i] = static_cast<std::int64_t>((i * 5 + static_cast<std::size_t>(step)) % kExperts);
      runtime.forward(call.args);
      runtime.forward(expected.args);
      expect(call.out == expected.out, "experts from frames");
    }
  ended = true;
  copies.join();
  Call damaged(*in_file[2], 4, 2);
  bool refused = false;
  try {
    runtime.forward(damaged.args);
  } catch (const std::runtime_error&) {
    refused = true;
  }
  expect(refused, "a damaged expert");
  Call call(*in_file[0], 4, 2), expected(*in_memory[0], 4, 2);
  runtime.forward(call.args);
  runtime.forward(expected.args);
  expect(call.out == expected.out, "experts from frames after an error");
  std::remove(path.c_str());
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) {
    const std::vector<std::string> expected(arguments + 1, arguments + count);
    expect(available_isas() == expected, "the instruction sets of this CPU");
    for (const std::string& isa : expected) agrees_with_scalar(isa);
    matrix_paths(expected.back());
    return 0;
  }
  for (const std::string& isa : available_isas()) {
    agrees_with_scalar(isa);
    every_path(isa);
    sparse_paths(isa);
    stored_down(isa);
    attention_paths(isa);
    small_parts(isa);
    matrix_paths(isa);
  }
  tickets_and_errors();
  callers_take_turns();
  workers_kept_awake();
  shutdown_with_work_pending();
  experts_in_frames();
  schedules();
  return 0;
}
