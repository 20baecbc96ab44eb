#include <map>
#include <mutex>
#include <optional>

#include "common/check.h"
#include "kernels/collectives/launch.h"
#include "kernels/collectives/nccl.h"

namespace redknot {
namespace {

struct Member {
  nccl::Communicator communicator;
  int world;
};

// Plans hold no pointers, so a plugin finds its communicator by group number; the runtime fills this before the first
// enqueue. The one place of this library that outlives a call.
class Groups {
 public:
  void set(int32_t group, Member member) {
    std::lock_guard const lock(mutex_);
    members_[group] = member;
  }
  void erase(int32_t group) {
    std::lock_guard const lock(mutex_);
    members_.erase(group);
  }
  std::optional<Member> find(int32_t group) const {
    std::lock_guard const lock(mutex_);
    auto const found = members_.find(group);
    return found == members_.end() ? std::nullopt : std::optional<Member>(found->second);
  }

 private:
  mutable std::mutex mutex_;
  std::map<int32_t, Member> members_;
};

Groups& groups() {
  static Groups instance;
  return instance;
}

std::optional<int> nccl_type(CollectiveType type) {
  switch (type) {
    case CollectiveType::kFloat32: return nccl::kFloat32;
    case CollectiveType::kBFloat16: return nccl::kBFloat16;
    case CollectiveType::kInt32: return nccl::kInt32;
    case CollectiveType::kInt64: return nccl::kInt64;
    case CollectiveType::kBytes: return nccl::kUint8;
  }
  return std::nullopt;
}

int call(nccl::Library const& library, CollectiveParams const& params, int type, Member const& member,
         cudaStream_t stream) {
  auto const count = static_cast<size_t>(params.count);
  switch (params.kind) {
    case CollectiveKind::kAllGather:
      return library.all_gather(params.send, params.receive, count, type, member.communicator, stream);
    case CollectiveKind::kReduceScatter:
      return library.reduce_scatter(params.send, params.receive, count, type, nccl::kSum, member.communicator, stream);
    case CollectiveKind::kAllReduce:
      return library.all_reduce(params.send, params.receive, count, type, nccl::kSum, member.communicator, stream);
  }
  return ~nccl::kSuccess;
}

}  // namespace

Status set_communicator(int32_t group, void* communicator) {
  if (communicator == nullptr) {
    groups().erase(group);
    return Status::kSuccess;
  }
  nccl::Library const* const library = nccl::library();
  REDKNOT_REQUIRE(library != nullptr, Status::kCommunicatorRefused);
  int world = 0;
  REDKNOT_REQUIRE(library->comm_count(communicator, &world) == nccl::kSuccess && world > 0,
                  Status::kCommunicatorRefused);
  groups().set(group, {communicator, world});
  return Status::kSuccess;
}

Status collective(CollectiveParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.count >= 0 && params.world > 0);
  std::optional<int> const type = nccl_type(params.type);
  REDKNOT_VALID(type.has_value());
  bool const sums = params.kind != CollectiveKind::kAllGather;
  REDKNOT_VALID(!sums || params.type != CollectiveType::kBytes);
  std::optional<Member> const member = groups().find(params.group);
  REDKNOT_REQUIRE(member.has_value(), Status::kNoCommunicator);
  REDKNOT_REQUIRE(member->world == params.world, Status::kCommunicatorRefused);
  REDKNOT_VALID(params.count == 0 || (params.send != nullptr && params.receive != nullptr));
  nccl::Library const& library = *nccl::library();
  int failure = nccl::kSuccess;
  REDKNOT_REQUIRE(library.comm_async_error(member->communicator, &failure) == nccl::kSuccess &&
                      failure == nccl::kSuccess && call(library, params, *type, *member, stream) == nccl::kSuccess,
                  Status::kCommunicatorRefused);
  return Status::kSuccess;
}

}  // namespace redknot

extern "C" int32_t redknot_set_communicator(int32_t group, void* communicator) {
  return static_cast<int32_t>(redknot::set_communicator(group, communicator));
}

extern "C" char const* redknot_status_text(int32_t status) {
  return redknot::status_text(static_cast<redknot::Status>(status));
}
