#include "simd/isa.h"

#include <array>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace moegraft {
namespace {

struct InstructionSet {
  const char* name;
  const Kernels& (*kernels)();  // compiled with the instruction set itself: not to be called where it is not available
  bool available;
};

// In ascending order: each instruction set needs all features of those before it.
std::vector<InstructionSet> instruction_sets(const CpuFeatures& cpu) {
  std::vector<InstructionSet> sets = {{"scalar", scalar_kernels, true}};
#if !defined(MOEGRAFT_SCALAR_ONLY)
  bool available = true;
  [[maybe_unused]] const auto add = [&](const char* name, const Kernels& (*kernels)(), bool feature) {
    sets.push_back({name, kernels, available = available && feature});
  };
#if defined(__x86_64__)
  add("avx2", avx2_kernels, cpu.avx2);
  add("avx512", avx512_kernels, cpu.avx512);
  add("avx512_vnni", avx512_vnni_kernels, cpu.vnni);
  add("avx512_bf16", avx512_bf16_kernels, cpu.bf16);
  add("amx", amx_kernels, cpu.amx && cpu.tile_permission);
#elif defined(__aarch64__)
  add("neon", neon_kernels, cpu.neon);
  add("neon_dotprod", neon_dotprod_kernels, cpu.dotprod);
  add("neon_i8mm", neon_i8mm_kernels, cpu.i8mm);
  add("neon_bf16", neon_bf16_kernels, cpu.bf16);
#endif
#endif
  (void)cpu;
  return sets;
}

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
#if defined(MOEGRAFT_EMULATED_AMX)
  cpu.amx = cpu.tile_permission = true;
#elif defined(__linux__)
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
#elif defined(__aarch64__) && !defined(MOEGRAFT_SCALAR_ONLY)
  cpu.neon = true;
#if defined(__linux__)
  // By number: older headers lack the names of newer features.
  constexpr unsigned long kHwcap2 = 26, kDotprod = 1ul << 20, kI8mm = 1ul << 13, kBf16 = 1ul << 14;
  cpu.dotprod = (getauxval(AT_HWCAP) & kDotprod) != 0;
  cpu.i8mm = (getauxval(kHwcap2) & kI8mm) != 0;
  cpu.bf16 = (getauxval(kHwcap2) & kBf16) != 0;
#elif defined(__APPLE__)
  const auto has = [](const char* name) {
    int value = 0;
    std::size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  cpu.dotprod = has("hw.optional.arm.FEAT_DotProd");
  cpu.i8mm = has("hw.optional.arm.FEAT_I8MM");
  cpu.bf16 = has("hw.optional.arm.FEAT_BF16");
#endif
#endif
  return cpu;
}

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets({})) names.emplace_back(set.name);
  return names;
}

std::vector<std::string> available_isas(const CpuFeatures& cpu) {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets(cpu))
    if (set.available) names.emplace_back(set.name);
  return names;
}

const Kernels& select_kernels(const CpuFeatures& cpu, const std::string& wanted, const std::string& source) {
  const Kernels* selected = nullptr;
  std::string available;
  bool compiled = wanted.empty();
  for (const InstructionSet& set : instruction_sets(cpu)) {
    compiled = compiled || wanted == set.name;
    if (!set.available) continue;
    available += (available.empty() ? "" : ", ") + std::string(set.name);
    if (wanted.empty() || wanted == set.name) selected = &set.kernels();
  }
  if (!compiled) throw std::invalid_argument("unknown instruction set '" + wanted + "'" + source + "; this CPU has " + available);
  if (selected == nullptr)
    throw std::invalid_argument("instruction set '" + wanted + "'" + source + " is not on this CPU; it has " + available);
  return *selected;
}

Kernels kernels_for(const std::string& isa, std::optional<int> matrix_tokens) {
  const char* forced = isa.empty() ? std::getenv("MOEGRAFT_ISA") : nullptr;
  const bool chosen = isa.empty() && (forced == nullptr || *forced == '\0');
  Kernels kernels = forced != nullptr ? select_kernels(detect_cpu(), forced, " (from MOEGRAFT_ISA)") : select_kernels(detect_cpu(), isa);
  if (chosen) {
    static const std::array<bool, kFormats> right = [&kernels] {
      std::array<bool, kFormats> found{};
      for (int format = 0; format < kFormats; ++format)
        found[static_cast<std::size_t>(format)] =
            kernels.matrix.multiply[format] != nullptr && matrix_is_right(kernels, static_cast<Format>(format));
      return found;
    }();
    for (int format = 0; format < kFormats; ++format)
      if (!right[static_cast<std::size_t>(format)]) kernels.matrix.multiply[format] = nullptr;
  }
  if (matrix_tokens)
    for (int& least : kernels.matrix.least_tokens) least = *matrix_tokens > 0 ? *matrix_tokens : kNeverMatrix;
  return kernels;
}

}  // namespace moegraft
