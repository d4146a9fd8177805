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

// given as a contiguous, one-dimensional NumPy array of native int32; nullptr if it is none.
inline const py::detail::PyArray_Proxy* int32_row(py::handle given) {
  using npy = py::detail::npy_api;
  if (!npy::get().PyArray_Check_(given.ptr())) return nullptr;
  const auto* array = py::detail::array_proxy(given.ptr());
  const auto* type = py::detail::array_descriptor_proxy(array->descr);
  const bool is_int32 = type->type_num == npy::NPY_INT_ || (sizeof(long) == 4 && type->type_num == npy::NPY_LONG_);
  const bool is_row = array->nd == 1 && (array->flags & npy::NPY_ARRAY_C_CONTIGUOUS_);
  return is_row && is_int32 && type->byteorder != '>' ? array : nullptr;
}

// A caller's row of block ids, to write into.
class IdRow {
 public:
  explicit IdRow(py::handle given) : array_(int32_row(given)) {
    if (!array_ || !(array_->flags & py::detail::npy_api::NPY_ARRAY_WRITEABLE_))
      throw RequestFault("out_row must be a writable, contiguous, one-dimensional int32 array");
  }
  int32_t* data() const { return reinterpret_cast<int32_t*>(array_->data); }
  int64_t size() const { return array_->dimensions[0]; }

 private:
  const py::detail::PyArray_Proxy* array_;
};

class TokenView {
 public:
  enum Check { kChecked, kUnchecked };  // kUnchecked: the caller looks for negative ids in an array, and refuses them

  // allow_one: a single int is a row of one token.
  explicit TokenView(py::handle given, bool allow_one = false, Check check = kChecked) {
    if (from_array(given, check) || from_sequence(given, allow_one)) return;
    keep_ = convert(given);
    from_array(keep_, kUnchecked);
  }

  // Raise what is wrong with these ids; one of them is negative.
  [[noreturn]] static void refuse(py::handle given) {
    convert(given);
    throw InvariantFault("token ids changed while they were read");
  }

  const int32_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  static py::object convert(py::handle given) {
    return py::module_::import("fastkv.core.digest").attr("as_token_array")(given);
  }

  bool from_array(py::handle given, Check check) {
    const auto* array = int32_row(given);
    if (!array) return false;
    data_ = reinterpret_cast<const int32_t*>(array->data);
    size_ = array->dimensions[0];
    if (check == kUnchecked) return true;
    int32_t all = 0;
    for (int64_t i = 0; i < size_; ++i) all |= data_[i];
    return all >= 0;
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
  if (PyUnicode_Check(given.ptr()) && PyUnicode_IS_COMPACT_ASCII(given.ptr()) && PyUnicode_GET_LENGTH(given.ptr()))
    return {static_cast<const char*>(PyUnicode_DATA(given.ptr())),
            static_cast<size_t>(PyUnicode_GET_LENGTH(given.ptr()))};
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
