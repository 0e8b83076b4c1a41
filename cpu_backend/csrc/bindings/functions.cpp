#include "bindings/functions.h"

#include <algorithm>

namespace py = pybind11;

namespace moegraft {
namespace {

std::string trimmed(const std::string& text) {
  const std::size_t first = text.find_first_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

py::str interned(const std::string& text) { return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text.c_str())); }

[[noreturn]] void raise_type_error(const Function& function, const std::string& problem) {
  throw py::type_error(function.name + "(): " + problem);
}

constexpr const char* kCapsule = "moegraft function";

// As pybind11 calls a constructor.
void construct(const Function& function, const Call& call) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(call[0].ptr());
  py::detail::value_and_holder self = *py::detail::values_and_holders(instance).begin();
  if (self.instance_registered()) return;
  self.value_ptr() = function.construct(function.target, call);
  self.type->init_instance(instance, nullptr);
}

PyObject* called(PyObject* capsule, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  try {
    const auto& function = *static_cast<const Function*>(PyCapsule_GetPointer(capsule, kCapsule));
    const Call call(function, given, static_cast<std::size_t>(count), names);
    if (function.invoke != nullptr) return function.invoke(function.target, call).release().ptr();
    construct(function, call);
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

// Owns the function.
py::object callable(std::unique_ptr<Function> function, py::handle scope) {
  const py::capsule owner(function.get(), kCapsule,
                          [](PyObject* capsule) { delete static_cast<Function*>(PyCapsule_GetPointer(capsule, kCapsule)); });
  const py::object module = py::getattr(scope, "__module__", py::getattr(scope, "__name__"));
  PyMethodDef* const definition = &function.release()->definition;
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(definition, owner.ptr(), module.ptr()));
}

bool is_class(py::handle scope) { return PyType_Check(scope.ptr()) != 0; }
py::object method(py::handle function) { return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr())); }

}  // namespace

Function::Function(std::string name_of, const std::string& text, bool has_self, const Target& target, Invoke invoke, Construct construct)
    : name(std::move(name_of)),
      documentation(name + "(" + text + ")"),
      positional(Call::kMost),
      target(target),
      invoke(invoke),
      construct(construct),
      definition{name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)), METH_FASTCALL | METH_KEYWORDS,
                 documentation.c_str()} {
  if (has_self) parameters.push_back({interned("self"), {}});
  for (std::size_t first = 0; first < text.size();) {
    const std::size_t end = std::min(text.find(',', first), text.size());
    const std::string one = text.substr(first, end - first);
    const std::size_t equals = one.find('=');
    if (trimmed(one) == "*") positional = parameters.size();
    else if (equals == std::string::npos) parameters.push_back({interned(trimmed(one)), {}});
    else
      parameters.push_back(
          {interned(trimmed(one.substr(0, equals))), py::module_::import("builtins").attr("eval")(trimmed(one.substr(equals + 1)))});
    first = end + 1;
  }
  if (parameters.size() > Call::kMost) throw std::logic_error(name + " has too many parameters");
  positional = std::min(positional, parameters.size());
}

Call::Call(const Function& function, PyObject* const* given, std::size_t count, PyObject* names) : function_(function) {
  const std::vector<Function::Parameter>& parameters = function.parameters;
  if (count > function.positional)
    raise_type_error(function,
                     "expected at most " + std::to_string(function.positional) + " arguments by position, found " + std::to_string(count));
  std::copy_n(given, count, values_.begin());
  for (Py_ssize_t k = 0; names != nullptr && k < PyTuple_GET_SIZE(names); ++k) {
    const py::handle name = PyTuple_GET_ITEM(names, k);
    std::size_t i = 0;
    while (i < parameters.size() && name.ptr() != parameters[i].name.ptr()) ++i;
    if (i == parameters.size())
      for (i = 0; i < parameters.size() && PyUnicode_Compare(name.ptr(), parameters[i].name.ptr()) != 0;) ++i;
    if (i == parameters.size()) raise_type_error(function, "unknown keyword argument '" + name.cast<std::string>() + "'");
    if (values_[i]) raise_type_error(function, "argument '" + name.cast<std::string>() + "' was given twice");
    values_[i] = given[count + static_cast<std::size_t>(k)];
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (values_[i]) continue;
    if (!parameters[i].value)
      raise_type_error(function, std::string(i < function.positional ? "missing argument '" : "missing keyword argument '") +
                                     std::string(parameters[i].name) + "'");
    values_[i] = parameters[i].value;
  }
}

void Call::refuse(std::size_t index, const char* expected) const {
  raise_type_error(function_, "argument '" + std::string(function_.parameters[index].name) + "': expected " + expected + ", found " +
                                  Py_TYPE(values_[index].ptr())->tp_name);
}

std::int64_t Call::integer(std::size_t index, py::handle value, std::int64_t least, std::int64_t most) const {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) {
    PyErr_Clear();
    refuse(index, "an integer");
  }
  int overflow = 0;
  const std::int64_t found = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || found < least || found > most) {
    const std::string range = "an integer from " + std::to_string(least) + " to " + std::to_string(most);
    refuse(index, range.c_str());
  }
  return found;
}

double Call::number(std::size_t index, py::handle value) const {
  const double found = PyFloat_AsDouble(value.ptr());
  if (found == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse(index, "a number");
  }
  return found;
}

bool Call::truth(std::size_t index) const {
  PyObject* const value = values_[index].ptr();
  if (value == Py_True || value == Py_False) return value == Py_True;
  const PyNumberMethods* const numbers = Py_TYPE(value)->tp_as_number;  // as NumPy's bools have
  const int found = numbers != nullptr && numbers->nb_bool != nullptr ? numbers->nb_bool(value) : -1;
  if (found < 0 || value == Py_None) {
    PyErr_Clear();
    refuse(index, "a bool");
  }
  return found != 0;
}

std::string Call::text(std::size_t index, py::handle value) const {
  if (!PyUnicode_Check(value.ptr())) refuse(index, "a str");
  Py_ssize_t bytes = 0;
  const char* const found = PyUnicode_AsUTF8AndSize(value.ptr(), &bytes);
  if (found == nullptr) throw py::error_already_set();
  return {found, static_cast<std::size_t>(bytes)};
}

void* Call::instance(std::size_t index, PyTypeObject* type) const {
  PyObject* const value = values_[index].ptr();
  if (!PyObject_TypeCheck(value, type)) refuse(index, (std::string("a ") + type->tp_name).c_str());
  void* const found = reinterpret_cast<py::detail::instance*>(value)->get_value_and_holder().value_ptr();
  if (found == nullptr) refuse(index, "one that __init__ was called for");
  return found;
}

Binder& Binder::add_invoked(Kind kind, const char* name, const char* parameters, const Target& target, Invoke invoke) {
  const bool has_self = is_class(scope_) && kind != Kind::kStatic;
  py::object attribute = callable(std::make_unique<Function>(name, parameters, has_self, target, invoke, nullptr), scope_);
  if (kind == Kind::kStatic) attribute = py::staticmethod(attribute);
  else if (kind == Kind::kProperty) attribute = py::handle(reinterpret_cast<PyObject*>(&PyProperty_Type))(attribute);
  else if (has_self) attribute = method(attribute);
  scope_.attr(name) = attribute;
  return *this;
}

Binder& Binder::add_constructed(const char* parameters, const Target& target, Construct construct) {
  const std::string name = py::str(scope_.attr("__name__"));
  scope_.attr("__init__") = method(callable(std::make_unique<Function>(name, parameters, true, target, nullptr, construct), scope_));
  return *this;
}

}  // namespace moegraft
