// What the binding files share: the manager with its Python clock, int32 arrays, and errors.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <exception>

#include "manager.h"

namespace fastkv::core {

namespace py = pybind11;

struct PyManager : Manager {
  PyManager(const ManagerOptions& options, py::object given) : Manager(options), clock(std::move(given)) {}

  // Priorities expire by the caller's clock; it is asked only once there are any. The GIL is held.
  void look_at_the_clock() {
    if (uses_priorities()) tick(clock().cast<double>());
  }

  py::object clock;
  bool has_version = false;  // of the weights: then the identity of a request without one is not empty
};

// A new int32 array with these ids; a quarter of what py::array_t's constructor takes.
inline PyObject* new_ids(const int32_t* ids, int64_t count) {
  const auto& api = py::detail::npy_api::get();
  const Py_intptr_t size = count;
  PyObject* array =
      api.PyArray_NewFromDescr_(api.PyArray_Type_, api.PyArray_DescrFromType_(py::detail::npy_api::NPY_INT_), 1, &size,
                                nullptr, nullptr, 0, nullptr);
  if (!array) throw py::error_already_set();
  if (count) std::memcpy(py::detail::array_proxy(array)->data, ids, static_cast<size_t>(count) * sizeof(int32_t));
  return array;
}

// Set the Python error that stands for a fault of the core.
void set_python_error(std::exception_ptr pending);

// Hot methods of Manager, and MatchResult; see bindings_fast.cc.
void add_fast_calls(py::module_& module, py::object manager_type);
void bind_events(py::object manager_type);

}  // namespace fastkv::core
