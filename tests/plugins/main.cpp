// contract_host LIBRARY list                      creators of the library, one a line: namespace name version
// contract_host LIBRARY contract MANIFEST...      the contract of one plugin a manifest, without a GPU
// contract_host LIBRARY device MANIFEST...        the same, then enqueue on the GPU; outputs go to the manifests' files
// contract_host LIBRARY workspace MANIFEST...     bytes of workspace for shapes up to a manifest's, one plugin a line
// Exit status 0: everything held; 1: a check failed, printed as FAILED; 2: the program could not run.

#include <dlfcn.h>

#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>

#include "contract.h"

namespace {

template <typename Function>
Function* symbol(void* library, char const* name) {
  void* const found = dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("the library does not export ") + name);
  return reinterpret_cast<Function*>(found);
}

using Creators = std::map<std::string, nvinfer1::IPluginCreatorV3One*>;
using ListCreators = nvinfer1::IPluginCreatorInterface* const*(int32_t&);

Creators creators_of(void* library) {
  int32_t older = -1;
  (void)symbol<ListCreators>(library, "getPluginCreators")(older);
  if (older != 0) throw std::runtime_error("getPluginCreators lists creators of an older interface");
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* const list = symbol<ListCreators>(library, "getCreators")(count);
  Creators result;
  for (int32_t index = 0; index < count; ++index) {
    std::string_view const kind = list[index]->getInterfaceInfo().kind;
    if (kind != "PLUGIN CREATOR_V3ONE") throw std::runtime_error("a creator is a " + std::string(kind));
    auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(list[index]);
    if (!result.emplace(creator->getPluginName(), creator).second) throw std::runtime_error("a name is listed twice");
  }
  return result;
}

void* one_rank_communicator() {
  void* const nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
  if (nccl == nullptr) throw std::runtime_error("libnccl.so.2 cannot be loaded");
  void* communicator = nullptr;
  int const device = 0;
  if (symbol<int(void**, int, int const*)>(nccl, "ncclCommInitAll")(&communicator, 1, &device) != 0) {
    throw std::runtime_error("NCCL made no communicator");
  }
  return communicator;
}

void hand_in_communicator(void* library, int32_t group, Logger& logger, nvinfer1::IPluginV3& plugin,
                          Manifest const& manifest, Checks& checks) {
  auto* const set = symbol<int32_t(int32_t, void*)>(library, "redknot_set_communicator");
  checks.expect(set(group, nullptr) == 0, "a communicator is taken back");
  std::vector<char> memory(64);
  std::vector<void const*> const inputs(manifest.inputs.size(), memory.data());
  std::vector<void*> const outputs(manifest.outputs.size(), memory.data());
  auto const in = manifest.input_descs();
  auto const out = manifest.output_descs();
  bool const empty = manifest.outputs.front().bytes() == 0;
  (void)logger.take();
  bool const refused =
      faces(plugin).runtime->enqueue(in.data(), out.data(), inputs.data(), outputs.data(), nullptr, nullptr) != 0;
  checks.expect_refusal(refused || empty, logger, empty ? "" : "no communicator",
                        "a collective without a communicator is refused");
  checks.expect(set(group, one_rank_communicator()) == 0, "the communicator is accepted");
}

int run(int count, char** arguments) {
  if (count < 3) throw std::runtime_error("usage: contract_host LIBRARY list|contract|device|workspace [MANIFEST...]");
  void* const library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  Creators const creators = creators_of(library);
  std::string_view const mode = arguments[2];
  if (mode == "list") {
    for (auto const& [name, creator] : creators) {
      std::printf("%s %s %s\n", creator->getPluginNamespace(), name.c_str(), creator->getPluginVersion());
    }
    return 0;
  }
  if (mode != "contract" && mode != "device" && mode != "workspace")
    throw std::runtime_error("unknown mode " + std::string(mode));
  static Logger logger;
  symbol<void(nvinfer1::ILoggerFinder*)>(library, "setLoggerFinder")(&logger);
  int failures = 0;
  for (int index = 3; index < count; ++index) {
    Manifest const manifest = read_manifest(arguments[index]);
    auto const creator = creators.find(manifest.plugin);
    if (creator == creators.end()) throw std::runtime_error("no creator is named " + manifest.plugin);
    if (mode == "workspace") {
      std::printf("%s %zu\n", manifest.plugin.c_str(), workspace_bytes(*creator->second, manifest));
      continue;
    }
    Checks checks;
    Plugin const plugin = check_contract(*creator->second, manifest, logger, checks);
    if (plugin != nullptr && mode == "device") {
      if (manifest.communicator_group >= 0) {
        hand_in_communicator(library, manifest.communicator_group, logger, *plugin, manifest, checks);
      }
      check_device(*plugin, manifest, checks);
    }
    std::printf("%s %d checks %d failures\n", manifest.plugin.c_str(), checks.count(), checks.failures());
    failures += checks.failures();
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(count, arguments);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "contract_host: %s\n", error.what());
    return 2;
  }
}
