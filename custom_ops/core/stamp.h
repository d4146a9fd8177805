// SHA-256 of the sources that this library was built from, as hexadecimal digits; empty when nobody said.
#pragma once

namespace fastkv::core {

const char* built_from();

}  // namespace fastkv::core
