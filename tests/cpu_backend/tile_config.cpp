// Prints the 64 bytes that ldtilecfg reads after configure_tiles(): here the instruction's name is an assembler macro that copies its operand, so
// that the compiler's stores are visible on machines without AMX.
asm(R"(
.macro ldtilecfg operand:vararg
  vmovups \operand, %zmm31
  vmovups %zmm31, seen_config(%rip)
.endm
)");

#include <cstdio>

#include "simd/amx_tiles.h"

extern "C" {
alignas(64) unsigned char seen_config[64];
}

// Nothing follows the instruction, so a compiler that does not know its operand removes all stores to it.
__attribute__((noinline)) void configure_last() { moegraft::configure_tiles(); }

int main() {
  configure_last();
  for (const unsigned char byte : seen_config) std::printf("%d ", byte);
  return 0;
}
