#include "contract.h"

#include <algorithm>
#include <sstream>

#include "refusal.h"

namespace redknot::trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using nvinfer1::IDimensionExpr;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

std::string describe(nvinfer1::Dims const& dims) {
  std::ostringstream text;
  text << '[';
  for (int32_t axis = 0; axis < dims.nbDims; ++axis) {
    text << (axis == 0 ? "" : ", ") << dims.d[axis];
  }
  text << ']';
  return text.str();
}

std::string describe(TensorSpec const& spec) {
  std::ostringstream text;
  text << '[';
  for (size_t axis = 0; axis < spec.dims.size(); ++axis) {
    Dim const& dim = spec.dims[axis];
    text << (axis == 0 ? "" : ", ");
    if (dim.letter == 0) {
      text << dim.factor;
      continue;
    }
    if (dim.factor != 1) {
      text << dim.factor << ' ';
    }
    text << dim.letter;
    if (dim.divisor != 1) {
      text << " / " << dim.divisor;
    }
  }
  text << ']';
  return text.str();
}

bool plain(Dim const& dim) { return dim.letter != 0 && dim.factor == 1 && dim.divisor == 1; }

void check_rank(TensorSpec const& spec, int32_t rank) {
  if (rank != static_cast<int32_t>(spec.dims.size())) {
    throw Refusal("tensor '" + spec.name + "': expected shape " + describe(spec) + ", found " + std::to_string(rank) +
                  " dimensions");
  }
}

void check_shape(TensorSpec const& spec, nvinfer1::Dims const& dims, Bindings const& sizes) {
  check_rank(spec, dims.nbDims);
  for (size_t axis = 0; axis < spec.dims.size(); ++axis) {
    int64_t const expected = sizes.size(spec.dims[axis]);
    if (dims.d[axis] != expected) {
      std::ostringstream text;
      text << "tensor '" << spec.name << "': expected shape " << describe(spec) << " with " << expected << " in axis "
           << axis << ", found " << describe(dims);
      throw Refusal(text.str());
    }
  }
}

bool allowed(TensorSpec const& spec, DataType type) {
  return std::find(spec.types.begin(), spec.types.end(), type) != spec.types.end();
}

void check_type(TensorSpec const& spec, PluginTensorDesc const& given, PluginTensorDesc const* in) {
  bool const matches = spec.same_type_as < 0 ? allowed(spec, given.type) : given.type == in[spec.same_type_as].type;
  if (matches && given.format == TensorFormat::kLINEAR) {
    return;
  }
  std::ostringstream text;
  text << "tensor '" << spec.name << "': expected linear";
  if (spec.same_type_as >= 0) {
    text << ' ' << type_name(in[spec.same_type_as].type);
  } else {
    for (size_t index = 0; index < spec.types.size(); ++index) {
      text << (index == 0 ? " " : " or ") << type_name(spec.types[index]);
    }
  }
  text << ", found " << type_name(given.type) << " in format " << static_cast<int32_t>(given.format);
  throw Refusal(text.str());
}

IDimensionExpr const* letter_expression(char letter, Contract const& contract, nvinfer1::DimsExprs const* shapes) {
  for (size_t input = 0; input < contract.inputs.size(); ++input) {
    for (size_t axis = 0; axis < contract.inputs[input].dims.size(); ++axis) {
      Dim const& dim = contract.inputs[input].dims[axis];
      if (plain(dim) && dim.letter == letter) {
        return shapes[input].d[axis];
      }
    }
  }
  throw Refusal(std::string("no input has a dimension ") + letter);
}

}  // namespace

int64_t Bindings::operator[](char letter) const {
  int64_t const size = sizes_[index(letter)];
  if (size == kUnbound) {
    throw Refusal(std::string("dimension ") + letter + " is not known");
  }
  return size;
}

int64_t Bindings::size(Dim const& dim) const {
  if (dim.letter == 0) {
    return dim.factor;
  }
  int64_t result = 0;
  if (__builtin_mul_overflow(dim.factor, (*this)[dim.letter], &result)) {
    throw Refusal("a dimension overflows 64 bits");
  }
  if (result % dim.divisor != 0) {
    throw Refusal(std::string("expected a dimension ") + dim.letter + " that " + std::to_string(dim.divisor) +
                  " divides, found " + std::to_string(result));
  }
  return result / dim.divisor;
}

size_t Bindings::index(char letter) {
  if (letter < 'A' || letter > 'Z') {
    throw Refusal("a dimension is named by a letter A .. Z");
  }
  return static_cast<size_t>(letter - 'A');
}

TensorSpec const& Contract::tensor(int32_t position) const {
  if (position < 0 || position >= tensors()) {
    throw Refusal("expected a tensor position below " + std::to_string(tensors()) + ", found " +
                  std::to_string(position));
  }
  size_t const index = static_cast<size_t>(position);
  return index < inputs.size() ? inputs[index] : outputs[index - inputs.size()];
}

void Contract::check_counts(int32_t inputs_given, int32_t outputs_given) const {
  if (inputs_given != static_cast<int32_t>(inputs.size()) || outputs_given != static_cast<int32_t>(outputs.size())) {
    std::ostringstream text;
    text << "expected " << inputs.size() << " inputs and " << outputs.size() << " outputs, found " << inputs_given
         << " and " << outputs_given;
    throw Refusal(text.str());
  }
}

bool Contract::supports(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors_given) const {
  TensorSpec const& spec = tensor(position);
  PluginTensorDesc const& given = tensors_given[position].desc;
  if (given.format != TensorFormat::kLINEAR) {
    return false;
  }
  return spec.same_type_as < 0 ? allowed(spec, given.type) : given.type == tensors_given[spec.same_type_as].desc.type;
}

DataType Contract::output_type(int32_t output, DataType const* input_types) const {
  TensorSpec const& spec = outputs.at(static_cast<size_t>(output));
  return spec.same_type_as < 0 ? spec.types.front() : input_types[spec.same_type_as];
}

void Contract::output_shapes(nvinfer1::DimsExprs const* input_shapes, nvinfer1::DimsExprs* output_shapes,
                             nvinfer1::IExprBuilder& builder) const {
  for (size_t input = 0; input < inputs.size(); ++input) {
    check_rank(inputs[input], input_shapes[input].nbDims);
  }
  for (size_t output = 0; output < outputs.size(); ++output) {
    output_shapes[output].nbDims = static_cast<int32_t>(outputs[output].dims.size());
    for (size_t axis = 0; axis < outputs[output].dims.size(); ++axis) {
      Dim const& dim = outputs[output].dims[axis];
      IDimensionExpr const* expression = nullptr;
      if (dim.letter == 0) {
        expression = builder.constant(dim.factor);
      } else {
        expression = letter_expression(dim.letter, *this, input_shapes);
        if (dim.factor != 1) {
          expression = builder.operation(DimensionOperation::kPROD, *expression, *builder.constant(dim.factor));
        }
        if (dim.divisor != 1) {
          expression = builder.operation(DimensionOperation::kFLOOR_DIV, *expression, *builder.constant(dim.divisor));
        }
      }
      if (expression == nullptr) {
        throw Refusal("TensorRT gave no expression for a dimension of output '" + outputs[output].name + "'");
      }
      output_shapes[output].d[axis] = expression;
    }
  }
}

Bindings Contract::bind(std::vector<nvinfer1::Dims> const& input_shapes) const {
  Bindings sizes;
  for (size_t input = 0; input < inputs.size(); ++input) {
    check_rank(inputs[input], input_shapes[input].nbDims);
    for (size_t axis = 0; axis < inputs[input].dims.size(); ++axis) {
      Dim const& dim = inputs[input].dims[axis];
      int64_t const size = input_shapes[input].d[axis];
      if (size < 0) {
        throw Refusal("tensor '" + inputs[input].name + "' has an unknown size: " + describe(input_shapes[input]));
      }
      if (plain(dim) && !sizes.bound(dim.letter)) {
        sizes.bind(dim.letter, size);
      }
    }
  }
  for (size_t input = 0; input < inputs.size(); ++input) {
    check_shape(inputs[input], input_shapes[input], sizes);
  }
  return sizes;
}

Bindings Contract::bounds(nvinfer1::DynamicPluginTensorDesc const* in) const {
  Bindings sizes;
  for (size_t input = 0; input < inputs.size(); ++input) {
    TensorSpec const& spec = inputs[input];
    check_rank(spec, in[input].desc.dims.nbDims);
    check_rank(spec, in[input].max.nbDims);
    for (size_t axis = 0; axis < spec.dims.size(); ++axis) {
      Dim const& dim = spec.dims[axis];
      int64_t const most = in[input].max.d[axis];
      if (dim.letter == 0 && most != dim.factor) {
        throw Refusal("tensor '" + spec.name + "': expected shape " + describe(spec) + ", found up to " +
                      describe(in[input].max));
      }
      if (plain(dim)) {
        sizes.bind(dim.letter, sizes.bound(dim.letter) ? std::max(sizes[dim.letter], most) : most);
      }
    }
  }
  return sizes;
}

Bindings Contract::check(PluginTensorDesc const* in, PluginTensorDesc const* out) const {
  std::vector<nvinfer1::Dims> shapes;
  shapes.reserve(inputs.size());
  for (size_t input = 0; input < inputs.size(); ++input) {
    check_type(inputs[input], in[input], in);
    shapes.push_back(in[input].dims);
  }
  Bindings const sizes = bind(shapes);
  for (size_t output = 0; output < outputs.size(); ++output) {
    check_type(outputs[output], out[output], in);
    check_shape(outputs[output], out[output].dims, sizes);
  }
  return sizes;
}

int64_t volume(nvinfer1::Dims const& dims) {
  int64_t result = 1;
  for (int32_t axis = 0; axis < dims.nbDims; ++axis) {
    if (__builtin_mul_overflow(result, dims.d[axis], &result)) {
      throw Refusal("a tensor's volume overflows 64 bits");
    }
  }
  return result;
}

char const* type_name(DataType type) {
  switch (type) {
    case DataType::kFLOAT: return "float32";
    case DataType::kHALF: return "float16";
    case DataType::kBF16: return "bfloat16";
    case DataType::kFP8: return "float8";
    case DataType::kINT8: return "int8";
    case DataType::kUINT8: return "uint8";
    case DataType::kINT32: return "int32";
    case DataType::kINT64: return "int64";
    case DataType::kBOOL: return "bool";
    default: return "another type";
  }
}

}  // namespace redknot::trt
