// How an op refuses its arguments: by a RuntimeError whose text the Python wrappers turn into the class that it names
// (python/kvpager/ops/device_errors.py).
#pragma once
#include <stdexcept>
#include <string>

namespace kvpager {

[[noreturn]] inline void fail_argument(const char* argument, const std::string& wanted, const std::string& got) {
  throw std::runtime_error(std::string("ArgumentError: `") + argument + "`: wanted " + wanted + ", got " + got);
}

[[noreturn]] inline void fail_slot(const char* argument, const std::string& wanted, const std::string& got) {
  throw std::runtime_error(std::string("SlotError: `") + argument + "`: wanted " + wanted + ", got " + got);
}

}  // namespace kvpager
