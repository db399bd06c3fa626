// Stands in for libnccl.so.2 and libnccl_ep.so on a machine without GPUs: writes down every call,
// as one line of text, and computes nothing.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
  char bytes[128];
} UniqueId;
typedef struct {
  int num_ranks, rank, stride;
} Team;

static char calls[16384];
// Of the call after `calls_before_it` more that can fail; the others succeed.
static int next_result = 0, calls_before_it = 0;
// Whether there is memory, and windows in it: what the communicator's ranks have on GPUs, which are
// in so many NVLink domains.
static int has_windows = 0, num_ranks_now = 2, rank_now = 0;
// Communicators, windows and pieces of memory.
static int num_alive = 0;

static int num_open_windows = 0;  // registered; they and their memory are alive
int fake_num_alive(void) { return num_alive; }
int fake_num_open_windows(void) { return num_open_windows; }
const char* fake_calls(void) { return calls; }
void fake_reset(int result_of_next_call) {
  calls[0] = 0;
  next_result = result_of_next_call;
  calls_before_it = 0;
}
void fake_fail_after(int num_calls, int result) {
  fake_reset(result);
  calls_before_it = num_calls;
}
void fake_make_windows(int num_domains) { has_windows = num_domains; }

#define CALL(...) snprintf(calls + strlen(calls), sizeof(calls) - strlen(calls), __VA_ARGS__)

static int result(void) {
  if (calls_before_it > 0) {
    --calls_before_it;
    return 0;
  }
  int now = next_result;
  next_result = 0;
  return now;
}

// --- NCCL ----------------------------------------------------------------------------------------

int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}
int ncclGetUniqueId(UniqueId* id) {
  memset(id, 7, sizeof(*id));
  return result();
}
// How long NCCL waits for the other ranks.
static int init_ms = 0;
void fake_wait_for_ranks(int milliseconds) { init_ms = milliseconds; }

int ncclCommInitRank(void** comm, int num_ranks, UniqueId id, int rank) {
  usleep(init_ms * 1000);
  CALL("CommInitRank ranks=%d rank=%d id=%d..%d\n", num_ranks, rank, id.bytes[0], id.bytes[127]);
  num_ranks_now = num_ranks;
  rank_now = rank;
  *comm = calls;
  const int failed = result();
  num_alive += !failed;
  return failed;
}
int ncclCommDestroy(void* comm) {
  --num_alive;
  CALL("CommDestroy %d\n", comm == calls);
  return result();
}
int ncclCommAbort(void* comm) {
  --num_alive;
  CALL("CommAbort %d\n", comm == calls);
  return 0;
}
// Without windows, domains of two ranks.
Team ncclTeamLsa(void* comm) {
  const int size = has_windows ? num_ranks_now / has_windows : 2;
  Team team = {comm != calls ? -1 : size, rank_now % size, 1};
  return team;
}
int ncclAllGather(const void* mine, void* all, size_t count, int dtype, void* comm, void* stream) {
  for (int rank = 0; rank < num_ranks_now; ++rank) memcpy((char*)all + rank * count, mine, count);
  return result();
}
int ncclMemAlloc(void** memory, size_t bytes) {
  CALL("MemAlloc %lu\n", (unsigned long)bytes);
  const int failed = result();
  *memory = failed ? NULL : has_windows ? aligned_alloc(4096, bytes) : calls + 3;
  num_alive += *memory != NULL;
  return failed;
}
int ncclMemFree(void* memory) {
  CALL("MemFree %d\n", memory == calls + 3);
  if (has_windows) free(memory);
  --num_alive;
  return result();
}
// What NCCL keeps in device memory for a window.
typedef struct {
  void* host_side;
  char* flat_base;
  int lsa_rank, world_rank;
  uint32_t stride_4g, padding;
} Window;

// As NCCL does where it cannot make one: success, and no window.
int ncclCommWindowRegister(void* comm, void* memory, size_t bytes, void** window, int flags) {
  CALL("WindowRegister %d %lu flags=%d\n", memory == calls + 3, (unsigned long)bytes, flags);
  *window = NULL;
  const int failed = result();
  if (failed || !has_windows) return failed;
  const Window made = {calls, (char*)memory - ((uint64_t)rank_now << 32), rank_now, rank_now, 1, 0};
  *window = malloc(sizeof(made));
  memcpy(*window, &made, sizeof(made));
  ++num_alive;
  ++num_open_windows;
  return 0;
}
int ncclCommWindowDeregister(void* comm, void* window) {
  free(window);
  --num_alive;
  --num_open_windows;
  return result();
}
#if FAKE_NCCL_VERSION >= 22900
// The ranks' memory is where the struct above says.
int ncclGetPeerDevicePointer(void* window, size_t offset, int peer, void** address) {
  const Window* made = window;
  *address = made->flat_base + ((uint64_t)peer << 32) * made->stride_4g + offset;
  return result();
}
#endif
const char* ncclGetErrorString(int result) { return result == 3 ? "internal error" : "other"; }
const char* ncclGetLastError(void* comm) { return "the last word"; }

// --- NCCL EP: the order of calls only; what they say, the tests on GPUs find out
// -------------------

int ncclEpGetVersion(int* version) {
  *version = FAKE_EP_VERSION;
  return 0;
}

// A library of interface 3 reads its modes when it makes a group.
static const char* mode(const char* variable, const char* name) {
  const char* value = getenv(variable);
  return value != NULL && strcmp(value, "1") == 0 ? name : "";
}

int ncclEpCreateGroup(void** group, void* comm, const void* config) {
  CALL("CreateGroup%s%s\n", mode("NCCL_EP_HT_EM_PULL_PUSH", " pull_push"),
       mode("NCCL_EP_HT_EM_AG_SCAN_MODE", " fixed_order"));
  *group = calls + 1;
  return result();
}
int ncclEpGroupDestroy(void* group) {
  CALL("GroupDestroy %d\n", group == calls + 1);
  return result();
}
int ncclEpHandleMemSize(void* group, int layout, const void* config, size_t* bytes, int top_k) {
  *bytes = 4096;
  return result();
}
int ncclEpInitHandle(void** handle, void* group, int layout, const void* config, int top_k,
                     const void* memory) {
  CALL("InitHandle\n");
  *handle = calls + 2;
  return result();
}
int ncclEpUpdateHandle(void* handle, const void* topk, const void* layout, void* stream) {
  return result();
}
int ncclEpHandleDestroy(void* handle) {
  CALL("HandleDestroy %d\n", handle == calls + 2);
  return result();
}
int ncclEpDispatch(void* handle, const void* inputs, const void* outputs, const void* layout,
                   const void* config, void* stream) {
  return result();
}
int ncclEpCombine(void* handle, const void* inputs, const void* outputs, const void* config,
                  void* stream) {
  return result();
}
