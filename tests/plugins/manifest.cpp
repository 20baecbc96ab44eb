#include "manifest.h"

#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

namespace {

using nvinfer1::DataType;

DataType parse_type(std::string const& name) {
  static std::map<std::string, DataType> const types = {{"float32", DataType::kFLOAT}, {"bfloat16", DataType::kBF16},
                                                        {"int8", DataType::kINT8},     {"uint8", DataType::kUINT8},
                                                        {"int32", DataType::kINT32},   {"int64", DataType::kINT64}};
  auto const found = types.find(name);
  if (found == types.end()) throw std::runtime_error("unknown type " + name);
  return found->second;
}

int64_t size_of(DataType type) {
  switch (type) {
    case DataType::kINT64: return 8;
    case DataType::kFLOAT:
    case DataType::kINT32: return 4;
    case DataType::kBF16: return 2;
    default: return 1;
  }
}

template <typename T>
std::vector<char> bytes_of(T value) {
  std::vector<char> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

// field int32 NAME VALUE
Field parse_field(std::istringstream& words) {
  std::string type;
  Field field;
  double value = 0;
  if (!(words >> type >> field.name >> value)) throw std::runtime_error("a field is: field TYPE NAME VALUE");
  bool const whole = type == "int32";
  field.type = whole ? nvinfer1::PluginFieldType::kINT32 : nvinfer1::PluginFieldType::kFLOAT32;
  field.bytes = whole ? bytes_of(static_cast<int32_t>(value)) : bytes_of(static_cast<float>(value));
  return field;
}

// input TYPE NAME PATH SIZE...
Tensor parse_tensor(std::istringstream& words) {
  std::string type;
  Tensor tensor;
  if (!(words >> type >> tensor.name >> tensor.path))
    throw std::runtime_error("a tensor is: input TYPE NAME PATH SIZE...");
  tensor.type = parse_type(type);
  tensor.dims.nbDims = 0;
  int64_t size = 0;
  while (words >> size) {
    if (tensor.dims.nbDims == nvinfer1::Dims::MAX_DIMS) throw std::runtime_error("a tensor has too many sizes");
    tensor.dims.d[tensor.dims.nbDims++] = size;
  }
  return tensor;
}

}  // namespace

int64_t Tensor::bytes() const {
  int64_t result = size_of(type);
  for (int32_t axis = 0; axis < dims.nbDims; ++axis) result *= dims.d[axis];
  return result;
}

std::vector<nvinfer1::PluginTensorDesc> Manifest::input_descs() const {
  std::vector<nvinfer1::PluginTensorDesc> descs;
  for (Tensor const& tensor : inputs) descs.push_back(tensor.desc());
  return descs;
}

std::vector<nvinfer1::PluginTensorDesc> Manifest::output_descs() const {
  std::vector<nvinfer1::PluginTensorDesc> descs;
  for (Tensor const& tensor : outputs) descs.push_back(tensor.desc());
  return descs;
}

Manifest read_manifest(std::string const& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  Manifest manifest;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "plugin") {
      words >> manifest.plugin;
    } else if (kind == "field") {
      manifest.fields.push_back(parse_field(words));
    } else if (kind == "input") {
      manifest.inputs.push_back(parse_tensor(words));
    } else if (kind == "output") {
      manifest.outputs.push_back(parse_tensor(words));
    } else if (kind == "aligned") {
      std::string name;
      int64_t bytes = 0;
      if (!(words >> name >> bytes)) throw std::runtime_error("an alignment is: aligned NAME BYTES");
      manifest.aligned[name] = bytes;
    } else if (kind == "communicator") {
      words >> manifest.communicator_group;
    } else {
      throw std::runtime_error(path + ": unknown line: " + line);
    }
  }
  return manifest;
}
