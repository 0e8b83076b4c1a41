// Which instruction sets were compiled, which of them a CPU runs, and which one computes what.
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
CpuFeatures detect_cpu();  // requests the tile registers from the system where there are any

std::vector<std::string> compiled_isas();  // from the simplest to the richest
std::vector<std::string> available_isas(const CpuFeatures& cpu = detect_cpu());

struct SelectedKernels {
  Kernels table;                                // table.isa is the instruction set of everything but the tiles
  std::array<const char*, kFormats> tile_isas;  // of the tiles, by Format

  std::string name() const;  // avx512_bf16, or avx512_bf16+amx where some tiles are of another set than the rest
};

// `wanted` is the instruction set of everything; if it is empty, each weight type gets the fastest of the CPU. Throws std::invalid_argument
// if `wanted` is unknown or unavailable; the message includes `source`, where the request comes from.
SelectedKernels select_kernels(const CpuFeatures& cpu, const std::string& wanted, const std::string& source = "");

// select_kernels on this CPU; where `isa` is empty, MOEGRAFT_ISA is what is wanted.
SelectedKernels kernels_for(const std::string& isa);

}  // namespace moegraft
