#include "ops/grid_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace moegraft {
namespace {

// Vectors of 16 points of x, which any CPU has: the compiler divides them into its own.
constexpr int kPoints = 16;
typedef float Floats __attribute__((vector_size(4 * kPoints)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kPoints)));

constexpr int kMostColumns = 8;
constexpr int kMostHalves = 81;  // numbers of a half of a point: 8^2 of two columns, 3^4 of four
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A grid as the search reads it: a point is the sum of two halves, each of which has few forms.
struct Grid {
  GridForm form;
  int count, levels, halves;
  float level[8];
  std::vector<std::uint8_t> first, second;  // of each point, the number of its half: the sum of level * levels^column
  std::vector<float> numbers;  // (count, columns)
};

// Throws std::invalid_argument where numbers are not quantised to a grid of this type.
const GridTable& table_of(WeightType type) {
  if (!is_coded(type) || coded_format(type).grid.search == nullptr)
    throw std::invalid_argument("weight type '" + std::string(name_of(type)) + "' has no grid");
  return coded_format(type).grid;
}

Grid grid_of(WeightType type, float shift) {
  const GridTable& table = table_of(type);
  const GridForm& form = *table.search;
  Grid grid{form, table.count, table.level_count, 1, {}, {}, {}, {}};
  for (int i = 0; i < grid.levels; ++i) grid.level[i] = static_cast<float>(table.levels[i]) + shift;
  for (int k = 0; k < form.columns / 2; ++k) grid.halves *= grid.levels;
  const int bits = grid.levels == 3 ? 2 : 3;
  for (int i = 0; i < grid.count; ++i) {
    const auto digit = [&](int column) { return table.points[i] >> bits * column & ((1 << bits) - 1); };
    int half[2] = {};
    for (int k = form.columns - 1; k >= 0; --k) {
      int& number = half[2 * k / form.columns];
      number = number * grid.levels + digit(k);
    }
    for (int k = 0; k < form.columns; ++k) grid.numbers.push_back(grid.level[digit(k)]);
    grid.first.push_back(static_cast<std::uint8_t>(half[0]));
    grid.second.push_back(static_cast<std::uint8_t>(half[1]));
  }
  return grid;
}

// 16 points of x, a column after the other.
struct Block {
  Floats x[kMostColumns], weight[kMostColumns];  // magnitudes of x where points are magnitudes
  Floats twice_inverse;  // 2 / scale
};

struct Tables {
  Floats plain[2][kMostHalves];  // the cost of each form of a half
  Floats turned[2][kMostHalves];  // the same with the sign of one column turned, the one for which this costs least
};

// The cost of a number g in a column is its error over the squared scale, without what does not depend on g: w g^2 - 2 w x g / scale.
template <bool Turned>
inline __attribute__((always_inline)) void fill_tables(const Grid& grid, const Block& block, Tables& tables) {
  const int columns = grid.form.columns / 2;
  for (int half = 0; half < 2; ++half) {
    Floats *plain = tables.plain[half], *turned = tables.turned[half];
    plain[0] = Floats{};
    turned[0] = Floats{} + kInfinity;
    for (int k = 0, size = 1; k < columns; ++k, size *= grid.levels) {
      const Floats weight = block.weight[half * columns + k];
      const Floats slope = block.twice_inverse * weight * block.x[half * columns + k];
      for (int level = grid.levels - 1; level >= 0; --level) {
        const float g = grid.level[level];
        const Floats square = weight * (g * g), product = slope * g;
        const Floats cost = square - product, cost_turned = square + product;
        for (int i = 0; i < size; ++i) {  // level 0 last: it takes the place of what the others read
          if constexpr (Turned) {
            const Floats before = turned[i] + cost, here = plain[i] + cost_turned;
            turned[size * level + i] = before < here ? before : here;
          }
          plain[size * level + i] = plain[i] + cost;
        }
      }
    }
  }
}

struct Nearest {
  Floats cost;
  Ints point;
};

template <bool Turned>
inline __attribute__((always_inline)) void find_nearest(const Grid& grid, const Tables& tables, Nearest& found) {
  Floats least = Floats{} + kInfinity;
  Ints point = {}, number = {};
  const std::uint8_t *first = grid.first.data(), *second = grid.second.data();
  for (int p = 0; p < grid.count; ++p, number += 1) {
    Floats cost = tables.plain[0][first[p]] + tables.plain[1][second[p]];
    if constexpr (Turned) {
      const Floats one = tables.turned[0][first[p]] + tables.plain[1][second[p]];
      const Floats other = tables.plain[0][first[p]] + tables.turned[1][second[p]];
      cost = one < other ? one : other;
    }
    const Ints nearer = cost < least;
    least = nearer ? cost : least;
    point = nearer ? number : point;
  }
  found.cost = least;
  found.point = point;
}

// Points of x are numbered through: those of a group and candidate, of the next candidate, of the next group.
struct Range {
  std::int64_t first, end;
};

inline __attribute__((always_inline)) void search(const Grid& grid, const GridGroups& groups, const GridChoice& choice, Range range) {
  const int columns = grid.form.columns, of_group = grid.form.group / columns, of_octet = kMostColumns / columns;
  Block block;
  Tables tables;
  Nearest plain, turned;
  for (std::int64_t begin = range.first; begin < range.end; begin += kPoints) {
    unsigned negative[kPoints];
    const int count = static_cast<int>(std::min<std::int64_t>(kPoints, range.end - begin));
    for (int lane = 0; lane < kPoints; ++lane) {
      const std::int64_t at = begin + std::min(lane, count - 1), job = at / of_group, group = job / groups.candidates;
      const std::int64_t offset = group * grid.form.group + at % of_group * columns;
      const float scale = groups.scales[job];
      block.twice_inverse[lane] = scale > 0 ? 2 / scale : 0;
      negative[lane] = 0;
      for (int k = 0; k < columns; ++k) {
        const float x = groups.x[offset + k];
        negative[lane] |= static_cast<unsigned>(grid.form.has_signs && std::signbit(x)) << k;
        block.x[k][lane] = grid.form.has_signs ? std::fabs(x) : x;
        block.weight[k][lane] = groups.weight[offset + k];
      }
    }
    if (grid.form.even_signs) {
      fill_tables<true>(grid, block, tables);
      find_nearest<true>(grid, tables, turned);
    } else {
      fill_tables<false>(grid, block, tables);
    }
    find_nearest<false>(grid, tables, plain);
    for (int lane = 0; lane < count; lane += of_octet) {
      int odd = -1;  // the lane of which a sign is turned
      unsigned parity = 0;
      for (int i = lane; i < lane + of_octet; ++i) parity ^= negative[i];
      if (grid.form.even_signs && __builtin_popcount(parity) % 2 == 1) {
        odd = lane;
        for (int i = lane + 1; i < lane + of_octet; ++i)
          if (turned.cost[i] - plain.cost[i] < turned.cost[odd] - plain.cost[odd]) odd = i;
      }
      for (int i = lane; i < lane + of_octet; ++i) {
        const std::int64_t at = begin + i, job = at / of_group;
        const int point = i == odd ? turned.point[i] : plain.point[i];
        const float* numbers = grid.numbers.data() + point * columns;
        float products[kMostColumns], match = 0, norm = 0;
        for (int k = 0; k < columns; ++k) {
          const float weighted = block.weight[k][i] * numbers[k];
          products[k] = weighted * block.x[k][i];
          match += products[k];
          norm += weighted * numbers[k];
        }
        if (i == odd) {
          const auto turn = std::min_element(products, products + columns) - products;
          match -= 2 * products[turn];
          negative[i] ^= 1u << turn;
        }
        choice.match[job] += match;
        choice.norm[job] += norm;
        choice.points[at] = static_cast<std::uint16_t>(point);
        if (grid.form.has_signs)
          choice.signs[at / of_octet] = static_cast<std::uint8_t>(choice.signs[at / of_octet] | negative[i] << at % of_octet * columns);
      }
    }
  }
}

using Search = void (*)(const Grid&, const GridGroups&, const GridChoice&, Range);
void search_anywhere(const Grid& grid, const GridGroups& groups, const GridChoice& choice, Range range) {
  search(grid, groups, choice, range);
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) void search_avx2(const Grid& grid, const GridGroups& groups, const GridChoice& choice, Range range) {
  search(grid, groups, choice, range);
}
__attribute__((target("avx512f"))) void search_avx512(const Grid& grid, const GridGroups& groups, const GridChoice& choice, Range range) {
  search(grid, groups, choice, range);
}
#endif
Search fastest_search() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return &search_avx512;
  if (__builtin_cpu_supports("avx2")) return &search_avx2;
#endif
  return &search_anywhere;
}

}  // namespace

GridForm grid_form(WeightType type) { return *table_of(type).search; }

void search_grid(WeightType type, float shift, const GridGroups& groups, const GridChoice& choice, int threads) {
  const Grid grid = grid_of(type, shift);
  const std::int64_t jobs = groups.groups * groups.candidates, points = jobs * (grid.form.group / grid.form.columns);
  std::fill_n(choice.match, jobs, 0.0f);
  std::fill_n(choice.norm, jobs, 0.0f);
  std::fill_n(choice.signs, jobs * grid.form.group / 8, std::uint8_t{0});
  const Search search = fastest_search();
  const std::int64_t blocks = (points + kPoints - 1) / kPoints, each = (blocks + threads - 1) / threads;  // a group is in one block
  std::vector<std::thread> others;
  others.reserve(static_cast<std::size_t>(threads));
  for (std::int64_t first = each; first < blocks; first += each) {
    const Range range = {first * kPoints, std::min(points, (first + each) * kPoints)};
    try {
      others.emplace_back(search, std::cref(grid), std::cref(groups), std::cref(choice), range);
    } catch (const std::system_error&) {  // no further thread
      search(grid, groups, choice, range);
    }
  }
  search(grid, groups, choice, {0, std::min(points, each * kPoints)});
  for (std::thread& other : others) other.join();
}

}  // namespace moegraft
