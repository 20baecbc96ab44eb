#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <stdexcept>

#include "contract.h"

namespace {

constexpr int kPoison = 0xff;

void must(cudaError_t status, char const* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(bytes) {
    if (bytes > 0) must(cudaMalloc(&address_, static_cast<size_t>(bytes)), "cudaMalloc");
    poison();
  }
  Buffer(Buffer&& other) noexcept : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  Buffer(Buffer const&) = delete;
  Buffer& operator=(Buffer const&) = delete;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { cudaFree(address_); }

  void* address() const { return address_; }
  void poison() const {
    if (bytes_ > 0) must(cudaMemset(address_, kPoison, static_cast<size_t>(bytes_)), "cudaMemset");
  }
  void write(std::vector<char> const& bytes) const {
    if (bytes_ > 0) must(cudaMemcpy(address_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<char> read() const {
    std::vector<char> bytes(static_cast<size_t>(bytes_));
    if (bytes_ > 0) must(cudaMemcpy(bytes.data(), address_, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return bytes;
  }

 private:
  void* address_ = nullptr;
  int64_t bytes_;
};

std::vector<char> read_file(Tensor const& tensor) {
  std::ifstream file(tensor.path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (static_cast<int64_t>(bytes.size()) != tensor.bytes()) {
    throw std::runtime_error(tensor.path + ": expected " + std::to_string(tensor.bytes()) + " bytes, found " +
                             std::to_string(bytes.size()));
  }
  return bytes;
}

// One execution context: a plugin, its stream, and tensors and workspace of its own.
class Context {
 public:
  Context(nvinfer1::IPluginV3& source, Manifest const& manifest)
      : plugin_(faces(source).runtime->attachToContext(&resources_)),
        in_(manifest.input_descs()),
        out_(manifest.output_descs()),
        workspace_(workspace_bytes(manifest)) {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (Tensor const& tensor : manifest.inputs) {
      inputs_.emplace_back(tensor.bytes());
      inputs_.back().write(read_file(tensor));
      input_addresses_.push_back(inputs_.back().address());
    }
    for (Tensor const& tensor : manifest.outputs) {
      outputs_.emplace_back(tensor.bytes());
      output_addresses_.push_back(outputs_.back().address());
    }
    int32_t const inputs = static_cast<int32_t>(in_.size());
    int32_t const outputs = static_cast<int32_t>(out_.size());
    if (faces(*plugin_).runtime->onShapeChange(in_.data(), inputs, out_.data(), outputs) != 0) {
      throw std::runtime_error("the shapes were refused");
    }
    // The poison and the inputs were written on another stream.
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  ~Context() { cudaStreamDestroy(stream_); }
  Context(Context const&) = delete;
  Context& operator=(Context const&) = delete;

  bool enqueue() {
    return faces(*plugin_).runtime->enqueue(in_.data(), out_.data(), input_addresses_.data(), output_addresses_.data(),
                                            workspace_.address(), stream_) == 0;
  }
  bool enqueue_without_workspace() {
    return faces(*plugin_).runtime->enqueue(in_.data(), out_.data(), input_addresses_.data(), output_addresses_.data(),
                                            nullptr, stream_) == 0;
  }
  bool needs_workspace() const { return workspace_.address() != nullptr; }
  void wait() const { must(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  void poison() const {
    for (Buffer const& output : outputs_) output.poison();
    workspace_.poison();
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  std::vector<std::vector<char>> results() const {
    std::vector<std::vector<char>> bytes;
    for (Buffer const& output : outputs_) bytes.push_back(output.read());
    return bytes;
  }
  cudaStream_t stream() const { return stream_; }

 private:
  int64_t workspace_bytes(Manifest const& manifest) const {
    auto const dynamic = [](std::vector<nvinfer1::PluginTensorDesc> const& descs) {
      std::vector<nvinfer1::DynamicPluginTensorDesc> result;
      for (nvinfer1::PluginTensorDesc const& desc : descs) result.push_back({desc, desc.dims, desc.dims, desc.dims});
      return result;
    };
    auto const in = dynamic(manifest.input_descs());
    auto const out = dynamic(manifest.output_descs());
    return static_cast<int64_t>(faces(*plugin_).build->getWorkspaceSize(in.data(), static_cast<int32_t>(in.size()),
                                                                        out.data(), static_cast<int32_t>(out.size())));
  }

  ResourceContext resources_;
  Plugin plugin_;
  std::vector<nvinfer1::PluginTensorDesc> in_;
  std::vector<nvinfer1::PluginTensorDesc> out_;
  Buffer workspace_;
  cudaStream_t stream_ = nullptr;
  std::vector<Buffer> inputs_;
  std::vector<Buffer> outputs_;
  std::vector<void const*> input_addresses_;
  std::vector<void*> output_addresses_;
};

cudaGraphExec_t capture(Context& context, Checks& checks) {
  cudaGraph_t graph = nullptr;
  must(cudaStreamBeginCapture(context.stream(), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  bool const enqueued = context.enqueue();
  must(cudaStreamEndCapture(context.stream(), &graph), "cudaStreamEndCapture");
  checks.expect(enqueued, "enqueue under capture");
  cudaGraphExec_t executable = nullptr;
  must(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return executable;
}

}  // namespace

void check_device(nvinfer1::IPluginV3& plugin, Manifest const& manifest, Checks& checks) {
  Context first(plugin, manifest);
  Context second(plugin, manifest);
  checks.expect(first.enqueue(), "enqueue");
  first.wait();
  std::vector<std::vector<char>> const results = first.results();

  for (Context* const context : {&first, &second}) context->poison();
  std::array<bool, 4> both{};
  for (size_t time = 0; time < both.size(); ++time) both[time] = (time % 2 == 0 ? first : second).enqueue();
  first.wait();
  second.wait();
  for (bool const enqueued : both) checks.expect(enqueued, "enqueue in two contexts at once");
  checks.expect(first.results() == results && second.results() == results, "two contexts at once give the same bytes");

  cudaGraphExec_t const graph = capture(first, checks);
  for (int time = 0; time < 2; ++time) {
    first.poison();
    must(cudaGraphLaunch(graph, first.stream()), "cudaGraphLaunch");
    first.wait();
    checks.expect(first.results() == results, "a captured graph gives the same bytes");
  }
  must(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  // Without rows there is nothing to put into one.
  bool const works = std::any_of(results.begin(), results.end(), [](auto const& bytes) { return !bytes.empty(); });
  if (works && first.needs_workspace()) {
    checks.expect(!first.enqueue_without_workspace(), "a missing workspace is refused");
  }
  for (size_t output = 0; output < manifest.outputs.size(); ++output) {
    std::ofstream file(manifest.outputs[output].path, std::ios::binary);
    file.write(results[output].data(), static_cast<std::streamsize>(results[output].size()));
    if (!file) throw std::runtime_error("cannot write " + manifest.outputs[output].path);
  }
}
