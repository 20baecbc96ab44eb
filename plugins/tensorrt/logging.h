#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <string>

namespace redknot::trt {

// The finder TensorRT hands in through setLoggerFinder; before that, messages go to stderr.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

void log_error(std::string const& where, char const* message) noexcept;

// Runs `body` at the plugin boundary: what it throws is logged under `where`, and `failed` is returned.
template <typename Result, typename Body>
Result guarded(std::string const& where, Result failed, Body&& body) noexcept {
  try {
    return body();
  } catch (std::exception const& error) {
    log_error(where, error.what());
    return failed;
  }
}

}  // namespace redknot::trt
