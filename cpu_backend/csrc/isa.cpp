#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace moegraft {
namespace {

struct Entry {
  const Kernels& (*kernels)();
  bool (*available)();
};

std::vector<Entry> entries() {
  std::vector<Entry> all = {{scalar_kernels, [] { return true; }}};
  return all;
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

const Kernels& kernels_for(const std::string& isa) {
  const char* forced = std::getenv("MOEGRAFT_ISA");
  const std::string wanted = !isa.empty() ? isa : forced != nullptr ? forced : "";
  const Kernels* found = nullptr;
  std::string known;
  for (const Entry& entry : entries()) {
    const Kernels& kernels = entry.kernels();
    const bool available = entry.available();
    if (available) known += (known.empty() ? "" : ", ") + std::string(kernels.isa);
    if (wanted.empty() ? available : wanted == kernels.isa) found = &kernels;
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
