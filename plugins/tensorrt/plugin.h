#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

#include "attributes.h"
#include "operator.h"

namespace redknot::trt {

inline constexpr char const* kNamespace = "redknot";
inline constexpr char const* kVersion = "1";

// What TensorRT sees of an operator, in the build and in the runtime phase. A refusal is logged and returned as a
// status.
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(OperatorKind const& kind, Attributes attributes, std::shared_ptr<Operator const> op);

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  nvinfer1::AsciiChar const* getPluginName() const noexcept override { return kind_.name; }
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t outputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t outputs, nvinfer1::DataType const* input_types,
                             int32_t inputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* input_shapes, int32_t inputs, nvinfer1::DimsExprs const*, int32_t,
                          nvinfer1::DimsExprs* output_shapes, int32_t outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t inputs,
                                 int32_t outputs) noexcept override;
  int32_t getNbOutputs() const noexcept override;
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t outputs) const noexcept override;

  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t inputs, nvinfer1::PluginTensorDesc const* out,
                        int32_t outputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
  OperatorKind const& kind_;
  Attributes attributes_;
  std::shared_ptr<Operator const> operator_;
};

class PluginCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit PluginCreator(OperatorKind const& kind);

  nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
  nvinfer1::AsciiChar const* getPluginName() const noexcept override { return kind_.name; }
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  OperatorKind const& kind_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace redknot::trt
