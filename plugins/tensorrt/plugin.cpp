#include "plugin.h"

#include <new>
#include <string>

#include "logging.h"
#include "refusal.h"

namespace redknot::trt {
namespace {

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kDone = 0;
constexpr int32_t kRefused = 1;

void check_pointer(TensorSpec const& spec, PluginTensorDesc const& desc, void const* pointer) {
  if (pointer == nullptr && volume(desc.dims) > 0) {
    throw Refusal("tensor '" + spec.name + "': expected a device address, found null");
  }
}

void check_given(void const* descriptions) {
  if (descriptions == nullptr) {
    throw Refusal("no tensor descriptions were given");
  }
}

}  // namespace

Plugin::Plugin(OperatorKind const& kind, Attributes attributes, std::shared_ptr<Operator const> op)
    : kind_(kind), attributes_(std::move(attributes)), operator_(std::move(op)) {}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  return guarded<nvinfer1::IPluginV3*>(kind_.name, nullptr, [&] { return new Plugin(kind_, attributes_, operator_); });
}

int32_t Plugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const* out,
                                int32_t outputs) noexcept {
  return guarded(kind_.name, kRefused, [&] {
    Contract const& contract = operator_->contract();
    contract.check_counts(inputs, outputs);
    check_given(in);
    check_given(out);
    (void)contract.bounds(in);
    return kDone;
  });
}

int32_t Plugin::getOutputDataTypes(nvinfer1::DataType* output_types, int32_t outputs,
                                   nvinfer1::DataType const* input_types, int32_t inputs) const noexcept {
  return guarded(kind_.name, kRefused, [&] {
    Contract const& contract = operator_->contract();
    contract.check_counts(inputs, outputs);
    for (int32_t output = 0; output < outputs; ++output) {
      output_types[output] = contract.output_type(output, input_types);
    }
    return kDone;
  });
}

int32_t Plugin::getOutputShapes(nvinfer1::DimsExprs const* input_shapes, int32_t inputs, nvinfer1::DimsExprs const*,
                                int32_t, nvinfer1::DimsExprs* output_shapes, int32_t outputs,
                                nvinfer1::IExprBuilder& builder) noexcept {
  return guarded(kind_.name, kRefused, [&] {
    operator_->contract().check_counts(inputs, outputs);
    operator_->contract().output_shapes(input_shapes, output_shapes, builder);
    return kDone;
  });
}

bool Plugin::supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t inputs,
                                       int32_t outputs) noexcept {
  return guarded(kind_.name, false, [&] {
    operator_->contract().check_counts(inputs, outputs);
    return operator_->contract().supports(position, tensors);
  });
}

int32_t Plugin::getNbOutputs() const noexcept { return static_cast<int32_t>(operator_->contract().outputs.size()); }

size_t Plugin::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*,
                                int32_t outputs) const noexcept {
  return guarded(kind_.name, size_t{0}, [&] {
    operator_->contract().check_counts(inputs, outputs);
    return operator_->workspace(operator_->contract().bounds(in));
  });
}

int32_t Plugin::onShapeChange(PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const* out,
                              int32_t outputs) noexcept {
  return guarded(kind_.name, kRefused, [&] {
    operator_->contract().check_counts(inputs, outputs);
    check_given(in);
    check_given(out);
    operator_->check(operator_->contract().check(in, out));
    return kDone;
  });
}

int32_t Plugin::enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return guarded(kind_.name, kRefused, [&] {
    check_given(in);
    check_given(out);
    Contract const& contract = operator_->contract();
    Bindings const sizes = contract.check(in, out);
    operator_->check(sizes);
    for (size_t input = 0; input < contract.inputs.size(); ++input) {
      check_pointer(contract.inputs[input], in[input], inputs[input]);
    }
    bool empty = true;
    for (size_t output = 0; output < contract.outputs.size(); ++output) {
      check_pointer(contract.outputs[output], out[output], outputs[output]);
      empty = empty && volume(out[output].dims) == 0;
    }
    if (empty) {
      return kDone;
    }
    if (workspace == nullptr && operator_->workspace(sizes) > 0) {
      throw Refusal("expected a workspace, found null");
    }
    Status const status = operator_->launch({in, out, inputs, outputs, workspace, stream, sizes});
    if (status != Status::kSuccess) {
      throw Refusal(std::string("the kernel was not launched: ") + status_text(status));
    }
    return kDone;
  });
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

nvinfer1::PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept {
  return guarded<nvinfer1::PluginFieldCollection const*>(kind_.name, nullptr, [&] { return attributes_.serialise(); });
}

PluginCreator::PluginCreator(OperatorKind const& kind) : kind_(kind) {
  for (FieldSpec const& spec : kind.fields) {
    fields_.emplace_back(spec.name, nullptr, spec.type, 1);
  }
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginV3* PluginCreator::createPlugin(nvinfer1::AsciiChar const*,
                                                 nvinfer1::PluginFieldCollection const* fields,
                                                 nvinfer1::TensorRTPhase) noexcept {
  return guarded<nvinfer1::IPluginV3*>(kind_.name, nullptr, [&] {
    Attributes attributes = Attributes::parse(kind_.fields, fields);
    std::shared_ptr<Operator const> op = kind_.make(attributes);
    return new Plugin(kind_, std::move(attributes), std::move(op));
  });
}

}  // namespace redknot::trt
