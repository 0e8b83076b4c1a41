// Weight types, activation functions and sizes, shared by all folders. Nothing here depends on the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace moegraft {

// From kInt8 on, the formats of formats/format_list.h in their order; those without a name here come from files alone.
enum class WeightType : int { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };
enum class ActivationType : int { kFloat32, kFloat16, kBFloat16 };  // of hidden_states and out

constexpr std::size_t element_bytes(ActivationType type) { return type == ActivationType::kFloat32 ? 4 : 2; }

const char* name_of(WeightType type);
constexpr bool is_quantized(WeightType type) { return type == WeightType::kInt8 || type == WeightType::kInt4; }

// Of an expert's parts: gate and up rows share blocks, so they share a type.
struct WeightTypes {
  WeightType gate_up = WeightType::kFloat32;
  WeightType down = WeightType::kFloat32;
};

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kIdentity, kSigmoid, kTanh };
const char* name_of(Activation activation);
constexpr int kActivations = 8;

// gated:   min(act(min(gate, gate_limit); alpha), act_limit) * (clamp(up, -up_limit, up_limit) + up_offset)
// ungated: act(up; alpha)
struct GateSpec {
  Activation activation = Activation::kSilu;
  double alpha = 1.0;  // silu(x) = x * sigmoid(alpha * x)
  double gate_limit = std::numeric_limits<double>::infinity();
  double act_limit = std::numeric_limits<double>::infinity();
  double up_limit = std::numeric_limits<double>::infinity();
  double up_offset = 0.0;
};

struct ExpertsShape {
  int num_experts = 0;
  int hidden = 0;
  int intermediate = 0;
  bool gated = true;
  bool bias = false;
};

enum class Part : int { kGate, kUp, kDown };
const char* name_of(Part part);

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace moegraft
