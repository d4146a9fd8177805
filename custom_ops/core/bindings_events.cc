// fastkv._core, continued: the event log, as runs of blocks. fastkv/scheduler/events.py makes events of them.
#include "python_manager.h"

namespace fastkv::core {
namespace {

py::bytes to_bytes(const Digest& digest) {
  return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

// Whether `event` continues the run that ends with `before`, so that one message can carry both.
bool continues(const Event& before, const Event& event) {
  if (before.kind != event.kind || before.level != event.level || event.kind == Event::kCleared) return false;
  return event.kind == Event::kRemoved || (event.has_parent && event.parent == before.digest);
}

// (kind, level, digests, parent digest or None, token ids, identity bytes of each block, those of the prefix's root)
py::tuple run_of(const Event* from, const Event* to) {
  py::list digests, extras, tokens;
  for (const Event* event = from; event < to; ++event) {
    if (event->kind == Event::kCleared) continue;
    digests.append(to_bytes(event->digest));
    if (event->kind == Event::kRemoved) continue;
    extras.append(py::bytes(event->extra));
    for (const int32_t token : event->tokens) tokens.append(token);
  }
  return py::make_tuple(static_cast<int>(from->kind), static_cast<int>(from->level), digests,
                        from->has_parent ? py::object(to_bytes(from->parent)) : py::none(), tokens, extras,
                        py::bytes(from->root_extra));
}

}  // namespace

void bind_events(py::object manager_type) {
  manager_type.attr("_take_events") = py::cpp_function(
      [](PyManager& self, bool everything) {
        const std::vector<Event> events = self.take_events(everything);
        py::list runs;
        const Event* end = events.data() + events.size();
        for (const Event* from = events.data(); from < end;) {
          const Event* to = from + 1;
          while (to < end && continues(*(to - 1), *to)) ++to;
          runs.append(run_of(from, to));
          from = to;
        }
        return runs;
      },
      py::is_method(manager_type), py::name("_take_events"));
}

}  // namespace fastkv::core
