// Structs of programs that were compiled with another version of the header.
#include <cstddef>

#include "common/c_struct.h"
#include "objects.h"

namespace {

struct Grown {
  std::size_t size;
  int first, appended;
};

// Whether the library takes an argument of so many bytes.
bool is_read(std::size_t size) {
  const Grown given{size, 1, 2};
  try {
    const Grown read = ncclep::read(&given, "Grown");
    REQUIRE(read.first == 1 && read.appended == (size < sizeof(Grown) ? 0 : 2));
  } catch (const ncclep::ArgumentError&) {
    return false;
  }
  return true;
}

}  // namespace

template <>
inline constexpr std::size_t ncclep::kFirstSize<Grown> = offsetof(Grown, appended);

void versions() {
  REQUIRE(is_read(sizeof(Grown)) && is_read(offsetof(Grown, appended)));
  for (const std::size_t wrong : {std::size_t{0}, offsetof(Grown, first), 2 * sizeof(Grown)}) {
    REQUIRE(!is_read(wrong));
  }
  // What an older program has behind its struct is its own.
  Objects o;
  o.make();
  constexpr int kOwn = 77;
  ncclepGroupInfo_t info = NCCLEP_GROUP_INFO_INIT;
  info.size = offsetof(ncclepGroupInfo_t, num_domains);
  info.num_domains = kOwn;
  must(ncclepGroupGetInfo(o.group, &info));
  REQUIRE(info.num_ranks == kRanks && info.num_domains == kOwn);
  REQUIRE(info.size == offsetof(ncclepGroupInfo_t, num_domains));
  REQUIRE(o.info().num_domains == 1 && o.info().size == sizeof(ncclepGroupInfo_t));
  ncclepPlanConfig_t config = o.plan_config(kRows);
  config.size = offsetof(ncclepPlanConfig_t, leaves_unused);
  o.make_plan(config);
}
