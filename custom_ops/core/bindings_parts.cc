// fastkv._core, continued: block pool, prefix index and digests by themselves.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <set>

#include "bindings.h"
#include "prefix_index.h"
#include "python_tokens.h"
#include "sha256.h"

namespace fastkv::core {
namespace {

void free_all(BlockPool& pool, const std::vector<BlockId>& ids) {
  std::set<BlockId> seen;
  for (const BlockId id : ids)
    if (!pool.is_used(id) || !seen.insert(id).second)
      throw RequestFault("cannot free " + std::string(level_name(pool.level())) + " block " + std::to_string(id) +
                         ": it is out of range, free already or given twice; free each allocated id once");
  for (const BlockId id : ids) pool.free(id);
}

// A PrefixIndex that takes whole prefixes from Python.
class PyIndex {
 public:
  PyIndex(int32_t block_size, BlockPool& device, BlockPool& host, const std::string& policy, uint64_t seed,
          uint64_t hash_mask)
      : index(block_size, device, host, policy_of(policy), seed, hash_mask) {}

  std::vector<NodeId> match(py::handle tokens, const std::vector<std::pair<int64_t, std::string>>& extras) {
    const Prefix prefix(tokens, extras);
    Row<NodeId> path;
    index.match({prefix.view.data(), prefix.extras}, prefix.view.size() / index.block_size(), path);
    return {path.begin(), path.end()};
  }

  // Publish the leading blocks.size() blocks and hold them; blocks that are published already are swapped.
  std::pair<std::vector<NodeId>, std::vector<BlockId>> publish(
      py::handle tokens, const std::vector<std::pair<int64_t, std::string>>& extras, std::vector<BlockId> blocks) {
    const Prefix prefix(tokens, extras);
    const auto count = static_cast<int64_t>(blocks.size());
    if (count > prefix.view.size() / index.block_size()) throw RequestFault("more blocks than full blocks of tokens");
    Row<NodeId> path;
    index.reserve();  // the pool may have grown
    index.publish({prefix.view.data(), prefix.extras}, count, path, blocks.data());
    return {{path.begin(), path.end()}, blocks};
  }

  void evict(int64_t count) {
    if (count < 0 || count > index.num_evictable(kDevice))
      throw OutOfBlocksFault(count, index.num_evictable(kDevice), index.num_nodes(), kDevice);
    index.evict(kDevice, count);
  }

  PrefixIndex index;

 private:
  struct Prefix {
    Prefix(py::handle tokens, const std::vector<std::pair<int64_t, std::string>>& given) : view(tokens) {
      for (const auto& [block, bytes] : given) extras.push_back({block, bytes});
    }
    TokenView view;
    std::vector<Extra> extras;
  };
};

}  // namespace

void bind_parts(py::module_& module) {
  py::class_<BlockPool>(module, "BlockPool")
      .def(py::init(
          [](int32_t num_blocks, int level) { return new BlockPool(num_blocks, static_cast<Level>(level), true); }))
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def_property_readonly("num_draining", &BlockPool::num_draining)
      .def("is_used", &BlockPool::is_used)
      .def("allocate",
           [](BlockPool& self, int64_t count) {
             if (count < 0)
               throw RequestFault("cannot allocate " + std::to_string(count) + " blocks; ask for 0 or more");
             if (count > self.num_free())
               throw OutOfBlocksFault(count, self.num_free(), self.num_blocks(), self.level());
             std::vector<BlockId> ids(static_cast<size_t>(count));
             self.allocate(static_cast<int32_t>(count), ids.data());
             return to_array(ids);
           })
      .def("free", free_all)
      .def("resize", &BlockPool::resize)
      .def("check", &BlockPool::check);

  py::class_<PyIndex>(module, "PrefixIndex")
      .def(py::init<int32_t, BlockPool&, BlockPool&, const std::string&, uint64_t, uint64_t>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>())
      .def("match", &PyIndex::match)
      .def("publish", &PyIndex::publish)
      .def("hold",
           [](PyIndex& self, const std::vector<NodeId>& path) {
             self.index.hold(path.data(), static_cast<int64_t>(path.size()));
           })
      .def("release",
           [](PyIndex& self, const std::vector<NodeId>& path) {
             self.index.unhold(path.data(), static_cast<int64_t>(path.size()));
           })
      .def("evict", &PyIndex::evict)
      .def("device_block", [](PyIndex& self, NodeId id) { return self.index.node(id).block[kDevice]; })
      .def("num_nodes", [](PyIndex& self) { return self.index.num_nodes(); })
      .def("num_evictable", [](PyIndex& self) { return self.index.num_evictable(kDevice); })
      .def("check", [](PyIndex& self) { self.index.check(); });

  module.def("sha256", [](const py::bytes& data) {
    const std::string_view view = data;
    Sha256 hash;
    hash.update(view.data(), view.size());
    const Digest digest = hash.finish();
    return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
  });
  module.def("use_sha_hardware", &Sha256::use_hardware);
  module.def("has_sha_hardware", &Sha256::has_hardware);
}

}  // namespace fastkv::core
