#pragma once

#include <stdexcept>

namespace redknot::trt {

// Why a plugin does not do what it was asked. Thrown below the plugin boundary, logged and turned into a status at it.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace redknot::trt
