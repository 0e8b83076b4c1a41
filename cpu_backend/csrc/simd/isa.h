// The compiled instruction sets, those that a CPU supports, and the selection of one for each weight type.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "simd/kernels.h"

namespace moegraft {

// The features of a CPU and its system that the kernels use.
struct CpuFeatures {
  bool avx2 = false;             // with FMA, F16C and BMI2
  bool avx512 = false;           // F, BW, DQ and VL
  bool vnni = false;
  bool bf16 = false;
  bool amx = false;              // tiles, with products of int8 and of bfloat16
  bool tile_permission = false;  // the system lets this process use the tile registers
};
CpuFeatures detect_cpu();  // requests the tile registers from the system where the CPU has them

std::vector<std::string> compiled_isas();  // in ascending order of features
std::vector<std::string> available_isas(const CpuFeatures& cpu = detect_cpu());

struct SelectedKernels {
  Kernels table;                                // table.isa is the instruction set of everything except the tiles
  std::array<const char*, kFormats> tile_isas;  // the instruction set of the tiles, by Format

  std::string name() const;  // avx512_bf16, or avx512_bf16+amx where some tiles use another instruction set
};

// Selects `wanted` for everything, or the fastest instruction set of each weight type where `wanted` is empty. Throws std::invalid_argument
// if `wanted` is unknown or unavailable; the message includes `source`, the origin of the request.
SelectedKernels select_kernels(const CpuFeatures& cpu, const std::string& wanted, const std::string& source = "");

// select_kernels on this CPU for `isa`, or for the environment variable MOEGRAFT_ISA where `isa` is empty.
SelectedKernels kernels_for(const std::string& isa);

}  // namespace moegraft
