// The calls of recurrent layers as jobs of the thread pool. Apart from recurrent.h, which the files of instruction sets include.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "recurrent/recurrent.h"

namespace moegraft {

// One call of one of the three. Operands are in the order of the structs' members, absent ones as views without data.
class RecurrentJob final : public Job {
 public:
  static constexpr std::size_t kWritten = 2;  // the first operands

  // `name`: delta_rule (numbers: scale, epsilon), short_conv (silu) or selective_scan (softplus, least, most). Throws
  // std::invalid_argument.
  RecurrentJob(const Kernels& kernels, const std::string& name, const std::vector<double>& numbers, int workers);
  std::size_t operands() const;  // their number
  // Throws std::invalid_argument where they do not fit together.
  void set(const std::vector<StridedView>& operands, std::vector<StridedView> past);
  void prepare() { phase_.reset(static_cast<int>(units_)); }
  void run(int worker) noexcept override;

 private:
  enum class Rule { kDelta, kConv, kScan };

  const Kernels& kernels_;
  const RecurrentKernels& loops_;
  Rule rule_;
  DeltaRuleArgs delta_{};
  ShortConvArgs conv_{};
  SelectiveScanArgs scan_{};
  std::int64_t units_ = 0;
  Phase phase_;
};

}  // namespace moegraft
