// Functions, methods and constructors as Python calls them. pybind11 compiles templates for each signature that it binds, which was most of
// what the bindings took to compile. Here one function is called for all of them: it finds the arguments by the names of the parameters, which
// a text has, and what is compiled for a signature reads them one by one.
//
//     Binder(cls).def("pack", "expert, part, array, *, fast=False", [](PyExperts& self, int expert, ...) { ... });
//
// A parameter with a value, a Python expression, may be left out; those after the star are given by name. A wrong number of arguments and a
// wrong type raise TypeError with the names of the function and of the argument. An array is never converted.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace moegraft {

class Call;

// A pointer to a function or to a member function, whatever its type.
struct Target {
  alignas(std::max_align_t) std::array<std::byte, 2 * sizeof(void*)> bytes{};
  template <class Pointer>
  explicit Target(Pointer pointer) {
    static_assert(sizeof pointer <= sizeof bytes);
    std::memcpy(bytes.data(), &pointer, sizeof pointer);
  }
  template <class Pointer>
  Pointer as() const {
    Pointer pointer;
    std::memcpy(&pointer, bytes.data(), sizeof pointer);
    return pointer;
  }
};

// Reads the arguments, calls the target and returns its result; of a constructor, the object.
using Invoke = pybind11::object (*)(const Target& target, const Call& call);
using Construct = void* (*)(const Target& target, const Call& call);

struct Function {
  struct Parameter {
    pybind11::str name;  // interned
    pybind11::object value;  // where it is left out; null where it cannot be
  };
  // A constructor has the first argument of a method as well, which is not among those of its target.
  Function(std::string name, const std::string& parameters, bool has_self, const Target& target, Invoke invoke, Construct construct);

  std::string name;
  std::string documentation;
  std::vector<Parameter> parameters;
  std::size_t positional;  // the others are given by name
  Target target;
  Invoke invoke;
  Construct construct;  // one of the two
  PyMethodDef definition;
};

// The arguments of a call in the order of the parameters. What reads one throws TypeError where it has another type, such as "pack(): argument
// 'expert': expected an integer, found str".
class Call {
 public:
  static constexpr std::size_t kMost = 20;

  Call(const Function& function, PyObject* const* given, std::size_t count, PyObject* names);
  pybind11::handle operator[](std::size_t index) const { return values_[index]; }
  [[noreturn]] void refuse(std::size_t index, const char* expected) const;

  std::int64_t integer(std::size_t index, pybind11::handle value, std::int64_t least, std::int64_t most) const;
  double number(std::size_t index, pybind11::handle value) const;
  bool truth(std::size_t index) const;
  std::string text(std::size_t index, pybind11::handle value) const;
  void* instance(std::size_t index, PyTypeObject* type) const;  // of a class that pybind11 knows

 private:
  const Function& function_;
  std::array<pybind11::handle, kMost> values_{};
};

template <class T>
constexpr bool kIsOptional = false;
template <class T>
constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
constexpr bool kIsVector = false;
template <class T>
constexpr bool kIsVector<std::vector<T>> = true;

// An item of an argument, or all of it.
template <class T>
T read_value(const Call& call, std::size_t index, pybind11::handle value) {
  if constexpr (std::is_floating_point_v<T>) return static_cast<T>(call.number(index, value));
  else if constexpr (std::is_same_v<T, std::string>) return call.text(index, value);
  else
    return static_cast<T>(call.integer(index, value, std::is_signed_v<T> ? static_cast<std::int64_t>(std::numeric_limits<T>::min()) : 0,
                                       sizeof(T) == 4 ? static_cast<std::int64_t>(std::numeric_limits<T>::max()) : INT64_MAX));
}

template <class T>
constexpr const char* expected_object() {
  if constexpr (std::is_same_v<T, pybind11::array>) return "a numpy.ndarray";
  else if constexpr (std::is_base_of_v<pybind11::array, T>) return "a C-contiguous numpy.ndarray of another type";
  else return "a sequence";
}

// The argument for a parameter. One that is a class of ours is a reference.
template <class Parameter>
decltype(auto) argument(const Call& call, std::size_t index) {
  using T = std::remove_cv_t<std::remove_reference_t<Parameter>>;
  const pybind11::handle value = call[index];
  if constexpr (std::is_same_v<T, pybind11::object>) {
    return pybind11::reinterpret_borrow<T>(value);
  } else if constexpr (std::is_same_v<T, pybind11::handle>) {
    return T(value);
  } else if constexpr (std::is_base_of_v<pybind11::object, T>) {
    if (!pybind11::isinstance<T>(value)) call.refuse(index, expected_object<T>());
    return pybind11::reinterpret_borrow<T>(value);
  } else if constexpr (kIsOptional<T>) {
    return value.is_none() ? T() : T(read_value<typename T::value_type>(call, index, value));
  } else if constexpr (kIsVector<T>) {
    if (!pybind11::isinstance<pybind11::sequence>(value)) call.refuse(index, "a sequence");
    T values;
    for (const pybind11::handle item : value) values.push_back(read_value<typename T::value_type>(call, index, item));
    return values;
  } else if constexpr (std::is_same_v<T, bool>) {
    return call.truth(index);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    return read_value<T>(call, index, value);
  } else {
    static PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(pybind11::type::of<T>().ptr());
    return *static_cast<T*>(call.instance(index, type));
  }
}

template <class T>
pybind11::object to_python(T&& value) {
  if constexpr (std::is_base_of_v<pybind11::object, std::decay_t<T>>) return std::forward<T>(value);
  else return pybind11::cast(std::forward<T>(value));
}
template <class T>
pybind11::object to_python(std::vector<T>&& values) {
  pybind11::list list;
  for (T& value : values) list.append(to_python(std::move(value)));
  return list;
}

// The functions of a class or of the module.
class Binder {
 public:
  explicit Binder(pybind11::object scope) : scope_(std::move(scope)) {}

  // Of a class, the first parameter is the object, which `parameters` does not name.
  template <class F>
  Binder& def(const char* name, const char* parameters, F function) {
    return add(Kind::kFunction, name, parameters, pointer_to(function));
  }
  template <class F>
  Binder& def_static(const char* name, const char* parameters, F function) {
    return add(Kind::kStatic, name, parameters, pointer_to(function));
  }
  template <class F>
  Binder& property(const char* name, F function) {
    return add(Kind::kProperty, name, "", pointer_to(function));
  }
  // `make` returns the object as a std::unique_ptr.
  template <class F>
  Binder& constructor(const char* parameters, F make) {
    return add_constructor(parameters, pointer_to(make));
  }

 private:
  enum class Kind { kFunction, kStatic, kProperty };

  template <class F>
  static auto pointer_to(F function) {
    if constexpr (std::is_member_function_pointer_v<F>) return function;
    else return +function;
  }

  template <class R, class... A, std::size_t... I>
  static pybind11::object invoke(const Target& target, const Call& call, R (*)(A...), std::index_sequence<I...>) {
    const auto function = target.as<R (*)(A...)>();
    if constexpr (std::is_void_v<R>) return function(argument<A>(call, I)...), pybind11::none();
    else return to_python(function(argument<A>(call, I)...));
  }
  template <class R, class C, class Pointer, class... A, std::size_t... I>
  static pybind11::object invoke_member(const Target& target, const Call& call, std::index_sequence<I...>) {
    C& self = argument<C>(call, 0);
    const auto function = target.as<Pointer>();
    if constexpr (std::is_void_v<R>) return (self.*function)(argument<A>(call, I + 1)...), pybind11::none();
    else return to_python((self.*function)(argument<A>(call, I + 1)...));
  }
  template <class T, class... A, std::size_t... I>
  static void* construct(const Target& target, const Call& call, std::unique_ptr<T> (*)(A...), std::index_sequence<I...>) {
    return target.as<std::unique_ptr<T> (*)(A...)>()(argument<A>(call, I + 1)...).release();
  }

  template <class R, class... A>
  Binder& add(Kind kind, const char* name, const char* parameters, R (*function)(A...)) {
    return add_invoked(kind, name, parameters, Target(function), [](const Target& target, const Call& call) {
      return invoke(target, call, static_cast<R (*)(A...)>(nullptr), std::index_sequence_for<A...>());
    });
  }
  template <class R, class C, class... A>
  Binder& add(Kind kind, const char* name, const char* parameters, R (C::*function)(A...)) {
    return add_invoked(kind, name, parameters, Target(function), [](const Target& target, const Call& call) {
      return invoke_member<R, C, R (C::*)(A...), A...>(target, call, std::index_sequence_for<A...>());
    });
  }
  template <class R, class C, class... A>
  Binder& add(Kind kind, const char* name, const char* parameters, R (C::*function)(A...) const) {
    return add_invoked(kind, name, parameters, Target(function), [](const Target& target, const Call& call) {
      return invoke_member<R, C, R (C::*)(A...) const, A...>(target, call, std::index_sequence_for<A...>());
    });
  }
  template <class T, class... A>
  Binder& add_constructor(const char* parameters, std::unique_ptr<T> (*make)(A...)) {
    return add_constructed(parameters, Target(make), [](const Target& target, const Call& call) {
      return construct(target, call, static_cast<std::unique_ptr<T> (*)(A...)>(nullptr), std::index_sequence_for<A...>());
    });
  }

  Binder& add_invoked(Kind kind, const char* name, const char* parameters, const Target& target, Invoke invoke);
  Binder& add_constructed(const char* parameters, const Target& target, Construct construct);

  pybind11::object scope_;
};

}  // namespace moegraft
