// Token ids and request ids at the Python border. int32 arrays are read in place, lists of int without NumPy;
// everything else goes through fastkv.core.digest.as_token_array, which also words the errors.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string_view>
#include <vector>

#include "types.h"

namespace fastkv::core {

namespace py = pybind11;

class TokenView {
 public:
  // allow_one: a single int is a row of one token.
  explicit TokenView(py::handle given, bool allow_one = false) {
    if (from_array(given) || from_sequence(given, allow_one)) return;
    keep_ = py::module_::import("fastkv.core.digest").attr("as_token_array")(given);
    from_array(keep_);
  }

  const int32_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  // A contiguous row of native int32 whose ids are all >= 0.
  bool from_array(py::handle given) {
    const auto& api = py::detail::npy_api::get();
    if (!api.PyArray_Check_(given.ptr())) return false;
    const auto* array = py::detail::array_proxy(given.ptr());
    const auto* type = py::detail::array_descriptor_proxy(array->descr);
    if (array->nd != 1 || !(array->flags & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) || type->kind != 'i' ||
        type->byteorder == '>' || !is_int32(type->type_num))
      return false;
    data_ = reinterpret_cast<const int32_t*>(array->data);
    size_ = array->dimensions[0];
    int32_t all = 0;
    for (int64_t i = 0; i < size_; ++i) all |= data_[i];
    return all >= 0;
  }

  static bool is_int32(int type_num) {
    return type_num == py::detail::npy_api::NPY_INT_ ||
           (sizeof(long) == 4 && type_num == py::detail::npy_api::NPY_LONG_);
  }

  bool from_sequence(py::handle given, bool allow_one) {
    const bool is_list = PyList_CheckExact(given.ptr()), is_tuple = PyTuple_CheckExact(given.ptr());
    if (allow_one && PyLong_CheckExact(given.ptr())) {
      own_.resize(1);
      if (!read(given.ptr(), own_[0])) return false;
    } else if (is_list || is_tuple) {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(given.ptr());
      PyObject** items = PySequence_Fast_ITEMS(given.ptr());
      own_.resize(static_cast<size_t>(count));
      for (Py_ssize_t i = 0; i < count; ++i)
        if (!read(items[i], own_[static_cast<size_t>(i)])) return false;
    } else {
      return false;
    }
    data_ = own_.data();
    size_ = static_cast<int64_t>(own_.size());
    return true;
  }

  static bool read(PyObject* item, int32_t& token) {
    if (!PyLong_CheckExact(item)) return false;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    token = static_cast<int32_t>(value);
    return !overflow && value >= 0 && value <= INT32_MAX;
  }

  const int32_t* data_ = nullptr;
  int64_t size_ = 0;
  std::vector<int32_t> own_;
  py::object keep_;
};

// A request id; the view lives as long as the str.
inline std::string_view id_of(py::handle given) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(given.ptr()) ? PyUnicode_AsUTF8AndSize(given.ptr(), &size) : nullptr;
  if (!text || !size) {
    PyErr_Clear();
    throw RequestFault("request id " + py::repr(given).cast<std::string>() + " must be a non-empty str");
  }
  return {text, static_cast<size_t>(size)};
}

inline py::array_t<int32_t> to_array(const std::vector<int32_t>& row) {
  return py::array_t<int32_t>(static_cast<py::ssize_t>(row.size()), row.data());
}

}  // namespace fastkv::core
