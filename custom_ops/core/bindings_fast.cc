// The calls that an engine makes for each request and step, without pybind11's dispatcher.
//
// They are METH_FASTCALL functions that are put into the pybind11 class as method descriptors. Measured on one call for
// one block, Python included: about 0.2 us instead of 0.7 (publish) to 1.9 us (match, whose result was a pybind11
// object). Everything that is called less often stays in bindings.cc.
#include <new>

#include "python_manager.h"
#include "python_tokens.h"

namespace fastkv::core {
namespace {

constexpr int64_t kLongTokens = 1 << 16;  // work on fewer tokens ends before another thread could use the GIL

// -- MatchResult ------------------------------------------------------------------------------------------------------

struct PyMatch {
  PyObject_HEAD Match found;
  int64_t block_size;
};

PyTypeObject* match_type = nullptr;

PyMatch* new_match(int64_t block_size) {
  PyMatch* self = PyObject_New(PyMatch, match_type);
  if (!self) throw py::error_already_set();
  new (&self->found) Match();
  self->block_size = block_size;
  return self;
}

void delete_match(PyObject* self) {
  reinterpret_cast<PyMatch*>(self)->found.~Match();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

template <typename Fn>
PyObject* guarded(Fn fn) {
  try {
    return fn();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    set_python_error(std::current_exception());  // does not throw
  }
  return nullptr;
}

template <Row<BlockId> Match::* run>
PyObject* get_run(PyObject* self, void*) {
  const Row<BlockId>& ids = reinterpret_cast<PyMatch*>(self)->found.*run;
  return guarded([&] { return new_ids(ids.data(), ids.size()); });
}

template <bool host_too>
PyObject* get_tokens(PyObject* self, void*) {
  const auto* match = reinterpret_cast<PyMatch*>(self);
  const int64_t blocks = match->found.device_blocks.size() + (host_too ? match->found.host_blocks.size() : 0);
  return PyLong_FromLongLong(blocks * match->block_size);
}

PyGetSetDef match_properties[] = {
    {"device_blocks", get_run<&Match::device_blocks>, nullptr, "int32 ids that head the block table", nullptr},
    {"host_blocks", get_run<&Match::host_blocks>, nullptr, "int32 host ids of the blocks after those", nullptr},
    {"num_tokens", get_tokens<true>, nullptr, "tokens of both runs", nullptr},
    {"num_device_tokens", get_tokens<false>, nullptr, "tokens that are usable at once", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot match_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(delete_match)},
                             {Py_tp_getset, match_properties},
                             {Py_tp_doc, const_cast<char*>("What CacheManager.match found.")},
                             {0, nullptr}};

PyType_Spec match_spec = {"fastkv._core.MatchResult", sizeof(PyMatch), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, match_slots};

// -- methods ----------------------------------------------------------------------------------------------------------

PyManager& manager_of(PyObject* self) {
  auto* manager = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr<PyManager>();
  if (!manager) throw RequestFault("CacheManager.__init__ was not called");
  return *manager;
}

void need(Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return;
  PyErr_Format(PyExc_TypeError, "expected %zd positional arguments, got %zd", wanted, given);
  throw py::error_already_set();
}

int64_t integer(PyObject* given) {
  const long long value = PyLong_AsLongLong(given);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

PyObject* none() { Py_RETURN_NONE; }

template <typename Fn>
auto maybe_without_gil(bool release, Fn fn) {
  if (!release) return fn();
  const py::gil_scoped_release unlocked;
  return fn();
}

using Args = PyObject* const*;

// open(request_id, tokens) of a request without identity or priority; everything else goes to the method
// _open_described.
PyObject* open(PyObject* self, Args args, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    PyManager& manager = manager_of(self);
    if (count != 2 || keywords || manager.has_version) {
      const py::tuple positional(static_cast<size_t>(count));
      for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(positional.ptr(), i, Py_NewRef(args[i]));
      py::dict named;
      for (Py_ssize_t i = 0; keywords && i < PyTuple_GET_SIZE(keywords); ++i)
        named[PyTuple_GET_ITEM(keywords, i)] = py::handle(args[count + i]);
      const py::object method = py::handle(self).attr("_open_described");
      return PyObject_Call(method.ptr(), positional.ptr(), named.ptr());
    }
    const TokenView view(args[1], false, TokenView::kUnchecked);
    if (!manager.open(id_of(args[0]), view.data(), view.size(), {}, {}, 0, std::numeric_limits<double>::infinity()))
      TokenView::refuse(args[1]);
    return none();
  });
}

PyObject* match(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 1);
    PyManager& manager = manager_of(self);
    auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(new_match(manager.block_size())));
    manager.match(id_of(args[0]), reinterpret_cast<PyMatch*>(result.ptr())->found);
    return result.release().ptr();
  });
}

PyObject* take(PyObject* self, Args args, Py_ssize_t count, bool raises) {
  return guarded([&] {
    need(count, 2);
    PyManager& manager = manager_of(self);
    manager.look_at_the_clock();
    PyObject* ids = nullptr;
    int64_t left = 0;
    const int64_t wanted = integer(args[1]);
    const auto copy = [&](const BlockId* table, int64_t first, int64_t added) { ids = new_ids(table + first, added); };
    if (manager.try_allocate(id_of(args[0]), wanted, INT64_MAX, &left, copy)) return ids;
    if (raises) throw OutOfBlocksFault(wanted, left, manager.counts(kDevice).num_blocks, kDevice);
    return none();
  });
}

PyObject* allocate(PyObject* self, Args args, Py_ssize_t count) { return take(self, args, count, true); }
PyObject* try_allocate(PyObject* self, Args args, Py_ssize_t count) { return take(self, args, count, false); }

PyObject* try_allocate_into(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 3);
    PyManager& manager = manager_of(self);
    manager.look_at_the_clock();
    const IdRow row(args[2]);
    int64_t left = 0;
    const auto write = [&](const BlockId* table, int64_t first, int64_t added) {
      std::memcpy(row.data() + first, table + first, static_cast<size_t>(added) * sizeof(BlockId));
    };
    return PyBool_FromLong(manager.try_allocate(id_of(args[0]), integer(args[1]), row.size(), &left, write));
  });
}

PyObject* blocks_needed(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 2);
    return PyLong_FromLongLong(manager_of(self).blocks_needed(id_of(args[0]), integer(args[1])));
  });
}

PyObject* append(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 2);
    const TokenView view(args[1], true);
    manager_of(self).append(id_of(args[0]), view.data(), view.size());
    return none();
  });
}

PyObject* publish(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 2);
    PyManager& manager = manager_of(self);
    const std::string_view id = id_of(args[0]);
    const int64_t computed = integer(args[1]);
    return PyLong_FromLongLong(
        maybe_without_gil(computed >= kLongTokens, [&] { return manager.publish(id, computed); }));
  });
}

PyObject* preempt(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 1);
    PyManager& manager = manager_of(self);
    manager.look_at_the_clock();
    manager.preempt(id_of(args[0]));
    return none();
  });
}

PyObject* release(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 1);
    PyManager& manager = manager_of(self);
    manager.look_at_the_clock();
    manager.release(id_of(args[0]));
    return none();
  });
}

PyObject* block_table(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 1);
    return manager_of(self).with_table(id_of(args[0]),
                                       [](const BlockId* table, int64_t size) { return new_ids(table, size); });
  });
}

PyObject* num_tokens(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 1);
    return PyLong_FromLongLong(manager_of(self).num_tokens(id_of(args[0])));
  });
}

PyObject* num_computed_tokens(PyObject* self, Args args, Py_ssize_t count) {
  return guarded([&] {
    need(count, 1);
    return PyLong_FromLongLong(manager_of(self).num_computed_tokens(id_of(args[0])));
  });
}

template <typename Fn>
PyCFunction erased(Fn fn) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fn));
}

PyMethodDef methods[] = {
    {"open", erased(open), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"match", erased(match), METH_FASTCALL, nullptr},
    {"allocate", erased(allocate), METH_FASTCALL, nullptr},
    {"try_allocate", erased(try_allocate), METH_FASTCALL, nullptr},
    {"try_allocate_into", erased(try_allocate_into), METH_FASTCALL, nullptr},
    {"blocks_needed", erased(blocks_needed), METH_FASTCALL, nullptr},
    {"append", erased(append), METH_FASTCALL, nullptr},
    {"publish", erased(publish), METH_FASTCALL, nullptr},
    {"preempt", erased(preempt), METH_FASTCALL, nullptr},
    {"release", erased(release), METH_FASTCALL, nullptr},
    {"block_table", erased(block_table), METH_FASTCALL, nullptr},
    {"num_tokens", erased(num_tokens), METH_FASTCALL, nullptr},
    {"num_computed_tokens", erased(num_computed_tokens), METH_FASTCALL, nullptr},
};

}  // namespace

void add_fast_calls(py::module_& module, py::object manager_type) {
  for (PyMethodDef& method : methods) {
    auto descriptor = py::reinterpret_steal<py::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(manager_type.ptr()), &method));
    if (!descriptor) throw py::error_already_set();
    manager_type.attr(method.ml_name) = descriptor;
  }
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&match_spec));
  if (!type) throw py::error_already_set();
  match_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  module.attr("MatchResult") = type;  // the module keeps the type
}

}  // namespace fastkv::core
