#pragma once

// One plugin and its tensors, as a test describes them to this program.

#include <NvInferRuntime.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct Field {
  std::string name;
  nvinfer1::PluginFieldType type;
  std::vector<char> bytes;
};

struct Tensor {
  std::string name;
  nvinfer1::DataType type;
  nvinfer1::Dims dims;
  std::string path;  // bytes of an input, or where those of an output go; "-": none

  int64_t bytes() const;
  nvinfer1::PluginTensorDesc desc() const { return {dims, type, nvinfer1::TensorFormat::kLINEAR, 1.0F}; }
};

struct Manifest {
  std::string plugin;
  std::vector<Field> fields;
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::map<std::string, int64_t> aligned;  // bytes that the addresses of inputs must be multiples of
  int32_t communicator_group = -1;         // a communicator of one rank is handed in for this group

  std::vector<nvinfer1::PluginTensorDesc> input_descs() const;
  std::vector<nvinfer1::PluginTensorDesc> output_descs() const;
};

// Throws std::runtime_error naming the line that cannot be read.
Manifest read_manifest(std::string const& path);
