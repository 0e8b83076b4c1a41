// The Python module. Only the files of this folder know Python and pybind11.
//
// A binding checks shape, dtype, order and device of its arguments, then releases the GIL and calls C++; only the planner keeps the GIL,
// for microseconds. The calling thread computes in forward(), linear(), attention(), norm() and route(). submit() and host calls run on the
// threads that core/runtime.h describes, and keep their arguments alive until wait() or as long as the HostCall exists.
//
// Arguments are NumPy arrays, with bfloat16 as its bits in uint16, or torch tensors for the small calls of a decode step (TensorView).
// Addresses are not passed, except for the two values of host_function(), which CUDA receives as a C function and its argument.
//
// functions.h: how functions are bound; module.cpp: the runtime and the description of the machine; weights.cpp: packed weights and their specs; ops.cpp: norms and routers;
// attention.cpp: attention; scheduler.cpp: the planner.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "core/runtime.h"
#include "core/types.h"
#include "experts/packed_weights.h"
#include "ops/norm.h"
#include "ops/router.h"

namespace moegraft {

[[noreturn]] void raise_value_error(const std::string& message);
std::string shape_text(const pybind11::array& array);
std::string number_text(double value);
// "NAME: expected shape EXPECTED, found ..."; `expected` is a shape in words, such as "(tokens, 64)".
[[noreturn]] void raise_shape_error(const pybind11::array& array, const char* name, const std::string& expected);
void require_layout(const pybind11::array& array, const char* name, pybind11::ssize_t dims);
void require_dtype(const pybind11::array& array, const char* name, char kind, pybind11::ssize_t bytes, const char* expected);
std::int64_t* count_values(const pybind11::object& neuron_counts);  // (2,) int64, or None: null
WeightType float_type_of(const pybind11::array& array, const char* name);  // uint16 is bfloat16
ActivationType activation_type_of(const pybind11::array& array, const char* name);

// A torch.Tensor or numpy.ndarray argument during one call. Tensors are read through DLPack's C exchange interface of PyTorch 2.11 and
// newer, which takes 0.1 microseconds where a view as a NumPy array takes 2.
class TensorView {
 public:
  // Throws TypeError for any other object, ValueError for a tensor that is on another device than the CPU, is not C-contiguous (unless
  // `any_strides`, which arrays do not have) or has more than kMaxDims dimensions.
  TensorView(pybind11::handle object, const char* name, bool any_strides = false);

  std::byte* data() const { return data_; }
  int dims() const { return dims_; }
  std::int64_t shape(int dim) const { return shape_[static_cast<std::size_t>(dim)]; }
  std::int64_t stride(int dim) const { return strides_[static_cast<std::size_t>(dim)]; }  // in elements
  ActivationType float_type() const;  // of float32, float16 and bfloat16 (also as uint16); throws TypeError
  void require_float(ActivationType type) const;  // throws TypeError
  void require_int64() const;  // throws TypeError
  bool is_int8() const;
  void require_writable() const;  // throws ValueError
  std::int64_t rows(std::int64_t cols) const;  // of shape (..., cols); throws ValueError
  void require_shape(std::initializer_list<std::int64_t> expected) const;  // throws ValueError
  // The shape of `like` with `cols` in its last dimension. Throws ValueError.
  void require_rows_of(const TensorView& like, std::int64_t cols) const;

 private:
  static constexpr int kMaxDims = 6;

  [[noreturn]] void raise_shape_error(const std::string& expected) const;
  [[noreturn]] void raise_type_error(const char* expected) const;
  std::string shape_text() const;

  const char* name_;
  std::byte* data_ = nullptr;
  int type_code_ = 0;  // DLPack's
  int type_bits_ = 0;
  int dims_ = 0;
  bool writable_ = true;
  std::array<std::int64_t, kMaxDims> shape_{}, strides_{};
};

// Keeps the array of an external buffer alive as long as the experts.
struct PyExperts {
  PyExperts(const ExpertsShape& shape, const GateSpec& gate, const std::string& weight_type, const pybind11::object& buffer_or_none,
            bool sparse);
  pybind11::object frames;  // a PyFrames, which keeps the routers' weights: longer than the experts, whose frames read them
  std::unique_ptr<PackedExperts> experts;
  pybind11::object buffer;
};

struct PyFrames {
  explicit PyFrames(int readers) : frames(std::make_shared<ExpertFrames>(readers)) {}
  ~PyFrames() {
    pybind11::gil_scoped_release release;  // joining threads must not stop Python
    frames.reset();
  }
  std::shared_ptr<ExpertFrames> frames;
  pybind11::list routers;
};

struct PyPolicy {
  std::shared_ptr<CachePolicy> policy;
};

struct PyNorm {
  PyNorm(const std::string& type_name, int cols_of_row, float epsilon, float weight_offset, bool rounds_first);
  void set_gate(const std::string& function, int group, bool first, bool wide);
  ActivationType type;
  int cols;
  NormForm form;
  NormGate gating;
};

// The keywords of RouterSpec.
struct RouterOptions {
  std::string type, logits_type, weights_type;
  bool rounds_logits;
  std::string score;
  bool normalise;
  float scale;
  int groups, kept_groups;
  std::string group_score;
  pybind11::object choice_bias, logit_bias;  // arrays or None
};

// `selection` points into `choice_bias`, so a router is never copied.
struct PyRouter {
  PyRouter(int hidden_size, int experts, int top_k, const RouterOptions& options);
  PyRouter(const PyRouter&) = delete;
  PyRouter& operator=(const PyRouter&) = delete;
  int hidden;
  ActivationType type, logits_type, weights_type;
  bool rounds_logits;
  std::vector<float> choice_bias, logit_bias;
  Selection selection;
};

// The arguments of Runtime.attention; the arrays are views of PyTorch's tensors with their strides.
struct AttentionCall {
  pybind11::array query, key, value, out;
  pybind11::object mask, sinks, key_tail;
  float scale;
  float softcap;
  bool causal;
};

// The arguments of Runtime.paged_attention; pool, table and held are read and written in place, as torch tensors.
struct PagedAttentionCall {
  pybind11::array query, key, value, out;
  pybind11::handle pool, table, held;
  pybind11::object sinks;
  int page_tokens;
  std::int64_t key_start, value_start;
  int window;
  bool latent;
  float scale;
  float softcap;
};

// These check their arguments, release the GIL and compute.
void attention(Runtime& runtime, const AttentionCall& call);
void paged_attention(Runtime& runtime, const PagedAttentionCall& call);
void matmul(Runtime& runtime, const pybind11::array& a, const pybind11::array& b, const pybind11::array& out);
void linear(Runtime& runtime, const PackedLinear& linear, pybind11::handle x, pybind11::handle out);
void linear_gradient(Runtime& runtime, const PackedLinear& linear, pybind11::handle gradient, pybind11::handle out);

// The arguments of Runtime.experts_gradient.
struct ExpertsGradientCall {
  pybind11::handle hidden_states, top_k_index, top_k_weights, gradient, hidden_gradient, weight_gradients;
};
// Those of low-rank adapters, each a tensor or None.
struct AdapterCall {
  pybind11::handle gate_up, activation_gradients, activations, gate_up_gradients;
  AdapterTerms checked(const ExpertsShape& shape, std::int64_t tokens, std::int64_t top_k) const;
};
void experts_gradient(Runtime& runtime, const PackedExperts& experts, const ExpertsGradientCall& call, const AdapterCall& adapters);
void norm(Runtime& runtime, const PyNorm& norm, pybind11::handle x, pybind11::handle weight_or_none, pybind11::handle out,
          pybind11::handle gate_or_none);

// `operands` are tensors or None, as RecurrentJob takes them; `past` are tensors.
void recurrent(Runtime& runtime, const std::string& name, const pybind11::sequence& operands, const std::vector<double>& numbers,
               const pybind11::sequence& past);

struct RouterCall {
  pybind11::handle x, weight, logits, weights, index;
};
void route(Runtime& runtime, const PyRouter& router, const RouterCall& call);

void bind_specs(pybind11::module_& module);  // GateSpec, ExpertsShape
void bind_weights(pybind11::module_& module);  // PackedExperts, PackedLinear, CachePolicy, ExpertFrames
void bind_ops(pybind11::module_& module);  // NormSpec, RouterSpec
void bind_scheduler(pybind11::module_& module);  // Planner, check_problem
void bind_program(pybind11::module_& module);  // Program, Pace
Runtime& runtime_of(const pybind11::object& py_runtime);

}  // namespace moegraft
