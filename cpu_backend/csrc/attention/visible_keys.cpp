#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "core/float_conversion.h"

namespace moegraft {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

const std::byte* mask_row(const AttentionArgs& args, int batch, int head, int query) {
  const MaskView& mask = args.mask;
  const std::ptrdiff_t size = mask.kind == MaskKind::kBool ? 1 : static_cast<std::ptrdiff_t>(element_bytes(args.type));
  return mask.data + size * (batch * mask.batch_stride + (mask.heads == 1 ? 0 : head) * mask.head_stride + query * mask.row_stride);
}

float added(ActivationType type, const std::byte* row, int key) {
  if (type == ActivationType::kFloat32) {
    float value;
    std::memcpy(&value, row + 4 * static_cast<std::ptrdiff_t>(key), sizeof value);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, row + 2 * static_cast<std::ptrdiff_t>(key), sizeof half);
  return type == ActivationType::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
}

// The lowest number of a type, which masks may contain instead of -infinity.
float lowest(ActivationType type) {
  switch (type) {
    case ActivationType::kFloat16: return -65504.0f;
    case ActivationType::kBFloat16: return float_from_bf16(0xff7f);
    default: return -std::numeric_limits<float>::max();
  }
}

VisibleKeys::Range range_of_bools(const std::byte* row, int keys) {
  const auto* first = static_cast<const std::byte*>(std::memchr(row, 1, static_cast<std::size_t>(keys)));
  if (first == nullptr) return {0, 0, true};
  int end = keys;
  while (row[end - 1] == std::byte{0}) --end;
  const int start = static_cast<int>(first - row);
  return {start, end, std::memchr(first, 0, static_cast<std::size_t>(end - start)) == nullptr};
}

VisibleKeys::Range range_of_added(ActivationType type, const std::byte* row, int keys) {
  const float hides = lowest(type);
  int first = 0, end = keys;
  while (first < end && added(type, row, first) <= hides) ++first;
  while (end > first && added(type, row, end - 1) <= hides) --end;
  bool whole = true;
  for (int key = first; whole && key < end; ++key) whole = added(type, row, key) == 0.0f;
  return {first, end, whole};
}

// Copies (batch, heads, queries, columns) to the pages of the tokens.
void append(const Kernels& kernels, const AttentionArgs& args, const HeadsView& from, const HeadsView& to, int columns) {
  const std::size_t bytes = element_bytes(args.type) * static_cast<std::size_t>(columns);
  std::vector<float> row(args.coded() ? static_cast<std::size_t>(columns) : 0);
  for (int batch = 0; batch < args.batch; ++batch)
    for (int head = 0; head < args.kv_heads; ++head)
      for (int query = 0; query < args.queries; ++query) {
        const int token = static_cast<int>(args.pages.held[batch]) + query;
        const std::byte* source = row_of(from, args.type, batch, head, query);
        auto* target = const_cast<std::byte*>(token_of(args, to, batch, head, token));
        if (!args.coded()) {
          std::memcpy(target, source, bytes);
          continue;
        }
        kernels.widen(args.type, source, row.data(), columns);
        auto* scale = const_cast<float*>(scales_of(args, to, batch, head, token));
        *scale = kernels.attention.encode(row.data(), columns, reinterpret_cast<std::int8_t*>(target)).scale;
      }
}

}  // namespace

void require_numbers(float scale, float softcap) {
  if (!(scale > 0.0f) || !std::isfinite(scale)) throw std::invalid_argument("scale must be positive");
  if (!(softcap >= 0.0f)) throw std::invalid_argument("softcap must be at least 0, which disables it");
}

void use_pages(AttentionArgs& args, std::byte* pool, const PageStarts& starts, bool latent) {
  const Pages& pages = args.pages;
  const auto refuse = [](const char* message) { throw std::invalid_argument(message); };
  const int key_columns = args.dim - args.tail_dim, value_columns = latent ? args.tail_dim : args.value_dim;
  const int scale_bytes = pages.coded ? static_cast<int>(sizeof(float)) : 0;  // of a row
  if (pages.page_tokens < 1 || (pages.page_tokens & (pages.page_tokens - 1)) != 0) refuse("the tokens of a page are no power of two");
  if (pages.window < 0) refuse("a window is negative");
  if (pages.coded && (pages.page_elements % scale_bytes != 0 || starts.keys % scale_bytes != 0 || starts.values % scale_bytes != 0 ||
                      pages.page_tokens % scale_bytes != 0))
    refuse("the scales of a page of codes are not aligned");
  for (const auto& [start, columns] : {std::pair{starts.keys, key_columns}, std::pair{starts.values, value_columns}})
    if (start < 0 || start + std::int64_t{args.kv_heads} * pages.page_tokens * (columns + scale_bytes) > pages.page_elements)
      refuse("the keys or values of a layer leave their page");
  args.keys = 0;
  for (int batch = 0; batch < args.batch; ++batch) {
    const std::int64_t held = pages.held[batch], end = held + args.queries;
    if (held < 0 || end > pages.table_width * pages.page_tokens) refuse("a sequence has more tokens than its table of pages has room for");
    for (std::int64_t place = 0; place * pages.page_tokens < end; ++place) {
      const std::int64_t page = pages.table[batch * pages.table_width + place];
      if (page < 0 || page >= pages.count) refuse("a table of pages names a page that is not in the pool");
    }
    args.keys = std::max(args.keys, static_cast<int>(end));
  }
  const auto part = [&](std::int64_t start, int columns) {
    return HeadsView{pool + args.cache_bytes() * start, pages.page_elements, std::int64_t{pages.page_tokens} * (columns + scale_bytes),
                     columns};
  };
  args.key = part(starts.keys, key_columns);
  args.value = latent ? args.key : part(starts.values, value_columns);
  if (latent) args.key_tail = part(starts.values, value_columns);
  args.mask = {MaskKind::kNone, nullptr, 0, 0, 0, 1};
}

void append_to_pages(const Kernels& kernels, const AttentionArgs& args) {
  append(kernels, args, args.pages.new_keys, args.key, args.dim - args.tail_dim);
  if (args.tail_dim > 0) append(kernels, args, args.pages.new_values, args.key_tail, args.tail_dim);
  else append(kernels, args, args.pages.new_values, args.value, args.value_dim);
}

void VisibleKeys::find(const AttentionArgs& args) {
  const MaskKind kind = args.mask.kind;
  heads_ = kind == MaskKind::kBool || kind == MaskKind::kAdded ? args.mask.heads : 1;
  queries_ = args.queries;
  ranges_.clear();
  for (int batch = 0; batch < args.batch; ++batch)
    for (int head = 0; head < heads_; ++head)
      for (int query = 0; query < queries_; ++query) {
        if (args.pages.table) {
          const int end = static_cast<int>(args.pages.held[batch]) + query + 1;
          ranges_.push_back({args.pages.window > 0 ? std::max(0, end - args.pages.window) : 0, end, true});
          continue;
        }
        switch (kind) {
          case MaskKind::kNone: ranges_.push_back({0, args.keys, true}); break;
          case MaskKind::kCausal: ranges_.push_back({0, args.keys - args.queries + query + 1, true}); break;
          case MaskKind::kBool: ranges_.push_back(range_of_bools(mask_row(args, batch, head, query), args.keys)); break;
          case MaskKind::kAdded: ranges_.push_back(range_of_added(args.type, mask_row(args, batch, head, query), args.keys)); break;
        }
      }
}

KeySpan VisibleKeys::seen_by(const AttentionArgs& args, int batch, int kv_head, int first_row, int end_row) const {
  int first = args.keys, end = 0;
  for (int row = first_row; row < end_row; ++row) {
    const Range& range = of(query_row(args, batch, kv_head, row));
    if (range.first >= range.end) continue;
    first = std::min(first, range.first);
    end = std::max(end, range.end);
  }
  return {first, std::max(0, end - first)};
}

float VisibleKeys::softmax(const AttentionKernels& kernels, const AttentionArgs& args, const QueryRow& row, KeySpan keys,
                           SoftmaxArgs& softmax) const {
  const Range& range = of(row);
  softmax.scale = args.scale;
  softmax.softcap = args.softcap;
  // Masks apply after the scale and the softcap. Where they only hide keys, the scale may apply later: it leaves -infinity as it is.
  if (!range.whole || args.softcap > 0.0f) {
    for (int i = 0; i < keys.count; ++i) {
      float& score = *softmax.at(i);
      score *= args.scale;
      if (args.softcap > 0.0f) score = args.softcap * std::tanh(score / args.softcap);
    }
    softmax.scale = 1.0f;
    softmax.softcap = 0.0f;
  }
  for (int i = keys.count; i < softmax.count; ++i) *softmax.at(i) = kHidden;
  hide(args, row, keys, softmax);
  return kernels.softmax(softmax);
}

void VisibleKeys::hide(const AttentionArgs& args, const QueryRow& row, KeySpan keys, const SoftmaxArgs& softmax) const {
  const Range& range = of(row);
  for (int i = 0; i < keys.count && keys.first + i < range.first; ++i) *softmax.at(i) = kHidden;
  for (int i = keys.count - 1; i >= 0 && keys.first + i >= range.end; --i) *softmax.at(i) = kHidden;
  if (range.whole) return;
  const std::byte* mask = mask_row(args, row.batch, row.head, row.query);
  const float hides = lowest(args.type);
  for (int i = std::max(0, range.first - keys.first); i < std::min(keys.count, range.end - keys.first); ++i) {
    const int key = keys.first + i;
    float& score = *softmax.at(i);
    if (args.mask.kind == MaskKind::kBool) {
      if (mask[key] == std::byte{0}) score = kHidden;
    } else {
      const float value = added(args.type, mask, key);
      score = value <= hides ? kHidden : score + value;
    }
  }
}

}  // namespace moegraft
