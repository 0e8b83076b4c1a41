#include <cmath>
#include <string>

#include "bindings/bindings.h"
#include "bindings/functions.h"
#include "core/names.h"
#include "ops/grid_search.h"

namespace py = pybind11;

namespace moegraft {
namespace {

GateSpec make_gate(const std::string& activation, double alpha, double gate_limit, double act_limit, double up_limit, double up_offset) {
  const GateSpec spec = {parse_activation(activation), alpha, gate_limit, act_limit, up_limit, up_offset};
  if (!std::isfinite(alpha) || !std::isfinite(up_offset)) raise_value_error("GateSpec: alpha and up_offset must be finite");
  if (std::isnan(gate_limit) || std::isnan(act_limit) || !(up_limit >= 0.0))
    raise_value_error("GateSpec: limits must be numbers, and up_limit at least 0");
  return spec;
}

py::tuple gate_fields(const GateSpec& spec) {
  return py::make_tuple(name_of(spec.activation), spec.alpha, spec.gate_limit, spec.act_limit, spec.up_limit, spec.up_offset);
}

py::tuple shape_fields(const ExpertsShape& shape) {
  return py::make_tuple(shape.num_experts, shape.hidden, shape.intermediate, shape.gated, shape.bias);
}

}  // namespace

void bind_specs(py::module_& module) {
  Binder(py::class_<GateSpec>(module, "GateSpec"))
      .constructor("activation='silu', alpha=1.0, gate_limit=float('inf'), act_limit=float('inf'), up_limit=float('inf'), up_offset=0.0",
                   [](const std::string& activation, double alpha, double gate_limit, double act_limit, double up_limit, double up_offset) {
                     return std::make_unique<GateSpec>(make_gate(activation, alpha, gate_limit, act_limit, up_limit, up_offset));
                   })
      .property("activation", [](const GateSpec& spec) { return name_of(spec.activation); })
      .property("alpha", [](const GateSpec& spec) { return spec.alpha; })
      .property("gate_limit", [](const GateSpec& spec) { return spec.gate_limit; })
      .property("act_limit", [](const GateSpec& spec) { return spec.act_limit; })
      .property("up_limit", [](const GateSpec& spec) { return spec.up_limit; })
      .property("up_offset", [](const GateSpec& spec) { return spec.up_offset; })
      .def("__eq__", "other",
           [](const GateSpec& a, const py::object& b) {
             return py::isinstance<GateSpec>(b) && gate_fields(a).equal(gate_fields(b.cast<GateSpec&>()));
           })
      .def("__hash__", "", [](const GateSpec& spec) { return py::hash(gate_fields(spec)); })
      .def("__repr__", "",
           [](const GateSpec& spec) {
             return "GateSpec(activation='" + std::string(name_of(spec.activation)) + "', alpha=" + number_text(spec.alpha) +
                    ", gate_limit=" + number_text(spec.gate_limit) + ", act_limit=" + number_text(spec.act_limit) +
                    ", up_limit=" + number_text(spec.up_limit) + ", up_offset=" + number_text(spec.up_offset) + ")";
           })
      .def("__reduce__", "",
           [](const py::object& self) { return py::make_tuple(py::type::of(self), gate_fields(self.cast<const GateSpec&>())); });
  Binder(py::class_<ExpertsShape>(module, "ExpertsShape"))
      .constructor("num_experts, hidden, intermediate, gated=True, bias=False",
                   [](int num_experts, int hidden, int intermediate, bool gated, bool bias) {
                     if (num_experts < 1 || hidden < 1 || intermediate < 1)
                       raise_value_error("ExpertsShape: num_experts, hidden and intermediate must be at least 1");
                     return std::make_unique<ExpertsShape>(ExpertsShape{num_experts, hidden, intermediate, gated, bias});
                   })
      .property("num_experts", [](const ExpertsShape& shape) { return shape.num_experts; })
      .property("hidden", [](const ExpertsShape& shape) { return shape.hidden; })
      .property("intermediate", [](const ExpertsShape& shape) { return shape.intermediate; })
      .property("gated", [](const ExpertsShape& shape) { return shape.gated; })
      .property("bias", [](const ExpertsShape& shape) { return shape.bias; })
      .def("__eq__", "other",
           [](const ExpertsShape& a, const py::object& b) {
             return py::isinstance<ExpertsShape>(b) && shape_fields(a).equal(shape_fields(b.cast<ExpertsShape&>()));
           })
      .def("__hash__", "", [](const ExpertsShape& shape) { return py::hash(shape_fields(shape)); })
      .def("__repr__", "",
           [](const ExpertsShape& shape) {
             return "ExpertsShape(num_experts=" + std::to_string(shape.num_experts) + ", hidden=" + std::to_string(shape.hidden) +
                    ", intermediate=" + std::to_string(shape.intermediate) + ", gated=" + (shape.gated ? "True" : "False") +
                    ", bias=" + (shape.bias ? "True" : "False") + ")";
           })
      .def("__reduce__", "",
           [](const py::object& self) { return py::make_tuple(py::type::of(self), shape_fields(self.cast<const ExpertsShape&>())); });
}

namespace {

RowsView rows_view(const py::array& array) {
  require_layout(array, "array", 2);
  return {array.data(), float_type_of(array, "array"), static_cast<int>(array.shape(0)), static_cast<int>(array.shape(1))};
}

QuantizedRowsView quantized_view(const py::array& codes, const py::array& scales) {
  require_layout(codes, "codes", 2);
  require_dtype(codes, "codes", 'i', 1, "int8");
  require_layout(scales, "scales", 2);
  require_dtype(scales, "scales", 'f', 2, "float16");
  if (codes.shape(1) % kGroup != 0) raise_value_error("codes: expected a multiple of 32 columns, found " + std::to_string(codes.shape(1)));
  if (scales.shape(0) != codes.shape(0) || scales.shape(1) * kGroup != codes.shape(1))
    raise_shape_error(
        scales, "scales",
        "(" + std::to_string(codes.shape(0)) + ", " + std::to_string(codes.shape(1) / kGroup) + "), one for each 32 columns of codes");
  return {static_cast<const std::int8_t*>(codes.data()), static_cast<const std::uint16_t*>(scales.data()), static_cast<int>(codes.shape(0)),
          static_cast<int>(codes.shape(1))};
}

// Rows in the format of a file. Types that are not stored so are rejected by pack_blocks itself.
StoredRowsView stored_view(const py::array& blocks, WeightType type, int cols) {
  require_layout(blocks, "blocks", 2);
  require_dtype(blocks, "blocks", 'u', 1, "uint8");
  if (!is_stored(type)) return {nullptr, static_cast<int>(blocks.shape(0)), cols};
  const auto bytes = static_cast<py::ssize_t>(file_row_bytes(type, cols));
  if (blocks.shape(1) != bytes)
    raise_value_error("blocks: expected " + std::to_string(bytes) + " bytes in each row for " + std::to_string(cols) + " columns of " +
                      name_of(type) + ", found " + std::to_string(blocks.shape(1)));
  return {static_cast<const std::uint8_t*>(blocks.data()), static_cast<int>(blocks.shape(0)), cols};
}

const float* bias_values(const py::array& array) {
  require_layout(array, "array", 1);
  require_dtype(array, "array", 'f', 4, "float32");
  return static_cast<const float*>(array.data());
}

std::unique_ptr<PackedExperts> make_experts(const ExpertsShape& shape, const GateSpec& gate, WeightTypes types, LayoutKind kind,
                                            const py::object& buffer_or_none) {
  if (buffer_or_none.is_none()) return std::make_unique<PackedExperts>(shape, gate, types, kind);
  if (!py::isinstance<py::array>(buffer_or_none)) throw py::type_error("buffer must be a numpy array of uint8");
  const auto array = py::cast<py::array>(buffer_or_none);
  require_layout(array, "buffer", 1);
  require_dtype(array, "buffer", 'u', 1, "uint8");
  auto* data = reinterpret_cast<std::byte*>(const_cast<void*>(array.data()));
  return std::make_unique<PackedExperts>(shape, gate, types, kind,
                                         ExternalBuffer{data, static_cast<std::size_t>(array.nbytes()), array.writeable()});
}

py::array_t<float> unpacked(int rows, int cols) {
  return py::array_t<float>({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(cols)});
}

void bind_experts(py::module_& module) {
  Binder(py::class_<PyExperts>(module, "PackedExperts"))
      .constructor("shape, gate_spec, weight_type, buffer=None, *, sparse=False",
                   [](const ExpertsShape& shape, const GateSpec& gate, const std::string& type, const py::object& buffer, bool sparse) {
                     return std::make_unique<PyExperts>(shape, gate, type, buffer, sparse);
                   })
      .def_static("expert_bytes_for", "shape, weight_type, *, sparse=False",
                  [](const ExpertsShape& shape, const std::string& type, bool sparse) {
                    return ExpertLayout(shape, parse_weight_types(type), sparse ? LayoutKind::kSparse : LayoutKind::kDense).expert_bytes;
                  })
      .property("sparse", [](const PyExperts& self) { return self.experts->kind() == LayoutKind::kSparse; })
      .property("shape", [](const PyExperts& self) { return self.experts->shape(); })
      .property("gate_spec", [](const PyExperts& self) { return self.experts->gate(); })
      .property("weight_type", [](const PyExperts& self) { return name_of(self.experts->types()); })
      .def("weight_type_of", "part",
           [](const PyExperts& self, const std::string& part) { return name_of(self.experts->type_of(parse_part(part))); })
      .property("expert_bytes", [](const PyExperts& self) { return self.experts->layout().expert_bytes; })
      .property("nbytes", [](const PyExperts& self) { return self.experts->bytes(); })
      .property("frames", [](const PyExperts& self) { return self.frames ? self.frames : py::object(py::none()); })
      .property("layer_in_frames", [](const PyExperts& self) { return self.experts->layer(); })
      .property("buffer",
                [](const py::object& self) {
                  const PackedExperts& experts = *self.cast<const PyExperts&>().experts;
                  const auto* data = reinterpret_cast<const std::uint8_t*>(experts.data());
                  py::array_t<std::uint8_t> view(static_cast<py::ssize_t>(experts.bytes()), data, self);
                  if (!experts.writable()) view.attr("flags").attr("writeable") = false;
                  return view;
                })
      .property("writable", [](const PyExperts& self) { return self.experts->writable(); })
      .property("packed_mask",
                [](const PyExperts& self) {
                  py::array_t<std::uint8_t> mask(self.experts->shape().num_experts);
                  for (int e = 0; e < self.experts->shape().num_experts; ++e) mask.mutable_at(e) = self.experts->packed_mask(e);
                  return mask;
                })
      .property("weights_ready",
                [](const PyExperts& self) {
                  for (int e = 0; e < self.experts->shape().num_experts; ++e)
                    if (!self.experts->complete(e)) return false;
                  return true;
                })
      .def("pack", "expert, part, array",
           [](PyExperts& self, int expert, const std::string& part, const py::array& array) {
             const RowsView rows = rows_view(array);
             const Part which = parse_part(part);
             py::gil_scoped_release release;
             self.experts->pack(expert, which, rows);
           })
      .def("pack_quantized", "expert, part, codes, scales",
           [](PyExperts& self, int expert, const std::string& part, const py::array& codes, const py::array& scales) {
             const QuantizedRowsView rows = quantized_view(codes, scales);
             const Part which = parse_part(part);
             py::gil_scoped_release release;
             self.experts->pack_quantized(expert, which, rows);
           })
      .def("pack_blocks", "expert, part, blocks",
           [](PyExperts& self, int expert, const std::string& part, const py::array& blocks) {
             const Part which = parse_part(part);
             const StoredRowsView rows = stored_view(blocks, self.experts->type_of(which), self.experts->cols_of(which));
             py::gil_scoped_release release;
             self.experts->pack_blocks(expert, which, rows);
           })
      .def("pack_bias", "expert, part, array",
           [](PyExperts& self, int expert, const std::string& part, const py::array& array) {
             self.experts->pack_bias(expert, parse_part(part), bias_values(array), static_cast<int>(array.shape(0)));
           })
      .def("unpack", "expert, part", [](const PyExperts& self, int expert, const std::string& part) {
        const Part which = parse_part(part);
        auto rows = unpacked(self.experts->rows_of(which), self.experts->cols_of(which));
        float* data = rows.mutable_data();
        {
          py::gil_scoped_release release;
          self.experts->unpack(expert, which, data);
        }
        return rows;
      });
}

py::dict frame_counts(PyFrames& self) {
  const FrameCounts counts = self.frames->counts();
  py::dict found;
  found["demanded"] = counts.demanded;
  found["resident"] = counts.resident;
  found["arriving"] = counts.arriving;
  found["reads"] = counts.reads;
  found["read_bytes"] = counts.read_bytes;
  found["predicted"] = counts.predicted;
  found["unused"] = counts.unused;
  found["waited_ms"] = static_cast<double>(counts.waited_ns) / 1e6;
  found["waited_bytes"] = counts.waited_bytes;
  found["precision"] = self.frames->precision();
  return found;
}

int add_layer(const py::object& self, PyExperts& packed, const std::string& path, std::uint64_t offset,
              const std::vector<std::int64_t>& checksums) {
  ExpertFrames& frames = *self.cast<PyFrames&>().frames;
  const PackedExperts& experts = *packed.experts;
  ExpertsInFile file = {path, offset, experts.layout().expert_bytes, experts.shape().num_experts, {}};
  for (const std::int64_t checksum : checksums) file.checksums.push_back(static_cast<std::uint32_t>(checksum));
  const int layer = frames.add(std::move(file));
  packed.frames = self;
  packed.experts->use_frames(self.cast<PyFrames&>().frames, layer);
  return layer;
}

void set_router(PyFrames& self, int layer, const py::object& weight, const py::object& bias, const py::object& choice_bias) {
  const TensorView rows(weight, "weight");
  RouterRows router = {rows.data(), rows.float_type(), static_cast<int>(rows.shape(rows.dims() - 1)), {}, {}};
  rows.require_shape({self.frames->experts_of(layer), router.hidden});
  self.routers.append(weight);
  const auto copied = [&](const py::object& given, const char* name) -> std::vector<float> {
    if (given.is_none()) return {};
    const TensorView view(given, name);
    view.require_float(ActivationType::kFloat32);
    view.require_shape({self.frames->experts_of(layer)});
    const auto* const values = reinterpret_cast<const float*>(view.data());
    return {values, values + view.shape(0)};
  };
  router.bias = copied(bias, "bias");
  router.choice_bias = copied(choice_bias, "choice_bias");
  self.frames->set_router(layer, std::move(router));
}

// Rows of ranks, read-only and valid until the policy's next update.
py::array_t<double> rank_view(const py::object& self, const double* ranks, const std::vector<py::ssize_t>& shape) {
  py::array_t<double> view(shape, ranks, self);
  view.attr("flags").attr("writeable") = false;
  return view;
}

void check_layer(const CachePolicy& policy, int layer) {
  if (layer < 0 || layer >= policy.layers()) raise_value_error("CachePolicy: there is no layer " + std::to_string(layer));
}

// One step of `layers`. The GIL is kept, as an update takes microseconds and threads ask for ranks at any time.
void update_policy(PyPolicy& self, const std::vector<std::int64_t>& layers, const py::array& scores_of_step,
                   const py::array& choices_of_step) {
  CachePolicy& policy = *self.policy;
  const auto scores = py::array_t<float, py::array::c_style | py::array::forcecast>::ensure(scores_of_step);
  const auto chosen = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>::ensure(choices_of_step);
  const auto count = static_cast<py::ssize_t>(layers.size());
  if (!scores || !chosen || scores.ndim() != 3 || chosen.ndim() != 3 || scores.shape(0) != count || chosen.shape(0) != count ||
      scores.shape(2) != policy.experts() || chosen.shape(1) != scores.shape(1))
    raise_value_error("CachePolicy.update: expected scores (layers, tokens, " + std::to_string(policy.experts()) +
                      ") and choices (layers, tokens, experts per token), found " + shape_text(scores_of_step) + " and " +
                      shape_text(choices_of_step));
  for (const std::int64_t layer : layers) check_layer(policy, static_cast<int>(layer));
  for (std::size_t i = 0; i < layers.size(); ++i)
    policy.update(static_cast<int>(layers[i]), static_cast<int>(scores.shape(1)), static_cast<int>(chosen.shape(2)),
                  scores.data() + static_cast<py::ssize_t>(i) * scores.shape(1) * scores.shape(2),
                  chosen.data() + static_cast<py::ssize_t>(i) * chosen.shape(1) * chosen.shape(2));
}

void bind_policy(py::module_& module) {
  Binder(py::class_<PyPolicy>(module, "CachePolicy"))
      .constructor(
          "policy, layers, num_experts, *, alpha=0.1, frequency_alpha=0.01, top_p=0, profile=None",
          [](const std::string& name, int layers, int experts, double alpha, double frequency_alpha, int top_p, const py::object& profile) {
            const PolicyOptions options = {parse_policy(name), alpha, frequency_alpha, top_p};
            auto policy = std::make_shared<CachePolicy>(options, layers, experts);
            if (profile.is_none() == (options.kind == PolicyKind::kStatic))
              raise_value_error("CachePolicy: 'static' needs a profile, and only it takes one");
            if (!profile.is_none()) {
              const auto uses = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>::ensure(profile);
              if (!uses || uses.ndim() != 2 || uses.shape(0) != layers || uses.shape(1) != experts)
                raise_value_error("CachePolicy: the profile must have the shape (layers, num_experts)");
              policy->set_static(uses.data());
            }
            return std::make_unique<PyPolicy>(PyPolicy{std::move(policy)});
          })
      .def("update", "layers, scores, chosen", &update_policy)
      .def("priority", "layer",
           [](const py::object& self, int layer) {
             CachePolicy& policy = *self.cast<PyPolicy&>().policy;
             check_layer(policy, layer);
             return rank_view(self, policy.ranks(layer), {policy.experts()});
           })
      .def("priorities", "", [](const py::object& self) {
        CachePolicy& policy = *self.cast<PyPolicy&>().policy;
        for (int layer = 0; layer < policy.layers(); ++layer) (void)policy.ranks(layer);
        return rank_view(self, policy.ranks(), {policy.layers(), policy.experts()});
      });
}

void check_expert(const ExpertFrames& frames, int layer, int expert) {
  if (expert < 0 || expert >= frames.experts_of(layer))
    raise_value_error("ExpertFrames: layer " + std::to_string(layer) + " has no expert " + std::to_string(expert));
}

void bind_frames(py::module_& module) {
  Binder(py::class_<PyFrames>(module, "ExpertFrames"))
      .constructor("readers=4", [](int readers) { return std::make_unique<PyFrames>(readers); })
      .def_static("least_bytes_for", "num_experts, expert_bytes, readers=4",
                  [](int num_experts, std::uint64_t expert_bytes, int readers) {
                    return ExpertFrames::frame_bytes_for(expert_bytes) *
                           static_cast<std::size_t>(ExpertFrames::least_frames_for(num_experts, readers));
                  })
      .def("add", "experts, path, offset, checksums=()", &add_layer)
      .def("set_router", "layer, weight, bias=None, choice_bias=None", &set_router)
      .def("open", "nbytes, policy=None",
           [](PyFrames& self, std::uint64_t nbytes, const py::object& policy) {
             self.frames->open(nbytes, policy.is_none() ? nullptr : policy.cast<PyPolicy&>().policy);
           })
      .property("frames", [](PyFrames& self) { return self.frames->frames(); })
      .property("frame_bytes", [](PyFrames& self) { return self.frames->frame_bytes(); })
      .property("least_frames", [](PyFrames& self) { return self.frames->least_frames(); })
      .def("residents", "layer",
           [](PyFrames& self, int layer) {
             (void)self.frames->experts_of(layer);
             return self.frames->residents(layer);
           })
      .def("in_memory", "layer, expert",
           [](PyFrames& self, int layer, int expert) {
             check_expert(*self.frames, layer, expert);
             return self.frames->peek(layer, expert) != nullptr;
           })
      .def("ask", "layer, experts",
           [](PyFrames& self, int layer, const std::vector<int>& experts) {
             for (const int expert : experts) check_expert(*self.frames, layer, expert);
             self.frames->ask(layer, experts);
           })
      .def("pin", "layer, expert",
           [](PyFrames& self, int layer, int expert) {
             check_expert(*self.frames, layer, expert);
             py::gil_scoped_release release;
             self.frames->pin(layer, expert);
           })
      .def("unpin", "layer, expert",
           [](PyFrames& self, int layer, int expert) {
             check_expert(*self.frames, layer, expert);
             self.frames->unpin(layer, expert);
           })
      .def("copy", "layer, expert, start, out",
           [](PyFrames& self, int layer, int expert, std::uint64_t start, const py::array& out) {
             require_layout(out, "out", 1);
             require_dtype(out, "out", 'u', 1, "uint8");
             const auto bytes = static_cast<std::size_t>(out.nbytes());
             check_expert(*self.frames, layer, expert);
             if (start + bytes > self.frames->bytes_of(layer)) raise_value_error("copy: there are no such bytes of an expert");
             auto* const to = static_cast<std::byte*>(const_cast<void*>(out.data()));
             py::gil_scoped_release release;
             self.frames->copy(layer, expert, start, bytes, to);
           })
      .def("counts", "", &frame_counts);
}

void bind_linear(py::module_& module) {
  Binder(py::class_<PackedLinear>(module, "PackedLinear"))
      .constructor(
          "rows, cols, weight_type",
          [](int rows, int cols, const std::string& type) { return std::make_unique<PackedLinear>(rows, cols, parse_weight_type(type)); })
      .property("rows", &PackedLinear::rows)
      .property("cols", &PackedLinear::cols)
      .property("weight_type", [](const PackedLinear& self) { return name_of(self.type()); })
      .property("nbytes", &PackedLinear::bytes)
      .property("buffer",
                [](const py::object& self) {
                  const auto& linear = self.cast<const PackedLinear&>();
                  const std::size_t bytes = block_bytes(linear.type(), linear.cols()) * static_cast<std::size_t>(linear.blocks());
                  py::array_t<std::uint8_t> view(static_cast<py::ssize_t>(bytes), reinterpret_cast<const std::uint8_t*>(linear.block(0)),
                                                 self);
                  view.attr("flags").attr("writeable") = false;
                  return view;
                })
      .def_static("nbytes_for", "rows, cols, weight_type",
                  [](int rows, int cols, const std::string& type) { return PackedLinear::bytes_for(rows, cols, parse_weight_type(type)); })
      .def("pack", "array",
           [](PackedLinear& self, const py::array& array) {
             const RowsView rows = rows_view(array);
             py::gil_scoped_release release;
             self.pack(rows);
           })
      .def("pack_quantized", "codes, scales",
           [](PackedLinear& self, const py::array& codes, const py::array& scales) {
             const QuantizedRowsView rows = quantized_view(codes, scales);
             py::gil_scoped_release release;
             self.pack_quantized(rows);
           })
      .def("pack_blocks", "blocks",
           [](PackedLinear& self, const py::array& blocks) {
             const StoredRowsView rows = stored_view(blocks, self.type(), self.cols());
             py::gil_scoped_release release;
             self.pack_blocks(rows);
           })
      .def("pack_bytes", "buffer",
           [](PackedLinear& self, const py::array& buffer) {
             require_layout(buffer, "buffer", 1);
             require_dtype(buffer, "buffer", 'u', 1, "uint8");
             self.pack_bytes(static_cast<const std::byte*>(buffer.data()), static_cast<std::size_t>(buffer.nbytes()));
           })
      .def("pack_bias", "array",
           [](PackedLinear& self, const py::array& array) { self.pack_bias(bias_values(array), static_cast<int>(array.shape(0))); })
      .def("unpack", "", [](const PackedLinear& self) {
        auto rows = unpacked(self.rows(), self.cols());
        self.unpack(rows.mutable_data());
        return rows;
      });
}

py::tuple search(const std::string& weight_type, const py::array& x, const py::array& weight, const py::array& scales, float shift,
                 int threads) {
  const WeightType type = parse_weight_type(weight_type);
  const GridForm form = grid_form(type);
  const auto check = [](const py::array& array, const char* name) {
    require_layout(array, name, 2);
    require_dtype(array, name, 'f', 4, "float32");
  };
  check(x, "x");
  check(weight, "weight");
  check(scales, "scales");
  const py::ssize_t groups = x.shape(0), candidates = scales.shape(1);
  if (x.shape(1) != form.group) raise_shape_error(x, "x", "(groups, " + std::to_string(form.group) + ")");
  if (weight.shape(0) != groups || weight.shape(1) != form.group) raise_shape_error(weight, "weight", "that of x");
  if (scales.shape(0) != groups) raise_shape_error(scales, "scales", "(" + std::to_string(groups) + ", candidates)");
  if (threads < 1) raise_value_error("threads: expected at least 1, found " + std::to_string(threads));
  py::array_t<float> match({groups, candidates}), norm({groups, candidates});
  py::array_t<std::uint16_t> points({groups, candidates, static_cast<py::ssize_t>(form.group / form.columns)});
  py::array_t<std::uint8_t> signs({groups, candidates, static_cast<py::ssize_t>(form.group / 8)});
  const GridGroups found = {static_cast<const float*>(x.data()), static_cast<const float*>(weight.data()),
                            static_cast<const float*>(scales.data()), groups, static_cast<int>(candidates)};
  const GridChoice choice = {match.mutable_data(), norm.mutable_data(), points.mutable_data(), signs.mutable_data()};
  {
    py::gil_scoped_release release;
    search_grid(type, shift, found, choice, threads);
  }
  return py::make_tuple(match, norm, points, signs);
}

py::dict grid_points() {
  py::dict found;
  for (int i = kFirstCoded; i < kWeightTypes; ++i) {
    const CodedFormat& format = coded_format(static_cast<WeightType>(i));
    if (format.grid.bytes != nullptr) found[format.name] = py::array_t<std::uint64_t>(format.grid.count, format.grid.bytes);
  }
  return found;
}

}  // namespace

PyExperts::PyExperts(const ExpertsShape& shape, const GateSpec& gate, const std::string& weight_type, const py::object& buffer_or_none,
                     bool sparse)
    : experts(
          make_experts(shape, gate, parse_weight_types(weight_type), sparse ? LayoutKind::kSparse : LayoutKind::kDense, buffer_or_none)),
      buffer(buffer_or_none) {}

void bind_weights(py::module_& module) {
  bind_policy(module);
  bind_frames(module);
  bind_experts(module);
  bind_linear(module);
  Binder(module)
      .def("grid_points", "", &grid_points)
      .def("search_grid", "weight_type, x, weight, scales, *, shift=0.0, threads=1", &search);
}

}  // namespace moegraft
