#include "attributes.h"

#include <cmath>
#include <cstring>
#include <sstream>
#include <string_view>

#include "refusal.h"

namespace redknot::trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

char const* type_name(PluginFieldType type) { return type == PluginFieldType::kINT32 ? "int32" : "float32"; }

double read_scalar(FieldSpec const& spec, PluginField const& field) {
  if (field.type != spec.type || field.length != 1 || field.data == nullptr) {
    std::ostringstream text;
    text << "field '" << spec.name << "': expected one " << type_name(spec.type) << ", found " << field.length
         << " values of field type " << static_cast<int32_t>(field.type);
    throw Refusal(text.str());
  }
  // memcpy, since a serialised plan gives no promise about alignment.
  if (spec.type == PluginFieldType::kINT32) {
    int32_t value = 0;
    std::memcpy(&value, field.data, sizeof value);
    return value;
  }
  float value = 0.0F;
  std::memcpy(&value, field.data, sizeof value);
  return static_cast<double>(value);
}

void check_range(FieldSpec const& spec, double value) {
  if (std::isfinite(value) && value >= spec.low && value <= spec.high) {
    return;
  }
  std::ostringstream text;
  text << "field '" << spec.name << "': expected a value in [" << spec.low << ", " << spec.high << "], found " << value;
  throw Refusal(text.str());
}

void check_known(std::span<FieldSpec const> specs, std::span<PluginField const> fields) {
  for (PluginField const& field : fields) {
    std::string_view const name = field.name == nullptr ? "" : field.name;
    std::ostringstream known;
    bool found = false;
    for (FieldSpec const& spec : specs) {
      known << " '" << spec.name << "'";
      found = found || name == spec.name;
    }
    if (!found) {
      throw Refusal("unknown field '" + std::string(name) + "', the fields are" + known.str());
    }
  }
}

PluginField const* only(FieldSpec const& spec, std::span<PluginField const> fields) {
  PluginField const* match = nullptr;
  for (PluginField const& field : fields) {
    if (std::string_view(field.name) != spec.name) {
      continue;
    }
    if (match != nullptr) {
      throw Refusal("field '" + std::string(spec.name) + "' is given twice");
    }
    match = &field;
  }
  return match;
}

}  // namespace

FieldSpec integer_field(char const* name, double low, double high, std::optional<double> fallback) {
  return {name, PluginFieldType::kINT32, low, high, fallback};
}

FieldSpec real_field(char const* name, double low, double high, std::optional<double> fallback) {
  return {name, PluginFieldType::kFLOAT32, low, high, fallback};
}

Attributes Attributes::parse(std::span<FieldSpec const> specs, nvinfer1::PluginFieldCollection const* fields) {
  if (fields == nullptr || fields->nbFields < 0 || (fields->nbFields > 0 && fields->fields == nullptr)) {
    throw Refusal("no field collection was given");
  }
  std::span<PluginField const> const given(fields->fields, static_cast<size_t>(fields->nbFields));
  check_known(specs, given);
  Attributes result;
  for (FieldSpec const& spec : specs) {
    PluginField const* const field = only(spec, given);
    if (field == nullptr && !spec.fallback.has_value()) {
      throw Refusal("field '" + std::string(spec.name) + "' is missing");
    }
    double const value = field == nullptr ? *spec.fallback : read_scalar(spec, *field);
    check_range(spec, value);
    result.values_.push_back(
        {spec, spec.type == PluginFieldType::kINT32 ? static_cast<int32_t>(value) : 0, static_cast<float>(value)});
  }
  return result;
}

Attributes::Value const& Attributes::find(char const* name, PluginFieldType type) const {
  for (Value const& value : values_) {
    if (std::strcmp(value.spec.name, name) == 0 && value.spec.type == type) {
      return value;
    }
  }
  throw Refusal("no " + std::string(type_name(type)) + " field '" + name + "' is declared");
}

int64_t Attributes::integer(char const* name) const { return find(name, PluginFieldType::kINT32).integer; }

float Attributes::real(char const* name) const { return find(name, PluginFieldType::kFLOAT32).real; }

nvinfer1::PluginFieldCollection const* Attributes::serialise() {
  fields_.clear();
  for (Value const& value : values_) {
    bool const whole = value.spec.type == PluginFieldType::kINT32;
    void const* const data = whole ? static_cast<void const*>(&value.integer) : &value.real;
    fields_.emplace_back(value.spec.name, data, value.spec.type, 1);
  }
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  return &collection_;
}

}  // namespace redknot::trt
