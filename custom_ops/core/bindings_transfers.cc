// fastkv._core, continued: the manager's copies between levels, for fastkv.scheduler.tiers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "python_manager.h"
#include "python_tokens.h"

namespace fastkv::core {
namespace {

// (transfer, device ids, host ids), or None when there is nothing to move.
py::object to_tuple(const BegunTransfer& begun) {
  if (!begun.id) return py::none();
  return py::make_tuple(begun.id, to_array(begun.device), to_array(begun.host));
}

template <typename Fn>
void add(py::object& type, const char* name, Fn fn) {
  type.attr(name) = py::cpp_function(fn, py::name(name), py::is_method(type));
}

}  // namespace

void bind_transfers(py::object type) {
  add(type, "_begin_offload", [](PyManager& self, py::handle id, int64_t min_hits) {
    return to_tuple(self.begin_offload(id_of(id), min_hits));
  });
  add(type, "_begin_write_back",
      [](PyManager& self, int64_t num_victims) { return to_tuple(self.begin_write_back(num_victims)); });
  add(type, "_begin_load", [](PyManager& self, py::handle id) { return to_tuple(self.begin_load(id_of(id))); });
  add(type, "_cached_blocks", [](PyManager& self, py::handle id) { return self.cached_blocks(id_of(id)); });
  add(type, "_begin_fetch", [](PyManager& self, py::handle id, int64_t first, int64_t num_blocks) {
    return to_tuple(self.begin_fetch(id_of(id), first, num_blocks));
  });
  add(type, "_end_transfer", [](PyManager& self, int64_t transfer, int64_t num_landed, bool store) {
    return to_tuple(self.end_transfer(transfer, num_landed, store));
  });
  add(type, "_transfer_digests", [](PyManager& self, int64_t transfer) {
    std::vector<Digest> digests;
    {
      const py::gil_scoped_release unlocked;
      digests = self.transfer_digests(transfer);
    }
    py::list out;
    for (const Digest& digest : digests)
      out.append(py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size()));
    return out;
  });
  add(type, "_num_transfers", [](PyManager& self) { return self.num_transfers(); });
  add(type, "_forget_level", [](PyManager& self, int level) { return self.forget_level(static_cast<Level>(level)); });
}

}  // namespace fastkv::core
