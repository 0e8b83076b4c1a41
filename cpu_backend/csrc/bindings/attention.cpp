#include "bindings/bindings.h"

#include <string>
#include <utility>

namespace py = pybind11;

namespace moegraft {
namespace {

void require_columns(const py::array& array, const char* name) {
  if (array.ndim() != 4) raise_value_error(std::string(name) + ": expected 4 dimensions, found shape " + shape_text(array));
  if (array.size() > 0 && array.shape(3) > 1 && array.strides(3) != array.itemsize())
    raise_value_error(std::string(name) + ": the last dimension is not contiguous");
  for (int i = 0; i < 3; ++i)
    if (array.strides(i) % array.itemsize() != 0) raise_value_error(std::string(name) + ": a stride is not a multiple of the element size");
}

HeadsView view_of(const py::array& array) {
  const auto size = static_cast<std::int64_t>(array.itemsize());
  return {static_cast<const std::byte*>(array.data()), array.strides(0) / size, array.strides(1) / size, array.strides(2) / size};
}

void require_shape(const py::array& array, const char* name, py::ssize_t batch, py::ssize_t heads, py::ssize_t rows) {
  if (array.shape(0) != batch || array.shape(1) != heads || array.shape(2) != rows)
    raise_shape_error(array, name, "(" + std::to_string(batch) + ", " + std::to_string(heads) + ", " + std::to_string(rows) + ", columns)");
}

MaskView mask_of(const AttentionCall& call, ActivationType type) {
  if (call.mask.is_none()) return {call.causal ? MaskKind::kCausal : MaskKind::kNone, nullptr, 0, 0, 0, 1};
  if (call.causal) raise_value_error("expected a mask or causal=True, found both");
  const auto mask = py::cast<py::array>(call.mask);
  require_columns(mask, "mask");
  const bool shown = mask.dtype().kind() == 'b';
  if (!shown && activation_type_of(mask, "mask") != type) throw py::type_error("mask: expected dtype bool or that of query");
  if (mask.shape(2) != call.query.shape(2) || mask.shape(3) != call.key.shape(2) ||
      (mask.shape(0) != 1 && mask.shape(0) != call.query.shape(0)) || (mask.shape(1) != 1 && mask.shape(1) != call.query.shape(1)))
    raise_shape_error(mask, "mask",
                      "(1 or batch, 1 or heads, " + std::to_string(call.query.shape(2)) + ", " + std::to_string(call.key.shape(2)) + ")");
  const HeadsView view = view_of(mask);
  return {shown ? MaskKind::kBool : MaskKind::kAdded,
          view.data,
          mask.shape(0) == 1 ? 0 : view.batch_stride,
          view.head_stride,
          view.row_stride,
          static_cast<int>(mask.shape(1))};
}

const float* sinks_of(const py::object& given, py::ssize_t heads) {
  if (given.is_none()) return nullptr;
  const auto sinks = py::cast<py::array>(given);
  if (sinks.ndim() != 1 || sinks.shape(0) != heads || sinks.dtype().kind() != 'f' || sinks.itemsize() != 4 ||
      !(sinks.flags() & py::array::c_style))
    raise_value_error("sinks must be contiguous float32 of shape (" + std::to_string(heads) + ",)");
  return static_cast<const float*>(sinks.data());
}

}  // namespace

void attention(Runtime& runtime, const AttentionCall& call) {
  require_columns(call.query, "query");
  require_columns(call.key, "key");
  require_columns(call.value, "value");
  require_columns(call.out, "out");
  const ActivationType type = activation_type_of(call.query, "query");
  if (activation_type_of(call.key, "key") != type || activation_type_of(call.value, "value") != type ||
      activation_type_of(call.out, "out") != type)
    throw py::type_error("query, key, value and out differ in dtype");
  const py::ssize_t batch = call.query.shape(0), heads = call.query.shape(1), queries = call.query.shape(2);
  const py::ssize_t kv_heads = call.key.shape(1), keys = call.key.shape(2);
  if (kv_heads < 1 || heads % kv_heads != 0)
    raise_value_error(std::to_string(heads) + " query heads are not a multiple of " + std::to_string(kv_heads) + " key heads");
  require_shape(call.key, "key", batch, kv_heads, keys);
  require_shape(call.value, "value", batch, kv_heads, keys);
  require_shape(call.out, "out", batch, queries, heads);
  const auto tail = call.key_tail.is_none() ? py::array() : py::cast<py::array>(call.key_tail);
  if (!call.key_tail.is_none()) {
    require_columns(tail, "key_tail");
    if (activation_type_of(tail, "key_tail") != type) throw py::type_error("query and key_tail differ in dtype");
    require_shape(tail, "key_tail", batch, kv_heads, keys);
  }
  const py::ssize_t tail_dim = call.key_tail.is_none() ? 0 : tail.shape(3);
  if (call.key.shape(3) + tail_dim != call.query.shape(3))
    raise_value_error("key and query differ in columns: " + shape_text(call.key) + " and " + shape_text(call.query));
  if (call.out.shape(3) != call.value.shape(3))
    raise_value_error("out and value differ in columns: " + shape_text(call.out) + " and " + shape_text(call.value));
  if (!(call.out.flags() & py::array::c_style) || !call.out.writeable()) raise_value_error("out must be C-contiguous and writeable");
  if (call.causal && queries > keys) raise_value_error("causal attention needs at least as many keys as queries");
  require_numbers(call.scale, call.softcap);
  const AttentionArgs args = {type,
                              view_of(call.query),
                              view_of(call.key),
                              view_of(call.value),
                              static_cast<std::byte*>(const_cast<void*>(call.out.data())),
                              mask_of(call, type),
                              sinks_of(call.sinks, heads),
                              static_cast<int>(batch),
                              static_cast<int>(heads),
                              static_cast<int>(kv_heads),
                              static_cast<int>(queries),
                              static_cast<int>(keys),
                              static_cast<int>(call.query.shape(3)),
                              static_cast<int>(call.value.shape(3)),
                              call.scale,
                              call.softcap,
                              static_cast<int>(tail_dim),
                              tail_dim == 0 ? HeadsView{} : view_of(tail)};
  py::gil_scoped_release release;
  runtime.attention(args);
}

void paged_attention(Runtime& runtime, const PagedAttentionCall& call) {
  const TensorView pool(call.pool, "pool"), table(call.table, "table"), held(call.held, "held");
  const ActivationType type = activation_type_of(call.query, "query");
  for (const auto& [array, name] : {std::pair{&call.query, "query"}, {&call.key, "key"}, {&call.value, "value"}, {&call.out, "out"}}) {
    require_columns(*array, name);
    if (activation_type_of(*array, name) != type) throw py::type_error("query, key, value and out differ in dtype");
  }
  const py::ssize_t batch = call.query.shape(0), heads = call.query.shape(1), queries = call.query.shape(2);
  const py::ssize_t kv_heads = call.key.shape(1), tail_dim = call.latent ? call.value.shape(3) : 0;
  const py::ssize_t value_dim = call.latent ? call.key.shape(3) : call.value.shape(3);
  if (kv_heads < 1 || heads % kv_heads != 0)
    raise_value_error(std::to_string(heads) + " query heads are not a multiple of " + std::to_string(kv_heads) + " key heads");
  require_shape(call.key, "key", batch, kv_heads, queries);
  require_shape(call.value, "value", batch, kv_heads, queries);
  require_shape(call.out, "out", batch, queries, heads);
  if (call.key.shape(3) + tail_dim != call.query.shape(3))
    raise_value_error("key and query differ in columns: " + shape_text(call.key) + " and " + shape_text(call.query));
  if (call.out.shape(3) != value_dim)
    raise_value_error("out and value differ in columns: " + shape_text(call.out) + " and " + shape_text(call.value));
  if (!(call.out.flags() & py::array::c_style) || !call.out.writeable()) raise_value_error("out must be C-contiguous and writeable");
  require_numbers(call.scale, call.softcap);
  const bool coded = pool.is_int8();
  if (!coded) pool.require_float(type);
  pool.require_writable();
  table.require_int64();
  held.require_int64();
  if (pool.dims() != 2 || table.dims() != 2 || held.dims() != 1 || table.shape(0) < batch || held.shape(0) < batch)
    raise_value_error("expected pool (pages, elements), and table (sequences, pages) and held (sequences,) of at least " +
                      std::to_string(batch) + " sequences");
  AttentionArgs args{};
  args.type = type;
  args.query = view_of(call.query);
  args.out = static_cast<std::byte*>(const_cast<void*>(call.out.data()));
  args.sinks = sinks_of(call.sinks, heads);
  args.batch = static_cast<int>(batch);
  args.heads = static_cast<int>(heads);
  args.kv_heads = static_cast<int>(kv_heads);
  args.queries = static_cast<int>(queries);
  args.dim = static_cast<int>(call.query.shape(3));
  args.value_dim = static_cast<int>(value_dim);
  args.scale = call.scale;
  args.softcap = call.softcap;
  args.tail_dim = static_cast<int>(tail_dim);
  args.pages = {reinterpret_cast<const std::int64_t*>(table.data()),
                reinterpret_cast<const std::int64_t*>(held.data()),
                table.shape(1),
                pool.shape(0),
                pool.shape(1),
                call.page_tokens,
                call.window,
                coded,
                view_of(call.key),
                view_of(call.value)};
  use_pages(args, pool.data(), {call.key_start, call.value_start}, call.latent);
  py::gil_scoped_release release;
  runtime.attention(args);
}

void matmul(Runtime& runtime, const py::array& a, const py::array& b, const py::array& out) {
  const auto matrix = [](const py::array& array, const char* name) {
    if (array.ndim() != 3) raise_value_error(std::string(name) + ": expected 3 dimensions, found shape " + shape_text(array));
    const auto size = static_cast<std::int64_t>(array.itemsize());
    for (int i = 0; i < 3; ++i)
      if (array.strides(i) % size != 0) raise_value_error(std::string(name) + ": a stride is not a multiple of the element size");
    return MatrixView{static_cast<std::byte*>(const_cast<void*>(array.data())), array.strides(0) / size, array.strides(1) / size,
                      array.strides(2) / size};
  };
  const ActivationType type = activation_type_of(a, "a");
  if (activation_type_of(b, "b") != type || activation_type_of(out, "out") != type) throw py::type_error("a, b and out differ in dtype");
  const MatmulArgs args = {type, matrix(a, "a"), matrix(b, "b"), matrix(out, "out"), out.shape(0), out.shape(1), a.shape(2), out.shape(2)};
  if (a.shape(0) != args.batch || b.shape(0) != args.batch || a.shape(1) != args.rows || b.shape(1) != args.inner ||
      b.shape(2) != args.cols)
    raise_value_error("a, b and out do not fit together: " + shape_text(a) + ", " + shape_text(b) + " and " + shape_text(out));
  if (!out.writeable()) raise_value_error("out must be writeable");
  args.check();
  py::gil_scoped_release release;
  runtime.matmul(args);
}

}  // namespace moegraft
