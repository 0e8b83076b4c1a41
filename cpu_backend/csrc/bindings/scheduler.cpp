// The schedules for Python. A problem is any object with the fields of LayerProblem. The GIL is kept, since a plan takes microseconds.
#include <algorithm>
#include <limits>
#include <string>

#include "bindings/bindings.h"
#include "bindings/functions.h"
#include "scheduler/scheduler.h"

namespace py = pybind11;

namespace moegraft {
namespace {

// Keeps the arrays alive as long as the view is used.
class PyProblem {
 public:
  explicit PyProblem(const py::handle& problem) {
    view_.experts = static_cast<int>(py::len(problem.attr("loads")));
    view_.loads = values<std::int32_t>(problem, "loads", loads_);
    view_.cpu_ms = values<double>(problem, "cpu_ms", cpu_ms_);
    view_.gpu_ms = values<double>(problem, "gpu_ms", gpu_ms_);
    view_.arrival_ms = values<double>(problem, "arrival_ms", arrival_ms_);
    view_.transfer_ms = problem.attr("transfer_ms").cast<double>();
    view_.first_cpu_ms = problem.attr("first_cpu_ms").cast<double>();
    view_.cpu_free_ms = problem.attr("cpu_free_ms").cast<double>();
    view_.gpu_free_ms = problem.attr("gpu_free_ms").cast<double>();
    view_.link_free_ms = problem.attr("link_free_ms").cast<double>();
    const auto max_transfers = problem.attr("max_transfers").cast<long long>();
    view_.max_transfers = static_cast<int>(std::clamp<long long>(max_transfers, std::numeric_limits<int>::min(), view_.experts));
    check(view_);
  }

  const LayerProblem& view() const { return view_; }

 private:
  template <typename T>
  const T* values(const py::handle& problem, const char* name, py::object& kept) const {
    kept = problem.attr(name);
    if (!py::isinstance<py::array_t<T, py::array::c_style>>(kept)) {
      const std::string expected = py::str(py::dtype::of<T>()).template cast<std::string>();
      throw py::type_error("LayerProblem: " + std::string(name) + " must be a C-contiguous numpy array of " + expected);
    }
    const auto array = py::reinterpret_borrow<py::array>(kept);
    if (array.ndim() != 1 || array.shape(0) != view_.experts)
      throw py::value_error("LayerProblem: " + std::string(name) + " must have one dimension and as many values as loads, " +
                            std::to_string(view_.experts));
    return static_cast<const T*>(array.data());
  }

  LayerProblem view_{};
  py::object loads_, cpu_ms_, gpu_ms_, arrival_ms_;
};

class PyPlanner {
 public:
  explicit PyPlanner(const std::string& schedule) : schedule_(parse_schedule(schedule)) {}

  py::tuple plan(const py::handle& problem) {
    const PyProblem py_problem(problem);
    const LayerPlan plan = planner_.plan(py_problem.view(), schedule_);
    py::array_t<bool> on_cpu(py_problem.view().experts);
    std::copy_n(plan.on_cpu, py_problem.view().experts, on_cpu.mutable_data());
    return py::make_tuple(std::move(on_cpu), py::array_t<std::int32_t>(plan.transfer_count, plan.transfers), plan.makespan_ms);
  }

  double makespan(const py::handle& problem, const py::array_t<bool, py::array::c_style>& on_cpu) {
    const PyProblem py_problem(problem);
    if (on_cpu.ndim() != 1 || on_cpu.shape(0) != py_problem.view().experts)
      throw py::value_error("on_cpu must have one dimension and as many values as loads, " + std::to_string(py_problem.view().experts));
    return planner_.makespan(py_problem.view(), reinterpret_cast<const std::uint8_t*>(on_cpu.data()));
  }

  py::array_t<double> gains(const py::handle& problem) {
    const PyProblem py_problem(problem);
    py::array_t<double> gains_ms(py_problem.view().experts);
    planner_.gains(py_problem.view(), schedule_, gains_ms.mutable_data());
    return gains_ms;
  }

 private:
  Schedule schedule_;
  Planner planner_;
};

}  // namespace

void bind_scheduler(py::module_& module) {
  Binder(py::class_<PyPlanner>(module, "Planner"))
      .constructor("schedule", [](const std::string& schedule) { return std::make_unique<PyPlanner>(schedule); })
      .def("plan", "problem", &PyPlanner::plan)
      .def("makespan", "problem, on_cpu", &PyPlanner::makespan)
      .def("gains", "problem", &PyPlanner::gains);
  Binder(module).def("check_problem", "problem", [](py::handle problem) { PyProblem checked(problem); });
}

}  // namespace moegraft
