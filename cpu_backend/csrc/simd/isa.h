// The compiled instruction sets, those that a CPU supports, and the selection of one.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "simd/kernels.h"

namespace moegraft {

// The features of a CPU and its system that the kernels use.
struct CpuFeatures {
  bool avx2 = false;             // with FMA, F16C and BMI2
  bool avx512 = false;           // F, BW, DQ and VL
  bool vnni = false;
  bool bf16 = false;             // of AVX-512, or of NEON
  bool amx = false;              // tiles, with products of int8 and of bfloat16
  bool tile_permission = false;  // the system lets this process use the tile registers
  bool neon = false;
  bool dotprod = false;
  bool i8mm = false;
};
CpuFeatures detect_cpu();  // requests the tile registers from the system where the CPU has them

std::vector<std::string> compiled_isas();  // in ascending order of features
std::vector<std::string> available_isas(const CpuFeatures& cpu = detect_cpu());

// The table of `wanted`, or of the last available instruction set where `wanted` is empty. Throws std::invalid_argument if `wanted` is
// unknown or unavailable; the message includes `source`, the origin of the request.
const Kernels& select_kernels(const CpuFeatures& cpu, const std::string& wanted, const std::string& source = "");

// Whether the matrix kernel of a format computes what it should, in one pass and in several. Runs it.
bool matrix_is_right(const Kernels& kernels, Format format);

// select_kernels on this CPU for `isa`, or for the environment variable MOEGRAFT_ISA where `isa` is empty. Without either, matrix kernels
// that are wrong are left out; they are tested once. `matrix_tokens`, if set, replaces the least tokens of every matrix kernel; 0 stands
// for never.
Kernels kernels_for(const std::string& isa, std::optional<int> matrix_tokens = std::nullopt);

}  // namespace moegraft
