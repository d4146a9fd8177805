// The parts of the Python module that live in files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace fastkv::core {

void bind_parts(pybind11::module_& module);     // pools, index, digests
void bind_transfers(pybind11::object manager);  // the manager's copies between levels

}  // namespace fastkv::core
