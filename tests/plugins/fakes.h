#pragma once

// Small stand-ins for what TensorRT hands to a plugin. Dimension expressions carry the value they would have at run
// time.

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

class Expression final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
  Expression(int64_t value, bool constant) : value_(value), constant_(constant) { mImpl = this; }
  ~Expression() noexcept override = default;
  int64_t value() const { return value_; }

 private:
  bool isConstant() const override { return constant_; }
  int64_t getConstantValue() const override { return value_; }
  bool isSizeTensor() const override { return false; }

  int64_t value_;
  bool constant_;
};

class ExpressionBuilder final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  ExpressionBuilder() { mImpl = this; }
  ~ExpressionBuilder() noexcept override = default;

  Expression const* variable(int64_t value) { return keep(value, false); }

 private:
  nvinfer1::IDimensionExpr const* constant(int64_t value) override { return keep(value, true); }

  nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation op, nvinfer1::IDimensionExpr const& first,
                                            nvinfer1::IDimensionExpr const& second) override {
    int64_t const a = static_cast<Expression const&>(first).value();
    int64_t const b = static_cast<Expression const&>(second).value();
    switch (op) {
      case nvinfer1::DimensionOperation::kSUM: return keep(a + b, false);
      case nvinfer1::DimensionOperation::kPROD: return keep(a * b, false);
      case nvinfer1::DimensionOperation::kSUB: return keep(a - b, false);
      case nvinfer1::DimensionOperation::kFLOOR_DIV: return keep(a / b, false);
      default: return nullptr;
    }
  }

  nvinfer1::IDimensionExpr const* declareSizeTensor(int32_t, nvinfer1::IDimensionExpr const&,
                                                    nvinfer1::IDimensionExpr const&) override {
    return nullptr;
  }

  Expression const* keep(int64_t value, bool constant) {
    kept_.push_back(std::make_unique<Expression>(value, constant));
    return kept_.back().get();
  }

  std::vector<std::unique_ptr<Expression>> kept_;
};

class ResourceContext final : public nvinfer1::IPluginResourceContext {
 public:
  nvinfer1::IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
  nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
};

// Keeps what plugins report.
class Logger final : public nvinfer1::ILogger, public nvinfer1::ILoggerFinder {
 public:
  ~Logger() noexcept override = default;
  void log(Severity, nvinfer1::AsciiChar const* message) noexcept override { last_ = message; }
  nvinfer1::ILogger* findLogger() override { return this; }
  std::string take() { return std::exchange(last_, {}); }

 private:
  std::string last_;
};
