#include "contract.h"

#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

int32_t count_of(std::vector<PluginTensorDesc> const& descs) { return static_cast<int32_t>(descs.size()); }

std::vector<DynamicPluginTensorDesc> dynamic(std::vector<PluginTensorDesc> const& descs) {
  std::vector<DynamicPluginTensorDesc> result;
  for (PluginTensorDesc const& desc : descs) {
    result.push_back({desc, desc.dims, desc.dims, desc.dims});
    for (int32_t axis = 0; axis < desc.dims.nbDims; ++axis) result.back().desc.dims.d[axis] = -1;
  }
  return result;
}

std::vector<DynamicPluginTensorDesc> dynamic(std::vector<PluginTensorDesc> const& in,
                                             std::vector<PluginTensorDesc> const& out) {
  std::vector<DynamicPluginTensorDesc> result = dynamic(in);
  for (DynamicPluginTensorDesc const& desc : dynamic(out)) result.push_back(desc);
  return result;
}

std::vector<Field> serialised(nvinfer1::IPluginV3& plugin) {
  std::vector<Field> result;
  nvinfer1::PluginFieldCollection const* const fields = faces(plugin).runtime->getFieldsToSerialize();
  for (int32_t index = 0; fields != nullptr && index < fields->nbFields; ++index) {
    nvinfer1::PluginField const& field = fields->fields[index];
    auto const* const bytes = static_cast<char const*>(field.data);
    result.push_back({field.name, field.type, std::vector<char>(bytes, bytes + 4 * field.length)});
  }
  return result;
}

bool same(std::vector<Field> const& a, std::vector<Field> const& b) {
  bool equal = a.size() == b.size();
  for (size_t index = 0; equal && index < a.size(); ++index) {
    equal = a[index].name == b[index].name && a[index].type == b[index].type && a[index].bytes == b[index].bytes;
  }
  return equal;
}

void check_fields(nvinfer1::IPluginCreatorV3One& creator, Manifest const& manifest, Logger& logger, Checks& checks) {
  auto const refuses = [&](std::vector<Field> const& fields, std::string const& mention, std::string const& what) {
    for (TensorRTPhase const phase : {TensorRTPhase::kBUILD, TensorRTPhase::kRUNTIME}) {
      (void)logger.take();
      checks.expect_refusal(create(creator, fields, phase) == nullptr, logger, mention, what);
    }
  };
  std::vector<Field> unknown = manifest.fields;
  unknown.push_back({"no_such_field", nvinfer1::PluginFieldType::kINT32, std::vector<char>(4)});
  refuses(unknown, "no_such_field", "an unknown field is refused");
  std::vector<Field> twice = manifest.fields;
  twice.push_back(manifest.fields.front());
  refuses(twice, manifest.fields.front().name, "a repeated field is refused");
  for (size_t index = 0; index < manifest.fields.size(); ++index) {
    std::string const& name = manifest.fields[index].name;
    std::vector<Field> mistyped = manifest.fields;
    mistyped[index].type = nvinfer1::PluginFieldType::kFLOAT64;
    refuses(mistyped, name, "a mistyped field is refused: " + name);
    std::vector<Field> outside = manifest.fields;
    bool const whole = outside[index].type == nvinfer1::PluginFieldType::kINT32;
    int32_t const least = -1;
    float const nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(outside[index].bytes.data(), whole ? static_cast<void const*>(&least) : &nan, 4);
    refuses(outside, name, "a field out of range is refused: " + name);
  }
  std::vector<Field> const none;
  refuses(none, "missing", "missing fields are refused");
  (void)logger.take();
  checks.expect_refusal(creator.createPlugin("x", nullptr, TensorRTPhase::kBUILD) == nullptr, logger, "no field",
                        "no field collection is refused");
}

void check_formats(Faces const& plugin, Manifest const& manifest, Checks& checks) {
  auto const in = manifest.input_descs();
  auto const out = manifest.output_descs();
  std::vector<DynamicPluginTensorDesc> const all = dynamic(in, out);
  for (int32_t position = 0; position < static_cast<int32_t>(all.size()); ++position) {
    std::string const where = " at tensor " + std::to_string(position);
    std::vector<DynamicPluginTensorDesc> tensors = all;
    auto const supported = [&] {
      return plugin.build->supportsFormatCombination(position, tensors.data(), count_of(in), count_of(out));
    };
    checks.expect(supported(), "the declared type is supported" + where);
    tensors[position].desc.type = DataType::kBOOL;
    checks.expect(!supported(), "bool is not supported" + where);
    tensors[position].desc.type = DataType::kHALF;
    checks.expect(!supported(), "float16 is not supported" + where);
    tensors[position].desc.type = all[position].desc.type;
    tensors[position].desc.format = TensorFormat::kCHW32;
    checks.expect(!supported(), "another format is not supported" + where);
  }
}

void check_outputs(Faces const& plugin, Manifest const& manifest, Checks& checks) {
  int32_t const inputs = static_cast<int32_t>(manifest.inputs.size());
  int32_t const outputs = static_cast<int32_t>(manifest.outputs.size());
  checks.expect(plugin.build->getNbOutputs() == outputs, "the number of outputs");
  std::vector<DataType> input_types;
  std::vector<DataType> output_types(manifest.outputs.size());
  ExpressionBuilder builder;
  std::vector<nvinfer1::DimsExprs> input_shapes(manifest.inputs.size());
  std::vector<nvinfer1::DimsExprs> output_shapes(manifest.outputs.size());
  for (size_t input = 0; input < manifest.inputs.size(); ++input) {
    input_types.push_back(manifest.inputs[input].type);
    nvinfer1::Dims const& dims = manifest.inputs[input].dims;
    input_shapes[input].nbDims = dims.nbDims;
    for (int32_t axis = 0; axis < dims.nbDims; ++axis) input_shapes[input].d[axis] = builder.variable(dims.d[axis]);
  }
  checks.expect(plugin.build->getOutputDataTypes(output_types.data(), outputs, input_types.data(), inputs) == 0,
                "output types are given");
  checks.expect(plugin.build->getOutputShapes(input_shapes.data(), inputs, nullptr, 0, output_shapes.data(), outputs,
                                              builder) == 0,
                "output shapes are given");
  for (size_t output = 0; output < manifest.outputs.size(); ++output) {
    Tensor const& expected = manifest.outputs[output];
    checks.expect(output_types[output] == expected.type, "the type of output " + expected.name);
    checks.expect(output_shapes[output].nbDims == expected.dims.nbDims, "the rank of output " + expected.name);
    for (int32_t axis = 0; axis < std::min(output_shapes[output].nbDims, expected.dims.nbDims); ++axis) {
      auto const* const size = static_cast<Expression const*>(output_shapes[output].d[axis]);
      checks.expect(size != nullptr && size->value() == expected.dims.d[axis], "the shape of output " + expected.name);
    }
  }
  checks.expect(plugin.build->getOutputShapes(input_shapes.data(), inputs + 1, nullptr, 0, output_shapes.data(),
                                              outputs, builder) != 0,
                "another number of inputs has no output shapes");
  input_shapes[0].nbDims += 1;
  input_shapes[0].d[input_shapes[0].nbDims - 1] = builder.variable(1);
  checks.expect(plugin.build->getOutputShapes(input_shapes.data(), inputs, nullptr, 0, output_shapes.data(), outputs,
                                              builder) != 0,
                "another rank has no output shapes");
}

void check_configure(Faces const& plugin, Manifest const& manifest, Checks& checks) {
  std::vector<DynamicPluginTensorDesc> in = dynamic(manifest.input_descs());
  std::vector<DynamicPluginTensorDesc> const out = dynamic(manifest.output_descs());
  int32_t const inputs = static_cast<int32_t>(in.size());
  int32_t const outputs = static_cast<int32_t>(out.size());
  auto const configured = [&] { return plugin.build->configurePlugin(in.data(), inputs, out.data(), outputs) == 0; };
  checks.expect(configured(), "the plugin is configured");
  size_t const largest = plugin.build->getWorkspaceSize(in.data(), inputs, out.data(), outputs);
  checks.expect(plugin.build->getWorkspaceSize(in.data(), inputs, out.data(), outputs) == largest,
                "the workspace is the same twice");
  checks.expect(plugin.build->configurePlugin(in.data(), inputs - 1, out.data(), outputs) != 0,
                "too few inputs are not configured");
  in[0].desc.dims.nbDims = in[0].max.nbDims = in[0].min.nbDims = in[0].opt.nbDims = 8;
  checks.expect(!configured(), "another rank is not configured");
}

// Descriptions that differ in one respect must be refused with a message, by onShapeChange and by enqueue alike.
void check_refusals(Faces const& plugin, Manifest const& manifest, Logger& logger, Checks& checks) {
  // Never read: every call below is refused before a kernel could be launched.
  alignas(256) static char memory[512];
  std::vector<void const*> const inputs(manifest.inputs.size(), memory);
  std::vector<void*> const outputs(manifest.outputs.size(), memory);
  auto const refuses = [&](std::vector<PluginTensorDesc> const& in, std::vector<PluginTensorDesc> const& out,
                           std::string const& mention, std::string const& what) {
    (void)logger.take();
    bool const shape = plugin.runtime->onShapeChange(in.data(), count_of(in), out.data(), count_of(out)) != 0;
    checks.expect_refusal(shape, logger, mention, "onShapeChange: " + what);
    bool const run =
        plugin.runtime->enqueue(in.data(), out.data(), inputs.data(), outputs.data(), memory, nullptr) != 0;
    checks.expect_refusal(run, logger, mention, "enqueue: " + what);
  };
  auto const spoil = [&](std::vector<Tensor> const& tensors, bool output) {
    for (size_t index = 0; index < tensors.size(); ++index) {
      std::string const& name = tensors[index].name;
      auto const with = [&](auto&& change, std::string const& what) {
        std::vector<PluginTensorDesc> in = manifest.input_descs();
        std::vector<PluginTensorDesc> out = manifest.output_descs();
        change(output ? out[index] : in[index]);
        refuses(in, out, name, what + " of " + name);
      };
      with([](PluginTensorDesc& desc) { desc.type = DataType::kHALF; }, "another type");
      with([](PluginTensorDesc& desc) { desc.format = TensorFormat::kHWC8; }, "another format");
      with([](PluginTensorDesc& desc) { desc.dims.nbDims -= 1; }, "another rank");
      if (output) with([](PluginTensorDesc& desc) { desc.dims.d[0] += 1; }, "another size");
    }
  };
  spoil(manifest.inputs, false);
  spoil(manifest.outputs, true);
  std::vector<PluginTensorDesc> const in = manifest.input_descs();
  std::vector<PluginTensorDesc> const out = manifest.output_descs();
  checks.expect(plugin.runtime->onShapeChange(in.data(), count_of(in), out.data(), count_of(out) + 1) != 0,
                "another number of outputs is refused");
  for (size_t input = 0; input < inputs.size(); ++input) {
    if (manifest.inputs[input].bytes() == 0) continue;
    std::vector<void const*> missing = inputs;
    missing[input] = nullptr;
    (void)logger.take();
    bool const run =
        plugin.runtime->enqueue(in.data(), out.data(), missing.data(), outputs.data(), memory, nullptr) != 0;
    checks.expect_refusal(run, logger, manifest.inputs[input].name, "a null address of " + manifest.inputs[input].name);
  }
  bool empty = true;
  for (Tensor const& output : manifest.outputs) empty = empty && output.bytes() == 0;
  for (size_t input = 0; input < inputs.size() && !empty; ++input) {
    auto const found = manifest.aligned.find(manifest.inputs[input].name);
    if (found == manifest.aligned.end() || manifest.inputs[input].bytes() == 0) continue;
    std::vector<void const*> shifted = inputs;
    shifted[input] = memory + found->second / 2;
    (void)logger.take();
    bool const run =
        plugin.runtime->enqueue(in.data(), out.data(), shifted.data(), outputs.data(), memory, nullptr) != 0;
    checks.expect_refusal(run, logger, "misaligned", "an address of " + found->first + " between its multiples");
  }
}

}  // namespace

void Checks::expect(bool holds, std::string const& what) {
  ++count_;
  if (holds) return;
  ++failures_;
  std::printf("FAILED %s\n", what.c_str());
}

void Checks::expect_refusal(bool refused, Logger& logger, std::string_view mention, std::string const& what) {
  std::string const message = logger.take();
  expect(refused, what);
  expect(message.find(mention) != std::string::npos,
         what + ": expected a message about " + std::string(mention) + ", found '" + message + "'");
}

Faces faces(nvinfer1::IPluginV3& plugin) {
  using nvinfer1::PluginCapabilityType;
  auto* const core = plugin.getCapabilityInterface(PluginCapabilityType::kCORE);
  auto* const build = plugin.getCapabilityInterface(PluginCapabilityType::kBUILD);
  auto* const runtime = plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME);
  return {static_cast<nvinfer1::IPluginV3OneCore*>(core), static_cast<nvinfer1::IPluginV3OneBuild*>(build),
          static_cast<nvinfer1::IPluginV3OneRuntime*>(runtime)};
}

Plugin create(nvinfer1::IPluginCreatorV3One& creator, std::vector<Field> const& fields, nvinfer1::TensorRTPhase phase) {
  std::vector<nvinfer1::PluginField> given;
  // A serialised plan aligns nothing: values start at odd addresses.
  std::vector<std::vector<char>> unaligned;
  for (Field const& field : fields) {
    unaligned.emplace_back(1, '\0');
    unaligned.back().insert(unaligned.back().end(), field.bytes.begin(), field.bytes.end());
    given.emplace_back(field.name.c_str(), unaligned.back().data() + 1, field.type, 1);
  }
  nvinfer1::PluginFieldCollection const collection{static_cast<int32_t>(given.size()), given.data()};
  return Plugin(creator.createPlugin("under_test", &collection, phase));
}

size_t workspace_bytes(nvinfer1::IPluginCreatorV3One& creator, Manifest const& manifest) {
  Plugin const plugin = create(creator, manifest.fields, TensorRTPhase::kBUILD);
  if (plugin == nullptr) throw std::runtime_error("no plugin " + manifest.plugin + " was made of the manifest");
  std::vector<DynamicPluginTensorDesc> const in = dynamic(manifest.input_descs());
  std::vector<DynamicPluginTensorDesc> const out = dynamic(manifest.output_descs());
  return faces(*plugin).build->getWorkspaceSize(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                                static_cast<int32_t>(out.size()));
}

Plugin check_contract(nvinfer1::IPluginCreatorV3One& creator, Manifest const& manifest, Logger& logger,
                      Checks& checks) {
  check_fields(creator, manifest, logger, checks);
  Plugin built = create(creator, manifest.fields, TensorRTPhase::kBUILD);
  checks.expect(built != nullptr, "a plugin is created from its fields: " + logger.take());
  if (built == nullptr) return nullptr;
  Faces const build = faces(*built);
  checks.expect(manifest.plugin == build.core->getPluginName(), "the plugin has its creator's name");
  checks.expect(std::string_view(build.core->getPluginVersion()) == creator.getPluginVersion(), "and version");
  checks.expect(std::string_view(build.core->getPluginNamespace()) == creator.getPluginNamespace(), "and namespace");
  check_formats(build, manifest, checks);
  check_outputs(build, manifest, checks);
  check_configure(build, manifest, checks);

  std::vector<Field> const fields = serialised(*built);
  checks.expect(!fields.empty(), "fields are serialised");
  built.reset();
  Plugin deserialised = create(creator, fields, TensorRTPhase::kRUNTIME);
  checks.expect(deserialised != nullptr, "a plugin is created from exactly what was serialised");
  if (deserialised == nullptr) return nullptr;
  checks.expect(same(fields, serialised(*deserialised)), "it serialises the same again");
  Plugin const cloned(deserialised->clone());
  checks.expect(cloned != nullptr && same(fields, serialised(*cloned)), "a clone serialises the same");
  ResourceContext context;
  Plugin attached(faces(*deserialised).runtime->attachToContext(&context));
  checks.expect(attached != nullptr && attached != deserialised, "attachToContext gives another plugin");
  if (attached == nullptr) return nullptr;
  deserialised.reset();  // what was attached must not lean on it
  Faces const runtime = faces(*attached);
  std::vector<PluginTensorDesc> const in = manifest.input_descs();
  std::vector<PluginTensorDesc> const out = manifest.output_descs();
  for (int time = 0; time < 2; ++time) {
    bool const accepted = runtime.runtime->onShapeChange(in.data(), count_of(in), out.data(), count_of(out)) == 0;
    checks.expect(accepted, "the shapes are accepted: " + logger.take());
  }
  check_refusals(runtime, manifest, logger, checks);
  return attached;
}
