// A C function as a builtin of Python, for the calls that a small model makes dozens of times a step: ctypes takes about a
// microsecond a call, as long as the arithmetic of a small layer, and this a fifth of it.
//
// Only the stable ABI of CPython is used (PEP 384; METH_FASTCALL since 3.10), and what is used of it is declared here: the
// build needs no headers of Python, and a library works with every version. Addresses and sizes come as Python integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "parallel.h"

struct PyObject;

extern "C" {
using PyFastFunction = PyObject* (*)(PyObject*, PyObject* const*, ptrdiff_t);
struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int flags;
  const char* doc;
};
PyObject* PyCFunction_NewEx(PyMethodDef* definition, PyObject* self, PyObject* module);
long long PyLong_AsLongLong(PyObject* value);
double PyFloat_AsDouble(PyObject* value);
PyObject* PyLong_FromLong(long value);
PyObject* PyErr_Occurred();
void PyErr_SetString(PyObject* type, const char* message);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
extern PyObject* PyExc_TypeError;
}

namespace direct {
// What is raised where a function finds no memory: told by Python once.
extern PyObject* error_type;
extern const char* error_text;
}

namespace direct {

template <typename T>
T from_python(PyObject* value) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(static_cast<uintptr_t>(PyLong_AsLongLong(value)));
  else if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(PyFloat_AsDouble(value));
  else
    return static_cast<T>(PyLong_AsLongLong(value));
}

template <typename Result, typename... Arguments, size_t... At>
PyObject* call_with(Result (*function)(Arguments...), PyObject* const* given, std::index_sequence<At...>) {
  const std::tuple<Arguments...> arguments{from_python<Arguments>(given[At])...};
  if (PyErr_Occurred()) return nullptr;
  // Other Python threads run meanwhile, as under ctypes.
  void* state = PyEval_SaveThread();
  long code = 0;
  if constexpr (std::is_void_v<Result>)
    function(std::get<At>(arguments)...);
  else
    code = static_cast<long>(function(std::get<At>(arguments)...));
  PyEval_RestoreThread(state);
  if (std::is_same_v<Result, int> && code == OUT_OF_MEMORY) {
    PyErr_SetString(error_type, error_text);
    return nullptr;
  }
  return PyLong_FromLong(code);
}

template <typename Result, typename... Arguments>
PyObject* call_typed(Result (*function)(Arguments...), PyObject* const* given, ptrdiff_t count) {
  if (count != static_cast<ptrdiff_t>(sizeof...(Arguments))) {
    PyErr_SetString(PyExc_TypeError, "a kernel was called with a wrong number of arguments");
    return nullptr;
  }
  return call_with(function, given, std::index_sequence_for<Arguments...>{});
}

template <auto FUNCTION>
PyObject* call(PyObject*, PyObject* const* given, ptrdiff_t count) {
  return call_typed(FUNCTION, given, count);
}

// A function of the library under its name; all of them form a list that is complete once the library is loaded.
struct Entry {
  PyMethodDef definition;
  Entry* next;

  Entry(const char* name, PyFastFunction function);
};

}  // namespace direct

// Offers tandem_NAME, an extern "C" function defined above, to Python directly.
#define DIRECT(NAME) static direct::Entry direct_##NAME(#NAME, direct::call<tandem_##NAME>)
