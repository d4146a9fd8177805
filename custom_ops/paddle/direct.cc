// Attention as Python functions of this library, for fastkv/ops/attention.py: what Paddle's dispatch of a custom op
// with twenty arguments costs (60 to 80 us, 200 where a model's weights have just run through the caches) is most of a
// small decode call. Checks and kernels are the registered ops' own (attention.h). What does not change from call to
// call (a layer's caches, a step's batch, a model's rotary tables) is checked and unwrapped once, into a capsule of
// addresses: its Python owner keeps the memory. Tensors are reached as Paddle's own C++ extensions reach them
// (paddle/utils/pybind.h). Paddle's operations on the CPU have ended when they return, so the memory behind a tensor is
// what the tensor says.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "attention.h"
#include "blocks.h"
#include "paddle/utils/pybind.h"

namespace {

using fastkv::AttentionParams;
using fastkv::BatchView;
using fastkv::RopeView;
using namespace fastkv::binding;  // NOLINT

constexpr char kLayer[] = "fastkv.layer";  // AttentionParams of which the caches are filled in
constexpr char kBatch[] = "fastkv.batch";  // BatchView
constexpr char kRope[] = "fastkv.rope";    // RopeView

/// A Python error that has been set already.
struct PythonError {};

/// Lets other Python threads run while kernels do.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

PyObject* error_class(common::ErrorCode code) {
  if (code == common::ErrorCode::OUT_OF_RANGE) return PyExc_IndexError;
  return code == common::ErrorCode::RESOURCE_EXHAUSTED ? PyExc_MemoryError : PyExc_ValueError;
}

/// Runs a function's body; whatever it throws becomes a Python error, as it does in a registered op.
template <typename Body>
PyObject* python_call(Py_ssize_t given, Py_ssize_t expected, Body body) {
  if (given != expected) {
    PyErr_Format(PyExc_TypeError, "%zd arguments expected, %zd given", expected, given);
    return nullptr;
  }
  try {
    return body();
  } catch (const PythonError&) {
  } catch (const common::enforce::EnforceNotMet& error) {
    PyErr_SetString(error_class(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

const Tensor& tensor_of(PyObject* object, const char* name) {
  if (!paddle::pybind::PyCheckTensor(object)) {
    const std::string type = Py_TYPE(object)->tp_name;
    invalid(std::string(name) + " must be a Paddle tensor, but is a " + type.substr(type.rfind('.') + 1));
  }
  return paddle::pybind::CastPyArg2Tensor(object, 0);
}

const Tensor* maybe_tensor(PyObject* object, const char* name) {
  return object == Py_None ? nullptr : &tensor_of(object, name);
}

std::string text_of(PyObject* object) {
  const char* text = PyUnicode_AsUTF8(object);
  if (text == nullptr) throw PythonError();
  return text;
}

int64_t integer_of(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

float float_of(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw PythonError();
  return static_cast<float>(value);
}

template <typename View>
PyObject* to_capsule(const View& view, const char* name) {
  auto owned = std::make_unique<View>(view);
  const auto destroy = [](PyObject* capsule) {
    delete static_cast<View*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  };
  PyObject* capsule = PyCapsule_New(owned.get(), name, destroy);
  if (capsule != nullptr) owned.release();
  return capsule;
}

template <typename View>
const View& from_capsule(PyObject* capsule, const char* name) {
  const void* view = PyCapsule_GetPointer(capsule, name);
  if (view == nullptr) throw PythonError();
  return *static_cast<const View*>(view);
}

/// key, value, their scales, their zero points (all but key may be None), kv_cache_quant_type -> a layer.
PyObject* py_view_layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return python_call(count, 7, [&] {
    const LayerTensors tensors = {&tensor_of(args[0], "key_cache"),        maybe_tensor(args[1], "value_cache"),
                                  maybe_tensor(args[2], "key_scale"),      maybe_tensor(args[3], "value_scale"),
                                  maybe_tensor(args[4], "key_zero_point"), maybe_tensor(args[5], "value_zero_point")};
    AttentionParams params;
    view_layer(tensors, parse_storage(text_of(args[6])), &params);
    return to_capsule(params, kLayer);
  });
}

/// block_tables, query_start, context_lens, slot_mapping -> a batch.
PyObject* py_view_batch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return python_call(count, 4, [&] {
    return to_capsule(view_batch(tensor_of(args[0], "block_tables"), tensor_of(args[1], "query_start"),
                                 tensor_of(args[2], "context_lens"), tensor_of(args[3], "slot_mapping")),
                      kBatch);
  });
}

/// cos, sin, style -> rotary tables.
PyObject* py_view_rope(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return python_call(count, 3, [&] {
    return to_capsule(view_rope(&tensor_of(args[0], "rope cos"), &tensor_of(args[1], "rope sin"), text_of(args[2])),
                      kRope);
  });
}

/// layer, batch, softmax_scale, rope or None, window: what every call begins with.
AttentionParams params_of(PyObject* const* args) {
  AttentionParams params = from_capsule<AttentionParams>(args[0], kLayer);
  params.batch = from_capsule<BatchView>(args[1], kBatch);
  params.softmax_scale = float_of(args[2]);
  if (args[3] != Py_None) params.rope = from_capsule<RopeView>(args[3], kRope);
  params.window = integer_of(args[4]);
  return params;
}

/// Runs a call that fills `given`, or makes a tensor if that is None; returns the one or the other.
template <typename Call>
PyObject* result_of(PyObject* given, Call call) {
  Tensor out;
  {
    const Unlocked unlocked;
    out = call();
  }
  if (given == Py_None) return paddle::pybind::ToPyObject(out);
  Py_INCREF(given);
  return given;
}

/// layer, batch, softmax_scale, rope, window, sinks, out, q, k, v -> out
PyObject* py_append_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return python_call(count, 10, [&] {
    AttentionParams params = params_of(args);
    const Tensor *sinks = maybe_tensor(args[5], "sinks"), *out = maybe_tensor(args[6], "out");
    const Tensor &q = tensor_of(args[7], "q"), &k = tensor_of(args[8], "k"), &v = tensor_of(args[9], "v");
    return result_of(args[6], [&] { return attend(&params, q, k, v, sinks, out); });
  });
}

/// layer, batch, softmax_scale, rope, window, sinks, out, qkv -> out
PyObject* py_append_attention_qkv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return python_call(count, 8, [&] {
    AttentionParams params = params_of(args);
    const Tensor *sinks = maybe_tensor(args[5], "sinks"), *out = maybe_tensor(args[6], "out");
    const Tensor& qkv = tensor_of(args[7], "qkv");
    return result_of(args[6], [&] { return attend_fused(&params, qkv, sinks, out); });
  });
}

/// layer, batch, softmax_scale, None, 0, q, latent, kv_lora_rank -> out
PyObject* py_mla_append_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return python_call(count, 8, [&] {
    AttentionParams params = params_of(args);
    const Tensor &q = tensor_of(args[5], "q"), &latent = tensor_of(args[6], "latent");
    const int64_t rank = integer_of(args[7]);
    return result_of(Py_None, [&] { return attend_latent(&params, q, latent, rank); });
  });
}

/// list of tensors, src_ids, dst_ids -> None
PyObject* py_copy_blocks(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return python_call(count, 3, [&] {
    std::vector<const Tensor*> tensors;
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]); ++i) {
      tensors.push_back(&tensor_of(PyList_GetItem(args[0], i), ("tensors[" + std::to_string(i) + "]").c_str()));
    }
    if (PyErr_Occurred() != nullptr) throw PythonError();
    const Tensor &src_ids = tensor_of(args[1], "src_ids"), &dst_ids = tensor_of(args[2], "dst_ids");
    {
      const Unlocked unlocked;
      copy_tensors(tensors, src_ids, dst_ids);
    }
    Py_RETURN_NONE;
  });
}

PyCFunction erased(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"view_layer", erased(py_view_layer), METH_FASTCALL, nullptr},
    {"view_batch", erased(py_view_batch), METH_FASTCALL, nullptr},
    {"view_rope", erased(py_view_rope), METH_FASTCALL, nullptr},
    {"append_attention", erased(py_append_attention), METH_FASTCALL, nullptr},
    {"append_attention_qkv", erased(py_append_attention_qkv), METH_FASTCALL, nullptr},
    {"mla_append_attention", erased(py_mla_append_attention), METH_FASTCALL, nullptr},
    {"copy_blocks", erased(py_copy_blocks), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "fastkv._paddle_ops", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__paddle_ops() { return PyModule_Create(&module); }
