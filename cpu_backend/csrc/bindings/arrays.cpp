#include <algorithm>
#include <cstdio>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace moegraft {
namespace {

// The parts of DLPack's C structures, version 1 (https://dmlc.github.io/dlpack/latest/c_api.html), that are read here.
namespace dlpack {

constexpr int kCpu = 1;
constexpr int kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6;

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t dims;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeApi* previous;  // an API of an older major version
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // a view that owns nothing
  void* current_work_stream;
};

}  // namespace dlpack

using TensorFromObject = int (*)(void* object, dlpack::Tensor* out);

TensorFromObject exporter_of(PyTypeObject* type) {
  const py::object capsule = py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  constexpr const char* kName = "dlpack_exchange_api";
  if (!PyCapsule_IsValid(capsule.ptr(), kName)) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  while (api != nullptr && api->major != 1) api = api->previous;
  return api != nullptr ? api->tensor_from_object : nullptr;
}

// Looked up once per type, as DLPack allows, and guarded by the GIL. Types stay alive, so that an address identifies one type.
TensorFromObject cached_exporter(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type;
    TensorFromObject function;
  };
  static std::vector<Known> all;
  for (const Known& known : all)
    if (known.type == type) return known.function;
  const TensorFromObject function = exporter_of(type);
  if (function != nullptr) {
    Py_INCREF(type);
    all.push_back({type, function});
  }
  return function;
}

bool is_dtype(const py::array& array, char kind, py::ssize_t bytes) {
  return array.dtype().kind() == kind && array.itemsize() == bytes && array.dtype().byteorder() != '>';
}

std::string dtype_text(const py::array& array) { return py::str(array.dtype()).cast<std::string>(); }

}  // namespace

void raise_value_error(const std::string& message) { throw py::value_error(message); }

std::string shape_text(const py::array& array) {
  std::string text = "(";
  for (py::ssize_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + (array.ndim() == 1 ? ",)" : ")");
}

void raise_shape_error(const py::array& array, const char* name, const std::string& expected) {
  raise_value_error(std::string(name) + ": expected shape " + expected + ", found " + shape_text(array));
}

void require_layout(const py::array& array, const char* name, py::ssize_t dims) {
  if (array.ndim() != dims)
    raise_value_error(std::string(name) + ": expected " + std::to_string(dims) + " dimensions, found shape " + shape_text(array));
  if (!(array.flags() & py::array::c_style)) raise_value_error(std::string(name) + " is not C-contiguous; pass a contiguous copy");
}

void require_dtype(const py::array& array, const char* name, char kind, py::ssize_t bytes, const char* expected) {
  if (!is_dtype(array, kind, bytes))
    throw py::type_error(std::string(name) + ": expected dtype " + expected + ", found " + dtype_text(array));
}

std::int64_t* count_values(const py::object& object) {
  if (object.is_none()) return nullptr;
  const auto array = py::cast<py::array>(object);
  require_layout(array, "neuron_counts", 1);
  require_dtype(array, "neuron_counts", 'i', 8, "int64");
  if (array.shape(0) != 2) raise_shape_error(array, "neuron_counts", "(2,) for the active neurons and all");
  if (!array.writeable()) raise_value_error("neuron_counts is read-only");
  return static_cast<std::int64_t*>(const_cast<void*>(array.data()));
}

WeightType float_type_of(const py::array& array, const char* name) {
  if (is_dtype(array, 'f', 4)) return WeightType::kFloat32;
  if (is_dtype(array, 'f', 2)) return WeightType::kFloat16;
  if (is_dtype(array, 'u', 2)) return WeightType::kBFloat16;
  throw py::type_error(std::string(name) + ": expected dtype float32, float16 or bfloat16 (as uint16), found " + dtype_text(array));
}

ActivationType activation_type_of(const py::array& array, const char* name) {
  switch (float_type_of(array, name)) {
    case WeightType::kFloat32: return ActivationType::kFloat32;
    case WeightType::kFloat16: return ActivationType::kFloat16;
    default: return ActivationType::kBFloat16;
  }
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

TensorView::TensorView(py::handle object, const char* name, bool any_strides) : name_(name) {
  dlpack::Tensor tensor{};
  if (const TensorFromObject tensor_from_object = cached_exporter(Py_TYPE(object.ptr()))) {
    if (tensor_from_object(object.ptr(), &tensor) != 0) throw py::error_already_set();
    if (tensor.device_type != dlpack::kCpu)
      raise_value_error(std::string(name) + ": expected a tensor on the CPU, found one on another device");
    data_ = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    type_code_ = tensor.type_code;
    type_bits_ = tensor.type_bits;
    dims_ = tensor.dims;
  } else if (py::isinstance<py::array>(object)) {
    const auto array = py::reinterpret_borrow<py::array>(object);
    const char kind = array.dtype().kind();
    data_ = static_cast<std::byte*>(const_cast<void*>(array.data()));
    type_code_ = kind == 'f' ? dlpack::kFloat : kind == 'i' ? dlpack::kInt : kind == 'u' ? dlpack::kUInt : dlpack::kBool;
    type_bits_ = array.dtype().byteorder() == '>' ? 0 : static_cast<int>(array.itemsize()) * 8;
    dims_ = static_cast<int>(array.ndim());
    writable_ = array.writeable();
    if (!(array.flags() & py::array::c_style)) raise_value_error(std::string(name) + " is not C-contiguous; pass a contiguous copy");
    std::int64_t stride = 1;
    for (int dim = std::min(dims_, kMaxDims) - 1; dim >= 0; stride *= array.shape(dim--)) {
      shape_[static_cast<std::size_t>(dim)] = array.shape(dim);
      strides_[static_cast<std::size_t>(dim)] = stride;
    }
  } else {
    throw py::type_error(std::string(name) + ": expected a torch.Tensor or numpy.ndarray, found " + Py_TYPE(object.ptr())->tp_name);
  }
  if (dims_ > kMaxDims)
    raise_value_error(std::string(name) + ": expected at most " + std::to_string(kMaxDims) + " dimensions, found " + std::to_string(dims_));
  if (tensor.shape == nullptr) return;
  bool contiguous = true, empty = false;
  std::int64_t stride = 1;
  for (int dim = dims_ - 1; dim >= 0; --dim) {
    const std::int64_t size = tensor.shape[dim], own = tensor.strides == nullptr ? stride : tensor.strides[dim];
    strides_[static_cast<std::size_t>(dim)] = own;
    contiguous = contiguous && (size == 1 || own == stride);
    empty = empty || size == 0;
    stride *= size;
    shape_[static_cast<std::size_t>(dim)] = size;
  }
  if (!contiguous && !empty && !any_strides) raise_value_error(std::string(name) + " is not C-contiguous; pass a contiguous copy");
}

ActivationType TensorView::float_type() const {
  if (type_code_ == dlpack::kFloat && type_bits_ == 32) return ActivationType::kFloat32;
  if (type_code_ == dlpack::kFloat && type_bits_ == 16) return ActivationType::kFloat16;
  if ((type_code_ == dlpack::kBFloat || type_code_ == dlpack::kUInt) && type_bits_ == 16) return ActivationType::kBFloat16;
  raise_type_error("float32, float16 or bfloat16 (in NumPy its bits as uint16)");
}

void TensorView::require_float(ActivationType type) const {
  static constexpr const char* kNames[] = {"float32", "float16", "bfloat16"};
  if (float_type() != type) raise_type_error(kNames[static_cast<int>(type)]);
}

void TensorView::require_int64() const {
  if (type_code_ != dlpack::kInt || type_bits_ != 64) raise_type_error("int64");
}

bool TensorView::is_int8() const { return type_code_ == dlpack::kInt && type_bits_ == 8; }

void TensorView::require_writable() const {
  if (!writable_) raise_value_error(std::string(name_) + " is read-only");
}

std::int64_t TensorView::rows(std::int64_t cols) const {
  if (dims_ < 1 || shape(dims_ - 1) != cols) raise_shape_error("(..., " + std::to_string(cols) + ")");
  std::int64_t rows = 1;
  for (int dim = 0; dim + 1 < dims_; ++dim) rows *= shape(dim);
  return rows;
}

void TensorView::require_shape(std::initializer_list<std::int64_t> expected) const {
  int dim = 0;
  bool same = static_cast<int>(expected.size()) == dims_;
  for (const std::int64_t size : expected) same = same && shape(dim++) == size;
  if (same) return;
  std::string text;
  for (const std::int64_t size : expected) text += (text.empty() ? "(" : ", ") + std::to_string(size);
  raise_shape_error(text + (expected.size() == 1 ? ",)" : ")"));
}

void TensorView::require_rows_of(const TensorView& like, std::int64_t cols) const {
  bool same = dims_ == like.dims_ && shape(dims_ - 1) == cols;
  for (int dim = 0; same && dim + 1 < dims_; ++dim) same = shape(dim) == like.shape(dim);
  if (same) return;
  std::string expected = "(";
  for (int dim = 0; dim + 1 < like.dims_; ++dim) expected += std::to_string(like.shape(dim)) + ", ";
  raise_shape_error(expected + std::to_string(cols) + (like.dims_ == 1 ? ",)" : ")"));
}

std::string TensorView::shape_text() const {
  std::string text = "(";
  for (int dim = 0; dim < dims_; ++dim) text += (dim ? ", " : "") + std::to_string(shape(dim));
  return text + (dims_ == 1 ? ",)" : ")");
}

void TensorView::raise_shape_error(const std::string& expected) const {
  raise_value_error(std::string(name_) + ": expected shape " + expected + ", found " + shape_text());
}

void TensorView::raise_type_error(const char* expected) const {
  static constexpr const char* kCodes[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string code = type_code_ >= 0 && type_code_ <= dlpack::kBool ? kCodes[type_code_] : "unknown";
  throw py::type_error(std::string(name_) + ": expected dtype " + expected + ", found " + code + std::to_string(type_bits_));
}

}  // namespace moegraft
