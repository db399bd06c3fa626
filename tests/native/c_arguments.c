// Calls the C interface with wrong arguments; prints each result and its text, one call a line.
//
//     c_arguments LIBNCCL      a stand-in for NCCL
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <ncclep.h>
#include <stdio.h>

static void show(const char* name, ncclepResult_t result) {
  printf("%s: %d %s: %s\n", name, result, ncclepGetErrorString(result), ncclepGetLastError());
}

static int stop(void* user) {
  ++*(int*)user;
  return 1;
}

int main(int argc, char** argv) {
  int version = 0, fits = 0, num_polls = 0;
  if (argc != 2) return 2;
  show("fresh thread", ncclepGetVersion(&version));
  if (version != NCCLEP_VERSION) return 3;

  ncclepUniqueId_t id;
  show("no NCCL", ncclepGetUniqueId(&id, "/nowhere/libnccl.so"));
  show("no id", ncclepGetUniqueId(NULL, argv[1]));
  if (ncclepGetUniqueId(&id, argv[1]) != ncclepSuccess) return 4;

  ncclepComm_t comm = NULL;
  ncclepCommConfig_t config = NCCLEP_COMM_CONFIG_INIT;
  config.unique_id = id;
  config.nccl_path = argv[1];
  config.num_ranks = 2;
  show("no config", ncclepCommCreate(&comm, NULL));
  show("no comm", ncclepCommCreate(NULL, &config));
  config.size = 16;
  show("old size", ncclepCommCreate(&comm, &config));
  config.size = sizeof(config);
  config.rank = 2;
  show("rank", ncclepCommCreate(&comm, &config));
  config.rank = 1;
  config.timeout_s = 0;
  show("deadline", ncclepCommCreate(&comm, &config));
  config.timeout_s = 60;

  void (*wait_for_ranks)(int) = NULL;
  *(void**)&wait_for_ranks = dlsym(dlopen(argv[1], RTLD_NOW), "fake_wait_for_ranks");
  wait_for_ranks(300);
  config.poll = stop;
  config.user = &num_polls;
  show("poll", ncclepCommCreate(&comm, &config));
  config.timeout_s = 0.01;
  show("late", ncclepCommCreate(&comm, &config));
  wait_for_ranks(0);
  config.timeout_s = 60;
  if (num_polls != 1 || ncclepCommCreate(&comm, &config) != ncclepSuccess) return 5;

  ncclepGroup_t group = NULL;
  ncclepGroupConfig_t group_config = NCCLEP_GROUP_CONFIG_INIT;
  group_config.num_experts = 3;
  show("experts", ncclepGroupCreate(&group, comm, &group_config));
  group_config.num_experts = 4;
  show("no GPU", ncclepGroupCreate(&group, comm, &group_config));
  show("no group", ncclepGroupBegin(group, 1, NULL, &fits));
  show("nothing to destroy", ncclepGroupDestroy(NULL));
  show("no plan", ncclepPlanDestroy(NULL));
  show("ranks", ncclepMinSms(NCCLEP_MAX_RANKS + 1, &fits));
  show("no result", (ncclepResult_t)99);
  return ncclepCommDestroy(comm) != ncclepSuccess;
}
