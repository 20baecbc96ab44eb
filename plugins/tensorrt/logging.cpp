#include "logging.h"

#include <atomic>
#include <cstdio>
#include <new>

namespace redknot::trt {
namespace {

// TensorRT's C interface has no other place to keep the finder: it is handed in once per loaded library.
std::atomic<nvinfer1::ILoggerFinder*>& finder() noexcept {
  static std::atomic<nvinfer1::ILoggerFinder*> instance{nullptr};
  return instance;
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* value) noexcept { finder().store(value); }

void log_error(std::string const& where, char const* message) noexcept {
  try {
    std::string const text = "redknot::" + where + ": " + message;
    nvinfer1::ILoggerFinder* const source = finder().load();
    nvinfer1::ILogger* const logger = source == nullptr ? nullptr : source->findLogger();
    if (logger != nullptr) {
      logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
    } else {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
  } catch (std::bad_alloc const&) {
    std::fputs("redknot: out of memory while reporting an error\n", stderr);
  }
}

}  // namespace redknot::trt
