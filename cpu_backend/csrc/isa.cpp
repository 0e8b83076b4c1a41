#include "isa.h"

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

struct Entry {
  const Kernels& (*kernels)();
  bool (*available)();
  bool tested;
};

#if defined(__x86_64__) && !defined(MOEGRAFT_SCALAR_ONLY)
// The compiler's checks include that the system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }
// Tile registers are given by Linux to a process that asks; the answer holds for its life.
bool has_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  if (!has_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  if ((edx & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8)) return false;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
#endif

std::vector<Entry> entries() {
  return {
      {scalar_kernels, [] { return true; }, true},
#if defined(__x86_64__) && !defined(MOEGRAFT_SCALAR_ONLY)
      {avx2_kernels, has_avx2, true},
      {avx512_kernels, has_avx512, true},
      {avx512_vnni_kernels, has_vnni, true},
      {avx512_bf16_kernels, has_bf16, true},
      {amx_kernels, has_amx, false},
#endif
  };
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) names.emplace_back(entry.kernels().isa);
  return names;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : entries())
    if (entry.available()) names.emplace_back(entry.kernels().isa);
  return names;
}

std::vector<std::string> untested_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : entries())
    if (!entry.tested) names.emplace_back(entry.kernels().isa);
  return names;
}

const Kernels& kernels_for(const std::string& isa) {
  const char* forced = std::getenv("MOEGRAFT_ISA");
  const std::string wanted = !isa.empty() ? isa : forced != nullptr ? forced : "";
  const Kernels* found = nullptr;
  std::string known;
  for (const Entry& entry : entries()) {
    const Kernels& kernels = entry.kernels();
    const bool available = entry.available();
    if (available) known += (known.empty() ? "" : ", ") + std::string(kernels.isa);
    if (wanted.empty() ? available && entry.tested : wanted == kernels.isa) found = &kernels;
    if (wanted == kernels.isa && !available)
      throw std::invalid_argument("instruction set '" + wanted + "' is not on this CPU; it has " + known);
  }
  if (found == nullptr) {
    const std::string source = isa.empty() ? " (from MOEGRAFT_ISA)" : "";
    throw std::invalid_argument("unknown instruction set '" + wanted + "'" + source + "; this CPU has " + known);
  }
  return *found;
}

}  // namespace moegraft
