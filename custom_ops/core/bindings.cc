// fastkv._core: the scheduler core as Python sees it. Converts at the border, calls, converts back; decides nothing.
//
// The GIL is released where a call works long enough to pay for it (thousands of blocks, digests). A thread that waits
// for the manager's mutex may hold the GIL: whoever has the mutex never asks for the GIL before giving it back.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "python_manager.h"
#include "python_tokens.h"
#include "stamp.h"

namespace fastkv::core {

void set_python_error(std::exception_ptr pending) {
  const auto set = [](const char* kind, auto... arguments) {
    try {
      const py::object type = py::module_::import("fastkv.errors").attr(kind);
      PyErr_SetObject(type.ptr(), type(arguments...).ptr());
    } catch (py::error_already_set& error) {
      error.restore();
    }
  };
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const OutOfBlocksFault& fault) {
    set("OutOfBlocksError", fault.requested, fault.available, fault.num_blocks, level_name(fault.level));
  } catch (const RequestFault& fault) {
    set("RequestError", fault.what());
  } catch (const InvariantFault& fault) {
    set("InvariantError", fault.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

namespace {

// For pybind11: faults of the core become Python errors, everything else is somebody else's.
void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const OutOfBlocksFault&) {
    set_python_error(pending);
  } catch (const RequestFault&) {
    set_python_error(pending);
  } catch (const InvariantFault&) {
    set_python_error(pending);
  }
}

std::vector<Extra> extras_of(const py::dict& given) {
  std::vector<Extra> extras;
  for (const auto& [block, bytes] : given) extras.push_back({block.cast<int64_t>(), bytes.cast<std::string>()});
  std::sort(extras.begin(), extras.end(), [](const Extra& a, const Extra& b) { return a.block < b.block; });
  return extras;
}

bool check_room(std::string_view id, int64_t count, int64_t room) {
  if (count > room)
    throw RequestFault("out_row has " + std::to_string(room) + " places, '" + std::string(id) + "' has " +
                       std::to_string(count) + " blocks");
  return true;
}

// Write a block table and -1 after it into memory of `room` int32 places.
int64_t write_row(Manager& manager, std::string_view id, int32_t* out, int64_t room) {
  return manager.with_table(id, [&](const BlockId* table, int64_t count) {
    check_room(id, count, room);
    std::copy(table, table + count, out);
    std::fill(out + count, out + room, kNone);
    return count;
  });
}

py::object bind_manager(py::module_& module) {
  py::class_<PyManager> type(module, "Manager");
  type.def(py::init([](int32_t device, int32_t host, int32_t block_size, bool caching, const std::string& policy,
                       int64_t max_pinned, uint64_t seed, uint64_t hash_mask, bool log_events, py::object clock) {
        ManagerOptions options;
        options.num_device_blocks = device;
        options.num_host_blocks = host;
        options.block_size = block_size;
        options.enable_prefix_caching = caching;
        options.policy = policy_of(policy);
        options.max_pinned_blocks = max_pinned;
        options.seed = seed;
        options.hash_mask = hash_mask;
        options.log_events = log_events;
        return std::make_unique<PyManager>(options, std::move(clock));
      }))
      .def("_open",
           [](PyManager& self, py::handle id, py::handle tokens, const py::dict& extras,
              const std::vector<std::pair<int64_t, int64_t>>& images, int priority, double ttl_s) {
             const TokenView view(tokens);
             std::vector<Span> spans;
             for (const auto& [start, end] : images) spans.push_back({start, end});
             if (!self.open(id_of(id), view.data(), view.size(), extras_of(extras), std::move(spans), priority, ttl_s))
               TokenView::refuse(tokens);
           })
      .def("reserve_drafts",
           [](PyManager& self, py::handle id, int64_t num_drafts) -> py::object {
             self.look_at_the_clock();
             Row<BlockId> ids;
             if (!self.try_reserve(id_of(id), num_drafts, ids)) return py::none();
             return py::reinterpret_steal<py::object>(new_ids(ids.data(), ids.size()));
           })
      .def("confirm",
           [](PyManager& self, py::handle id, py::handle tokens) {
             const TokenView view(tokens, true);
             return self.confirm(id_of(id), view.data(), view.size());
           })
      .def("_fork",
           [](PyManager& self, py::handle parent, py::handle child) {
             self.look_at_the_clock();
             std::vector<std::pair<BlockId, BlockId>> copies;
             for (const BlockCopy& copy : self.fork(id_of(parent), id_of(child)))
               copies.emplace_back(copy.source, copy.target);
             return copies;
           })
      .def("_pin", [](PyManager& self, py::handle id, int64_t blocks) { return self.pin(id_of(id), blocks); })
      .def("unpin",
           [](PyManager& self, int64_t pin) {
             self.look_at_the_clock();
             self.unpin(pin);
           })
      .def("evict",
           [](PyManager& self, int64_t num_blocks) {
             self.look_at_the_clock();
             return self.evict(num_blocks);
           })
      .def("_resize", &Manager::resize)
      .def("reset", &Manager::reset)
      .def("_invalidate", &Manager::invalidate)
      .def("is_open", [](PyManager& self, py::handle id) { return self.is_open(id_of(id)); })
      .def_readwrite("_has_version", &PyManager::has_version)
      .def("_num_open", &Manager::num_open)
      .def("_write_rows_at",
           [](PyManager& self, const py::list& ids, uintptr_t address, int64_t room) {
             for (const py::handle id : ids)  // validate all first
               self.with_table(id_of(id),
                               [&](const BlockId*, int64_t count) { return check_room(id_of(id), count, room); });
             int32_t* row = reinterpret_cast<int32_t*>(address);
             for (const py::handle id : ids) {
               write_row(self, id_of(id), row, room);
               row += room;
             }
           })
      .def("_write_row_at",
           [](PyManager& self, py::handle id, uintptr_t address, int64_t room) {
             return write_row(self, id_of(id), reinterpret_cast<int32_t*>(address), room);
           })
      .def("_write_row",
           [](PyManager& self, py::handle id, py::handle out) {
             const IdRow row(out);
             return write_row(self, id_of(id), row.data(), row.size());
           })
      .def("_digests",
           [](PyManager& self, py::handle id, int64_t count) {
             const std::string_view name = id_of(id);
             {
               const py::gil_scoped_release unlocked;
               count = self.compute_digests(name, count);
             }
             py::list out(static_cast<size_t>(count));
             self.with_digests(name, count, [&](const Digest* digests) {
               for (int64_t i = 0; i < count; ++i)
                 PyList_SET_ITEM(out.ptr(), i,
                                 PyBytes_FromStringAndSize(reinterpret_cast<const char*>(digests[i].data()), 32));
             });
             return out;
           })
      .def("_counts",
           [](PyManager& self, int level) {
             const LevelCounts c = self.counts(static_cast<Level>(level));
             return py::make_tuple(c.num_blocks, c.free, c.evictable, c.held, c.evicted);
           })
      .def("_counters",
           [](PyManager& self) {
             const Counters c = self.counters();
             return py::make_tuple(c.matches, c.queried_tokens, c.hit_blocks, c.published_blocks, c.duplicate_blocks);
           })
      .def("bookkeeping_bytes", &Manager::bookkeeping_bytes)
      .def("_check", &Manager::check, py::call_guard<py::gil_scoped_release>());
  return type;
}

}  // namespace
}  // namespace fastkv::core

PYBIND11_MODULE(_core, module) {
  using namespace fastkv::core;
  module.doc() = "Native scheduler core of fastkv; use fastkv.scheduler, which documents it.";
  module.attr("built_from") = built_from();
  py::register_exception_translator(translate);
  const py::object manager_type = bind_manager(module);
  add_fast_calls(module, manager_type);
  bind_events(manager_type);
  bind_transfers(manager_type);
  bind_parts(module);
}
