#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fakes.h"
#include "manifest.h"

using Plugin = std::unique_ptr<nvinfer1::IPluginV3>;

// Counts what held and prints what did not.
class Checks {
 public:
  void expect(bool holds, std::string const& what);
  // Expects `refused` and a logged message that contains `mention`.
  void expect_refusal(bool refused, Logger& logger, std::string_view mention, std::string const& what);
  int failures() const { return failures_; }
  int count() const { return count_; }

 private:
  int count_ = 0;
  int failures_ = 0;
};

// The interfaces of one plugin object.
struct Faces {
  nvinfer1::IPluginV3OneCore* core;
  nvinfer1::IPluginV3OneBuild* build;
  nvinfer1::IPluginV3OneRuntime* runtime;
};
Faces faces(nvinfer1::IPluginV3& plugin);

Plugin create(nvinfer1::IPluginCreatorV3One& creator, std::vector<Field> const& fields, nvinfer1::TensorRTPhase phase);

// Build phase, serialisation, runtime phase and refusals, all without a GPU. Gives a plugin of the runtime phase.
Plugin check_contract(nvinfer1::IPluginCreatorV3One& creator, Manifest const& manifest, Logger& logger, Checks& checks);

// Bytes of workspace that a build would set aside for shapes up to the manifest's.
size_t workspace_bytes(nvinfer1::IPluginCreatorV3One& creator, Manifest const& manifest);

// Enqueue on device tensors: eagerly, from a captured graph and in two contexts at once. Writes the outputs' bytes.
void check_device(nvinfer1::IPluginV3& plugin, Manifest const& manifest, Checks& checks);
