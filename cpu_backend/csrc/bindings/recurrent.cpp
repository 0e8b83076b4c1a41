#include "recurrent/recurrent.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace moegraft {

void recurrent(Runtime& runtime, const std::string& name, const py::sequence& operands, const std::vector<double>& numbers) {
  RecurrentJob job(runtime.kernels(), name, numbers, runtime.threads());
  std::vector<StridedView> views;
  for (const py::handle object : operands) {
    views.emplace_back();
    if (object.is_none()) continue;
    const TensorView tensor(object, name.c_str(), true);
    StridedView& view = views.back();
    if (tensor.dims() > static_cast<int>(view.sizes.size())) raise_value_error(name + ": an operand has too many dimensions");
    if (views.size() <= RecurrentJob::kWritten) tensor.require_writable();
    view.data = tensor.data();
    view.type = tensor.float_type();
    view.dims = tensor.dims();
    for (int dim = 0; dim < view.dims; ++dim) {
      view.sizes[static_cast<std::size_t>(dim)] = tensor.shape(dim);
      view.strides[static_cast<std::size_t>(dim)] = tensor.stride(dim);
    }
  }
  job.set(views);
  py::gil_scoped_release release;
  runtime.run(job, [&] { job.prepare(); });
}

}  // namespace moegraft
