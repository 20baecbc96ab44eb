#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace redknot::trt {

// One field of a plugin: a scalar int32 or float32 inside [low, high], with a default unless it is required.
struct FieldSpec {
  char const* name;
  nvinfer1::PluginFieldType type;
  double low;
  double high;
  std::optional<double> fallback = std::nullopt;
};

FieldSpec integer_field(char const* name, double low, double high, std::optional<double> fallback = std::nullopt);
FieldSpec real_field(char const* name, double low, double high, std::optional<double> fallback = std::nullopt);

// The checked field values of one plugin. Immutable; what it serialises, it parses back to the same values.
class Attributes {
 public:
  // Throws Refusal on an unknown, missing, repeated, mistyped or out-of-range field, naming it.
  static Attributes parse(std::span<FieldSpec const> specs, nvinfer1::PluginFieldCollection const* fields);

  int64_t integer(char const* name) const;
  float real(char const* name) const;
  bool flag(char const* name) const { return integer(name) != 0; }

  // Points into `*this`: valid as long as it lives and does not move.
  nvinfer1::PluginFieldCollection const* serialise();

 private:
  struct Value {
    FieldSpec spec;
    int32_t integer = 0;
    float real = 0.0F;
  };

  Value const& find(char const* name, nvinfer1::PluginFieldType type) const;

  std::vector<Value> values_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace redknot::trt
