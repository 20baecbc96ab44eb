// The library's C interface: what TensorRT looks up when it loads plugins.

#include <array>

#include "common/export.h"
#include "kinds.h"
#include "logging.h"
#include "plugin.h"

namespace redknot::trt {
namespace {

constexpr size_t kKinds = 15;

std::array<PluginCreator, kKinds>& creators() {
  static std::array<PluginCreator, kKinds> instances = {
      PluginCreator(restore_replace_kind()),
      PluginCreator(norm_rope_pack_kind()),
      PluginCreator(compress_kind()),
      PluginCreator(hyper_connection_pre_kind()),
      PluginCreator(hyper_connection_post_kind()),
      PluginCreator(hyper_head_kind()),
      PluginCreator(moe_route_learned_kind()),
      PluginCreator(moe_route_hash_kind()),
      PluginCreator(moe_permute_kind()),
      PluginCreator(moe_activation_kind()),
      PluginCreator(moe_combine_kind()),
      PluginCreator(collective_kind()),
      PluginCreator(moe_grouped_gemm_kind()),
      PluginCreator(seg_latent_attention_kind()),
      PluginCreator(lightning_indexer_kind()),
  };
  return instances;
}

}  // namespace
}  // namespace redknot::trt

extern "C" REDKNOT_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  redknot::trt::set_logger_finder(finder);
}

extern "C" REDKNOT_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static auto const pointers = [] {
    std::array<nvinfer1::IPluginCreatorInterface*, redknot::trt::kKinds> result{};
    for (size_t index = 0; index < result.size(); ++index) {
      result[index] = &redknot::trt::creators()[index];
    }
    return result;
  }();
  count = static_cast<int32_t>(pointers.size());
  return pointers.data();
}

// The older entry point lists creators of V1 plugins; this library has none.
extern "C" REDKNOT_API nvinfer1::IPluginCreatorInterface* const* getPluginCreators(int32_t& count) {
  count = 0;
  return nullptr;
}
