// Which instruction sets were compiled, which of them a CPU runs, and which one computes what.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "simd/kernels.h"

namespace moegraft {

// What the kernels can use of a CPU and its system.
struct CpuFeatures {
  bool avx2 = false;             // with FMA, F16C and BMI2
  bool avx512 = false;           // F, BW, DQ and VL
  bool vnni = false;
  bool bf16 = false;
  bool amx = false;              // tiles, with products of int8 and of bfloat16
  bool tile_permission = false;  // the system lets this process use the tile registers
};
CpuFeatures detect_cpu();  // asks the system for the tile registers where there are any

std::vector<std::string> compiled_isas();  // from the plainest to the richest
std::vector<std::string> available_isas(const CpuFeatures& cpu = detect_cpu());

struct SelectedKernels {
  Kernels table;                                // table.isa is the instruction set of everything but the tiles
  std::array<const char*, kFormats> tile_isas;  // of the tiles, by Format

  std::string name() const;  // avx512_bf16, or avx512_bf16+amx where some tiles are of another set than the rest
};

// `wanted` is the instruction set of everything; when it is empty, each weight type gets the fastest of the CPU. Throws std::invalid_argument
// where `wanted` is unknown or unavailable; `source`, where it comes from, is a part of the message.
SelectedKernels select_kernels(const CpuFeatures& cpu, const std::string& wanted, const std::string& source = "");

// select_kernels on this CPU; where `isa` is empty, MOEGRAFT_ISA is what is wanted.
SelectedKernels kernels_for(const std::string& isa);

}  // namespace moegraft
