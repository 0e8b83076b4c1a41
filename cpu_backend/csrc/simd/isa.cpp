#include "simd/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace moegraft {
namespace {

struct InstructionSet {
  const Kernels& (*kernels)();
  bool available;
};

// In ascending order: each instruction set needs all features of those before it.
std::vector<InstructionSet> instruction_sets(const CpuFeatures& cpu) {
  std::vector<InstructionSet> sets = {{scalar_kernels, true}};
#if defined(__x86_64__) && !defined(MOEGRAFT_SCALAR_ONLY)
  bool available = true;
  const auto add = [&](const Kernels& (*kernels)(), bool feature) { sets.push_back({kernels, available = available && feature}); };
  add(avx2_kernels, cpu.avx2);
  add(avx512_kernels, cpu.avx512);
  add(avx512_vnni_kernels, cpu.vnni);
  add(avx512_bf16_kernels, cpu.bf16);
  add(amx_kernels, cpu.amx && cpu.tile_permission);
#else
  (void)cpu;
#endif
  return sets;
}

// Whether AMX tiles are faster than those of AVX-512, by Format, where a CPU has both. Measured on Emerald Rapids, 2026-11: a layer of
// experts, 512 tokens. Linear layers and attention multiply through the same tiles and follow; they were not measured separately.
constexpr std::array<bool, kFormats> kAmxIsFaster = {
    false,  // kFloat32: not supported by AMX
    false,  // kFloat16: not supported
    false,  // kBFloat16, for activations of other types: not supported
    true,   // kBFloat16Dot: 61 to 75 ms, against 253 to 300 ms by vectors
    false,  // kInt8: not faster than VNNI, since sums leave the matrix unit after every 32 columns to be scaled
    false,  // kInt4: as kInt8
    false,  // kQ4K: no AMX tiles exist
    false,  // kQ6K: no AMX tiles exist
};

}  // namespace

CpuFeatures detect_cpu() {
  CpuFeatures cpu;
#if defined(__x86_64__) && !defined(MOEGRAFT_SCALAR_ONLY)
  // The compiler's checks include whether the system saves the registers.
  cpu.avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  cpu.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
  cpu.vnni = __builtin_cpu_supports("avx512vnni");
  cpu.bf16 = __builtin_cpu_supports("avx512bf16");
#if defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  cpu.amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & (kBf16 | kTile | kInt8)) == (kBf16 | kTile | kInt8);
  if (cpu.amx) {
    // Linux grants tile registers to a process on request, for all threads and its whole lifetime. Old kernels and some sandboxes refuse.
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    cpu.tile_permission = granted;
  }
#endif
#endif
  return cpu;
}

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets({})) names.emplace_back(set.kernels().isa);
  return names;
}

std::vector<std::string> available_isas(const CpuFeatures& cpu) {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets(cpu))
    if (set.available) names.emplace_back(set.kernels().isa);
  return names;
}

std::string SelectedKernels::name() const {
  for (const char* isa : tile_isas)
    if (isa != table.isa) return table.isa + std::string("+") + isa;
  return table.isa;
}

SelectedKernels select_kernels(const CpuFeatures& cpu, const std::string& wanted, const std::string& source) {
  SelectedKernels selected{};
  std::string available;
  bool compiled = wanted.empty();
  const Kernels* amx = nullptr;
  for (const InstructionSet& set : instruction_sets(cpu)) {
    const Kernels& kernels = set.kernels();
    compiled = compiled || wanted == kernels.isa;
    if (!set.available) continue;
    available += (available.empty() ? "" : ", ") + std::string(kernels.isa);
    if (wanted.empty() && kernels.isa == std::string("amx")) {
      amx = &kernels;
    } else if (wanted.empty() || wanted == kernels.isa) {
      selected.table = kernels;
      selected.tile_isas.fill(kernels.isa);
    }
  }
  if (!compiled) throw std::invalid_argument("unknown instruction set '" + wanted + "'" + source + "; this CPU has " + available);
  if (selected.table.isa == nullptr)
    throw std::invalid_argument("instruction set '" + wanted + "'" + source + " is not on this CPU; it has " + available);
  for (std::size_t format = 0; amx != nullptr && format < kFormats; ++format) {
    if (!kAmxIsFaster[format]) continue;
    selected.table.tile[format] = amx->tile[format];
    selected.table.max_tokens[format] = amx->max_tokens[format];
    selected.tile_isas[format] = amx->isa;
  }
  return selected;
}

SelectedKernels kernels_for(const std::string& isa) {
  const char* forced = isa.empty() ? std::getenv("MOEGRAFT_ISA") : nullptr;
  return forced != nullptr ? select_kernels(detect_cpu(), forced, " (from MOEGRAFT_ISA)") : select_kernels(detect_cpu(), isa);
}

}  // namespace moegraft
