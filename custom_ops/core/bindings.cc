// fastkv._core: the scheduler core as Python sees it. Converts at the border, calls, converts back; decides nothing.
//
// The GIL is released where a call works long enough to pay for it (thousands of blocks, digests). A thread that waits
// for the manager's mutex may hold the GIL: whoever has the mutex never asks for the GIL before giving it back.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "manager.h"
#include "python_tokens.h"

namespace fastkv::core {
namespace {

constexpr int64_t kLongTokens = 1 << 16;  // work on fewer tokens ends before another thread could use the GIL

template <typename Fn>
auto maybe_without_gil(bool release, Fn fn) {
  std::optional<py::gil_scoped_release> unlocked;
  if (release) unlocked.emplace();
  return fn();
}

void raise_python_error(std::exception_ptr pending) {
  const auto raise = [](const char* kind, auto... arguments) {
    const py::object type = py::module_::import("fastkv.errors").attr(kind);
    PyErr_SetObject(type.ptr(), type(arguments...).ptr());
  };
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const OutOfBlocksFault& fault) {
    raise("OutOfBlocksError", fault.requested, fault.available, fault.num_blocks, level_name(fault.level));
  } catch (const RequestFault& fault) {
    raise("RequestError", fault.what());
  } catch (const InvariantFault& fault) {
    raise("InvariantError", fault.what());
  }
}

// What Manager::match found; arrays are made when somebody looks.
struct PyMatch {
  Match found;
  int64_t block_size;
  int64_t device_tokens() const { return static_cast<int64_t>(found.device_blocks.size()) * block_size; }
  int64_t tokens() const { return device_tokens() + static_cast<int64_t>(found.host_blocks.size()) * block_size; }
};

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

void bind_manager(py::module_& module) {
  py::class_<PyMatch>(module, "MatchResult")
      .def_property_readonly("device_blocks", [](const PyMatch& m) { return to_array(m.found.device_blocks); })
      .def_property_readonly("host_blocks", [](const PyMatch& m) { return to_array(m.found.host_blocks); })
      .def_property_readonly("num_tokens", &PyMatch::tokens)
      .def_property_readonly("num_device_tokens", &PyMatch::device_tokens);

  py::class_<Manager>(module, "Manager")
      .def(py::init([](int32_t device, int32_t host, int32_t block_size, bool caching, const std::string& policy,
                       int64_t max_pinned, uint64_t seed, uint64_t hash_mask) {
        ManagerOptions options;
        options.num_device_blocks = device;
        options.num_host_blocks = host;
        options.block_size = block_size;
        options.enable_prefix_caching = caching;
        options.policy = policy_of(policy);
        options.max_pinned_blocks = max_pinned;
        options.seed = seed;
        options.hash_mask = hash_mask;
        return std::make_unique<Manager>(options);
      }))
      .def("open",
           [](Manager& self, py::handle id, py::handle tokens, const py::dict& extras,
              const std::vector<std::pair<int64_t, int64_t>>& images, int priority, double ttl_s) {
             const TokenView view(tokens);
             std::vector<Span> spans;
             for (const auto& [start, end] : images) spans.push_back({start, end});
             self.open(id_of(id), view.data(), view.size(), extras_of(extras), std::move(spans), priority, ttl_s);
           })
      .def("open_plain",
           [](Manager& self, py::handle id, py::handle tokens) {
             const TokenView view(tokens);
             self.open(id_of(id), view.data(), view.size(), {}, {}, 0, std::numeric_limits<double>::infinity());
           })
      .def("match",
           [](Manager& self, py::handle id) {
             const std::string_view name = id_of(id);
             const bool release = self.num_tokens(name) >= kLongTokens;
             return PyMatch{maybe_without_gil(release, [&] { return self.match(name); }), self.block_size()};
           })
      .def("allocate",
           [](Manager& self, py::handle id, int64_t count) {
             std::vector<BlockId> ids;
             int64_t left = 0;
             if (!self.try_allocate(id_of(id), count, ids, &left))
               throw OutOfBlocksFault(count, left, self.counts(kDevice).num_blocks, kDevice);
             return to_array(ids);
           })
      .def("try_allocate",
           [](Manager& self, py::handle id, int64_t count) -> py::object {
             std::vector<BlockId> ids;
             int64_t left = 0;
             if (!self.try_allocate(id_of(id), count, ids, &left)) return py::none();
             return to_array(ids);
           })
      .def("try_reserve",
           [](Manager& self, py::handle id, int64_t num_drafts) -> py::object {
             std::vector<BlockId> ids;
             if (!self.try_reserve(id_of(id), num_drafts, ids)) return py::none();
             return to_array(ids);
           })
      .def("trim", [](Manager& self, py::handle id) { return self.trim(id_of(id)); })
      .def("blocks_needed",
           [](Manager& self, py::handle id, int64_t tokens) { return self.blocks_needed(id_of(id), tokens); })
      .def("append",
           [](Manager& self, py::handle id, py::handle tokens) {
             const TokenView view(tokens, true);
             self.append(id_of(id), view.data(), view.size());
           })
      .def("publish",
           [](Manager& self, py::handle id, int64_t computed) {
             const std::string_view name = id_of(id);
             return maybe_without_gil(computed >= kLongTokens, [&] { return self.publish(name, computed); });
           })
      .def("preempt", [](Manager& self, py::handle id) { self.preempt(id_of(id)); })
      .def("release", [](Manager& self, py::handle id) { self.release(id_of(id)); })
      .def("fork",
           [](Manager& self, py::handle parent, py::handle child) {
             std::vector<std::pair<BlockId, BlockId>> copies;
             for (const BlockCopy& copy : self.fork(id_of(parent), id_of(child)))
               copies.emplace_back(copy.source, copy.target);
             return copies;
           })
      .def("pin", [](Manager& self, py::handle id, int64_t blocks) { return self.pin(id_of(id), blocks); })
      .def("unpin", &Manager::unpin)
      .def("resize", &Manager::resize)
      .def("reset", &Manager::reset)
      .def("invalidate", &Manager::invalidate)
      .def("tick", &Manager::tick)
      .def_property_readonly("uses_priorities", &Manager::uses_priorities)
      .def("num_tokens", [](Manager& self, py::handle id) { return self.num_tokens(id_of(id)); })
      .def("num_computed_tokens", [](Manager& self, py::handle id) { return self.num_computed_tokens(id_of(id)); })
      .def("is_open", [](Manager& self, py::handle id) { return self.is_open(id_of(id)); })
      .def("num_open", &Manager::num_open)
      .def("block_table",
           [](Manager& self, py::handle id) {
             return self.with_table(
                 id_of(id), [](const BlockId* table, int64_t count) { return py::array_t<int32_t>(count, table); });
           })
      .def("write_rows_at",
           [](Manager& self, const py::list& ids, uintptr_t address, int64_t room) {
             for (const py::handle id : ids)  // validate all first
               self.with_table(id_of(id),
                               [&](const BlockId*, int64_t count) { return check_room(id_of(id), count, room); });
             int32_t* row = reinterpret_cast<int32_t*>(address);
             for (const py::handle id : ids) {
               write_row(self, id_of(id), row, room);
               row += room;
             }
           })
      .def("write_row_at",
           [](Manager& self, py::handle id, uintptr_t address, int64_t room) {
             return write_row(self, id_of(id), reinterpret_cast<int32_t*>(address), room);
           })
      .def("write_row",
           [](Manager& self, py::handle id, const py::array& out) {
             if (!py::isinstance<py::array_t<int32_t>>(out) || out.ndim() != 1 || !(out.flags() & py::array::c_style) ||
                 !out.writeable())
               throw RequestFault("out_row must be a writable, contiguous, one-dimensional int32 array");
             return write_row(self, id_of(id), static_cast<int32_t*>(const_cast<void*>(out.data())), out.size());
           })
      .def("digests",
           [](Manager& self, py::handle id, int64_t count) {
             const std::string_view name = id_of(id);
             std::vector<Digest> found;
             {
               const py::gil_scoped_release unlocked;
               found = self.digests(name, count);
             }
             py::list out;
             for (const Digest& digest : found)
               out.append(py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size()));
             return out;
           })
      .def("counts",
           [](Manager& self, int level) {
             const LevelCounts c = self.counts(static_cast<Level>(level));
             return py::make_tuple(c.num_blocks, c.free, c.evictable, c.held, c.evicted);
           })
      .def("counters",
           [](Manager& self) {
             const Counters c = self.counters();
             return py::make_tuple(c.matches, c.queried_tokens, c.hit_blocks, c.published_blocks, c.duplicate_blocks);
           })
      .def("bookkeeping_bytes", &Manager::bookkeeping_bytes)
      .def("check", &Manager::check, py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace fastkv::core

PYBIND11_MODULE(_core, module) {
  using namespace fastkv::core;
  module.doc() = "Native scheduler core of fastkv; use fastkv.scheduler, which documents it.";
  py::register_exception_translator(raise_python_error);
  bind_manager(module);
  bind_parts(module);
}
