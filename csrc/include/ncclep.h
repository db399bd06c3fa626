/* The C interface of libncclep: plan, dispatch and combine for the ranks of one NVLink domain.
 *
 * Letters: R ranks, E experts of the group, L = E / R experts of a rank, T tokens of a rank, K
 * assignments of a token (top-k), H numbers of a row, N rows that a rank receives.  Rank r holds
 * the experts r * L to (r + 1) * L - 1.
 *
 * Order of calls: ncclepGetUniqueId on one rank, ncclepCommCreate, ncclepGroupCreate and
 * ncclepGroupReserve; for each batch ncclepPlanCreate, ncclepDispatch, ncclepCombine and
 * ncclepPlanDestroy; ncclepGroupDestroy and ncclepCommDestroy.  examples/dispatch_combine.c is a
 * whole program.  docs/contract.md states the order of rows and of additions.
 *
 * Collective: every rank of the group calls it, in the same order.  A function is collective only
 * where its comment says so.  Calls that queue work are collective too, but do not wait for other
 * ranks' hosts: kernels wait, until the deadline.  Where such a call fails on one rank, call
 * ncclepGroupRefuse there: otherwise the other ranks wait until their deadline.
 *
 * Structs: every struct starts with its size.  Initialise it with the macro next to it: later
 * versions only add fields at the end.  For a library, fields that an older program does not know
 * are zero, and it does not write them; it refuses structs that are larger than its own.
 *
 * Ownership: the library copies a struct's fields.  Device memory that a struct points to is the
 * caller's and must not be changed until the queued work that uses it is over; the memory of a plan
 * must not be changed for as long as the plan exists.
 *
 * Threads and devices: one thread at a time calls functions of a communicator and of objects made
 * with it, with the communicator's device current (cudaSetDevice).  Streams are those of the CUDA
 * runtime or driver (cudaStream_t, CUstream); NULL is the default stream.
 */
#ifndef NCCLEP_H_
#define NCCLEP_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 100 * major + minor.  A larger major number: programs must be compiled again. */
#define NCCLEP_VERSION 102

#define NCCLEP_API __attribute__((visibility("default")))

/* Limits. */
#define NCCLEP_MAX_RANKS 512
#define NCCLEP_MAX_LOCAL_RANKS 72     /* of one NVLink domain, from sm_100 on; otherwise 32 */
#define NCCLEP_MAX_DOMAINS 64         /* of NVLink */
#define NCCLEP_MAX_EXPERTS 4096       /* of the group */
#define NCCLEP_MAX_LOCAL_EXPERTS 512  /* of a rank */
#define NCCLEP_MAX_TOKENS 65536       /* of a rank */
#define NCCLEP_MAX_TOP_K 32           /* assignments of a token */
#define NCCLEP_MAX_ALIGNMENT 256      /* rows */
#define NCCLEP_LOW_LATENCY_TOKENS 512 /* of a rank, in low-latency mode */
#define NCCLEP_MAX_DIMS 4             /* of a tensor */

/* --- results ---------------------------------------------------------------------------------- */

typedef enum {
  ncclepSuccess = 0,
  ncclepInvalidArgument = 1, /* a value is wrong, and nothing was done */
  ncclepInvalidUsage = 2,    /* the values are right, but the call is not allowed now */
  ncclepSystemError = 3,     /* CUDA, NCCL or the system reported an error, or memory ran out */
  ncclepRemoteError = 4, /* another rank did not come, refused a call, or made a different one */
  ncclepInterrupted = 5, /* a callback of the caller's ended the call */
  ncclepNumResults = 6
} ncclepResult_t;

/* The general meaning of a result.  Never NULL. */
NCCLEP_API const char* ncclepGetErrorString(ncclepResult_t result);

/* What was wrong in this thread's last call that failed, with the values and a remedy; "" if none
 * has failed.  Valid until the thread's next call that fails. */
NCCLEP_API const char* ncclepGetLastError(void);

/* NCCLEP_VERSION of the library. */
NCCLEP_API ncclepResult_t ncclepGetVersion(int* version);

/* --- arguments of several functions ----------------------------------------------------------- */

typedef enum {
  ncclepUint8 = 0,
  ncclepInt32 = 1,
  ncclepInt64 = 2,
  ncclepFloat16 = 3,
  ncclepBfloat16 = 4,
  ncclepFloat32 = 5,
  ncclepFloat64 = 6,
  ncclepNumTypes = 7
} ncclepDataType_t;

/* A contiguous tensor, row-major.  The memory is the caller's. */
typedef struct {
  size_t size;
  void* data; /* device memory unless a comment says host memory; may be NULL without elements */
  ncclepDataType_t dtype;
  int ndim;
  int64_t shape[NCCLEP_MAX_DIMS];
} ncclepTensor_t;
#define NCCLEP_TENSOR_INIT {sizeof(ncclepTensor_t), NULL, ncclepUint8, 0, {0, 0, 0, 0}}

/* Called now and then while a call waits on the host; any result but 0 ends the call
 * (ncclepInterrupted). */
typedef int (*ncclepPoll_t)(void* user);

/* Gathers `num_bytes` bytes of every rank into `all`, by rank, on the hosts; the same number on
 * all.  `what` names the step in the caller's own errors.  Must return within about `timeout_s`
 * seconds.  Anything but ncclepSuccess ends the call that needs it with ncclepInterrupted. */
typedef ncclepResult_t (*ncclepAllGather_t)(void* user, const void* mine, size_t num_bytes,
                                            void* all, const char* what, double timeout_s);

typedef struct ncclepComm* ncclepComm_t;
typedef struct ncclepGroup* ncclepGroup_t;
typedef struct ncclepPlan* ncclepPlan_t;
typedef struct ncclepLowLatency* ncclepLowLatency_t;

/* --- communicators ---------------------------------------------------------------------------- */

/* Identifies a communicator to be made; plain bytes, to be sent to the other ranks by any means. */
typedef struct {
  char bytes[128];
} ncclepUniqueId_t;

typedef struct {
  size_t size;
  ncclepUniqueId_t unique_id; /* of ncclepGetUniqueId, called on one rank; the same on all */
  int num_ranks;              /* R, at most NCCLEP_MAX_RANKS for a group */
  int rank;                   /* of this process, 0 to R - 1 */
  int device;                 /* of the CUDA runtime; becomes current.  -1: the current one */
  double timeout_s;           /* seconds to wait for the other ranks */
  const char* nccl_path;      /* of libnccl.so.2; NULL: the one that is loaded or that the loader
                                 finds.  NCCL 2.28.9 or newer */
  ncclepPoll_t poll;          /* may be NULL */
  void* user;                 /* passed to poll */
} ncclepCommConfig_t;
#define NCCLEP_COMM_CONFIG_INIT \
  {sizeof(ncclepCommConfig_t), {{0}}, 1, 0, -1, 60.0, NULL, NULL, NULL}

/* Makes a unique id with the NCCL at `nccl_path`; NULL as in ncclepCommConfig_t. */
NCCLEP_API ncclepResult_t ncclepGetUniqueId(ncclepUniqueId_t* id, const char* nccl_path);

/* Makes an NCCL communicator, over which any number of groups can be made.  Collective.
 * ncclepRemoteError: not all ranks came in time. */
NCCLEP_API ncclepResult_t ncclepCommCreate(ncclepComm_t* comm, const ncclepCommConfig_t* config);

/* Destroys the communicator; destroy its groups first.  Collective. */
NCCLEP_API ncclepResult_t ncclepCommDestroy(ncclepComm_t comm);

/* Gives up the communicator without the other ranks, after an error.  Not collective. */
NCCLEP_API ncclepResult_t ncclepCommAbort(ncclepComm_t comm);

/* --- groups ----------------------------------------------------------------------------------- */

typedef struct {
  size_t size;
  int num_experts;              /* E, a multiple of R; the same on all ranks */
  double timeout_s;             /* deadline of every wait, of kernels and hosts, in seconds */
  ncclepAllGather_t all_gather; /* NULL: NCCL gathers, on a stream of the library's own */
  ncclepPoll_t poll;            /* may be NULL */
  void* user;                   /* passed to both */
} ncclepGroupConfig_t;
#define NCCLEP_GROUP_CONFIG_INIT {sizeof(ncclepGroupConfig_t), 0, 60.0, NULL, NULL, NULL}

/* The largest batch that windows, which other ranks read and write, have to hold. */
typedef struct {
  size_t size;
  int num_tokens;   /* of the rank with the most */
  int top_k;        /* K */
  size_t row_bytes; /* bytes of a row, a multiple of 16 */
} ncclepShape_t;
#define NCCLEP_SHAPE_INIT {sizeof(ncclepShape_t), 0, 1, 16}

typedef struct {
  size_t size;
  int num_ranks, rank, num_experts;
  int max_tokens, max_top_k; /* what the windows hold; 0 without windows */
  size_t row_bytes;
  size_t num_bytes;   /* of the windows of this rank */
  int was_captured;   /* whether a CUDA graph holds calls of the group */
  const char* growth; /* what grew when the windows were last made, such as "tokens 0 -> 128"; valid
                         until they are made again */
  int num_domains;    /* NVLink domains that the ranks are in; since 1.01 */
  int num_token_routes; /* rows of a plan's token routes, 4 for up to 32 ranks; since 1.01 */
} ncclepGroupInfo_t;
#define NCCLEP_GROUP_INFO_INIT {sizeof(ncclepGroupInfo_t), 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0}

/* Makes a group without windows.  It does not wait for the other ranks, but all ranks make the same
 * groups in the same order. */
NCCLEP_API ncclepResult_t ncclepGroupCreate(ncclepGroup_t* group, ncclepComm_t comm,
                                            const ncclepGroupConfig_t* config);

/* Makes windows that hold `shape` and all earlier shapes; does nothing if they already do.
 * The ranks write and read words in each other's windows before any kernel uses them.  Collective
 * when windows grow, with the same shape; waits for what was queued for the communicator.
 * ncclepInvalidUsage on all ranks: a CUDA graph of a rank holds calls of the group, or `stream` is
 * being captured.  ncclepSystemError on all ranks: the queued work of one is not over within half
 * of the deadline, or one has no memory, or cannot reach another's. */
NCCLEP_API ncclepResult_t ncclepGroupReserve(ncclepGroup_t group, const ncclepShape_t* shape,
                                             void* stream);

/* Starts a call: sets the deadline of what is queued from now on, and says whether the windows hold
 * `shape` (NULL: any do).  Does not wait.
 * ncclepRemoteError: the group has failed; see ncclepGroupGetFailure.  The deadline is set even
 * then. */
NCCLEP_API ncclepResult_t ncclepGroupBegin(ncclepGroup_t group, double timeout_s,
                                           const ncclepShape_t* shape, int* fits);

NCCLEP_API ncclepResult_t ncclepGroupGetInfo(ncclepGroup_t group, ncclepGroupInfo_t* info);

/* Waits until all work of the communicator's groups that this rank has queued outside CUDA graphs
 * is over; call ncclepGroupGetFailure then. */
NCCLEP_API ncclepResult_t ncclepGroupWait(ncclepGroup_t group);

typedef enum {
  ncclepPhaseNone = 0,
  ncclepPhasePlan = 1,
  ncclepPhaseRoutes = 2, /* of a plan: receiving routes */
  ncclepPhaseDispatch = 3,
  ncclepPhaseCombine = 4,
  ncclepPhaseLowLatencyDispatch = 5,
  ncclepPhaseLowLatencyCombine = 6
} ncclepPhase_t;

typedef enum {
  ncclepReasonNone = 0,     /* the group has not failed */
  ncclepReasonLate = 1,     /* `peer` did not come before the deadline */
  ncclepReasonDiffers = 2,  /* `peer` made another call, or with other arguments */
  ncclepReasonRefused = 3,  /* `peer` called ncclepGroupRefuse */
  ncclepReasonOutOfTurn = 4 /* low-latency dispatch and combine did not alternate here */
} ncclepReason_t;

typedef struct {
  size_t size;
  ncclepReason_t reason;
  ncclepPhase_t phase;          /* in which this rank was */
  int peer;                     /* the rank that caused it */
  uint64_t operation;           /* its number, counted on the device */
  double deadline_s;            /* of the wait */
  uint64_t own_call, peer_call; /* for ncclepReasonDiffers: what was compared, packed; for
                                   ncclepReasonLate: 0 unless `peer` has entered this call */
} ncclepFailure_t;
#define NCCLEP_FAILURE_INIT \
  {sizeof(ncclepFailure_t), ncclepReasonNone, ncclepPhaseNone, -1, 0, 0.0, 0, 0}

/* Why the group has failed, as far as the device has reported.  Does not wait.  A failed group
 * stays failed: everything that kernels deliver is NaN from then on.  Destroy it on all ranks. */
NCCLEP_API ncclepResult_t ncclepGroupGetFailure(ncclepGroup_t group, ncclepFailure_t* failure);

/* The ranks whose routing was bad, in static plans and in low-latency dispatches, as far as the
 * device has reported: an index that is not an expert, or one that a token names twice, counted as
 * not routed.  Each is written as NCCLEP_MAX_RANKS / 32 words, rank r as bit r % 32 of word r / 32,
 * or NULL.  `forget` not 0 clears them; no work may be in flight then. */
NCCLEP_API ncclepResult_t ncclepGroupBadRoutings(ncclepGroup_t group, int forget, uint32_t* plans,
                                                 uint32_t* low_latency);

/* Tells the other ranks' devices that this rank does not make the call that they are in: their
 * waits end, and the group has failed on all ranks.  Not collective, and does not wait. */
NCCLEP_API ncclepResult_t ncclepGroupRefuse(ncclepGroup_t group, ncclepPhase_t phase, void* stream);

/* Queues a copy to `out`, int64 [1]: nanoseconds in total for which kernels here have waited for
 * other ranks to enter a call. */
NCCLEP_API ncclepResult_t ncclepGroupCopyWaitedNs(ncclepGroup_t group, const ncclepTensor_t* out,
                                                  void* stream);

/* Frees windows and state.  Collective; waits for the device.  Destroy its plans and low-latency
 * objects first.  After an error, such as ncclepRemoteError because queued work is not over within
 * the longest deadline of a call, the handle stays valid, and may be destroyed again. */
NCCLEP_API ncclepResult_t ncclepGroupDestroy(ncclepGroup_t group);

/* The fewest SMs with which dispatch and combine run between `num_ranks` ranks. */
NCCLEP_API ncclepResult_t ncclepMinSms(int num_ranks, int* num_sms);

/* --- plans ------------------------------------------------------------------------------------ */

/* The routes of one batch, and their memory.
 *
 * Exact mode (max_recv_rows 0): a rank receives the rows that are routed to it, and ncclepPlanWait
 * returns their number.  Static mode: it always receives max_recv_rows rows, no host waits, and a
 * CUDA graph can capture all calls. */
typedef struct {
  size_t size;
  const ncclepTensor_t* topk_idx; /* int32 or int64 [T, K]: experts; -1: not routed */
  int most_tokens;                /* of the rank with the most, or more; the same on all ranks */
  uint64_t number;                /* tells plans apart; the same on all ranks */
  int alignment;                  /* an expert's block has a multiple of so many rows, 1 to 256 */
  int64_t max_recv_rows;          /* N in static mode; 0: exact mode */
  const ncclepTensor_t* counts;   /* int64 [2 * L + 1], written: rows of each expert's block with
                                     padding, then without, then assignments dropped */
  const ncclepTensor_t* token_routes; /* int32 [num_token_routes, T], written */
  const ncclepTensor_t* routes;       /* int32 [ncclepRoutesSize(...)], written */
  int64_t max_pairs;          /* room for so many (source rank, token) with assignments here; R *
                                 most_tokens always suffices */
  int64_t max_assignments;    /* room for so many assignments; max_pairs * min(K, L) suffices */
  const ncclepTensor_t* kept; /* int32 [T, K], scratch: static mode where rows may be dropped; NULL:
                                 max_recv_rows is enough for any routing */
  const ncclepTensor_t* lacked; /* int64 [R], updated: the most rows that each rank lacked; NULL:
                                   not needed; needs kept */
  int num_sms;                  /* that the kernels may use, at least ncclepMinSms */
  void* stream;
  int leaves_unused; /* 1: static mode zeros no rows after the last block, but their weights */
} ncclepPlanConfig_t;
#define NCCLEP_PLAN_CONFIG_INIT \
  {sizeof(ncclepPlanConfig_t), NULL, 0, 0, 1, 0, NULL, NULL, NULL, 0, 0, NULL, NULL, 32, NULL, 0}

/* The numbers of rows, pairs and assignments that a rank receives. */
typedef struct {
  size_t size;
  int64_t num_rows;        /* N, padding included */
  int64_t num_pairs;       /* (source rank, token) with assignments here */
  int64_t num_assignments; /* N without padding */
  int first_bad_rank; /* the lowest whose topk_idx named a nonexistent expert, or one twice: then
                         the plan cannot be used; -1: none */
  int has_room;       /* whether the routes were received; 0: call ncclepPlanReceive */
} ncclepPlanSizes_t;
#define NCCLEP_PLAN_SIZES_INIT {sizeof(ncclepPlanSizes_t), 0, 0, 0, -1, 0}

/* Elements of a plan's `routes`. */
NCCLEP_API ncclepResult_t ncclepRoutesSize(ncclepGroup_t group, int64_t max_pairs,
                                           int64_t max_assignments, int most_tokens,
                                           int64_t* num_elements);

/* Makes a plan and queues its kernels.  Collective.  In exact mode ncclepPlanWait must follow
 * before the next plan of the group. */
NCCLEP_API ncclepResult_t ncclepPlanCreate(ncclepPlan_t* plan, ncclepGroup_t group,
                                           const ncclepPlanConfig_t* config);

/* Waits on the host until the device has counted the arriving rows; exact mode only.  Once the
 * stream has reached the plan, for at most twice the deadline.  ncclepRemoteError: another rank did
 * not come.  rows_of_expert: host memory, int64 [L], written: rows of an expert's block, padded. */
NCCLEP_API ncclepResult_t ncclepPlanWait(ncclepPlan_t plan, ncclepGroup_t group,
                                         const ncclepTensor_t* rows_of_expert, void* stream,
                                         ncclepPlanSizes_t* sizes);

/* Queues receiving the routes again, with more room; `routes` replaces the plan's.  Not
 * collective: the other ranks need not know. */
NCCLEP_API ncclepResult_t ncclepPlanReceive(ncclepPlan_t plan, ncclepGroup_t group,
                                            const ncclepTensor_t* routes, int64_t max_pairs,
                                            int64_t max_assignments, int num_sms, void* stream);

/* Forgets the plan; the memory is the caller's.  Not collective. */
NCCLEP_API ncclepResult_t ncclepPlanDestroy(ncclepPlan_t plan);

/* --- dispatch and combine --------------------------------------------------------------------- */

/* Rows at the tokens' source rank and at the experts; dispatch reads the first two and writes the
 * last two, combine does the reverse.  All data pointers are multiples of 16. */
typedef struct {
  size_t size;
  const ncclepTensor_t* tokens; /* [T, H]: bf16, fp16, fp32; dispatch also moves uint8 */
  const ncclepTensor_t* topk_w; /* fp32 [T, K]; NULL without weights */
  const ncclepTensor_t* rows;   /* [N, H], of the same dtype */
  const ncclepTensor_t* row_w;  /* fp32 [N]; NULL without weights */
  const ncclepTensor_t* sums; /* combine only: [ncclepCombineScratch(...), H] of that dtype; may be
                                 NULL where that is 0 */
  int num_sms;                /* as in the plan */
  void* stream;
} ncclepRows_t;
#define NCCLEP_ROWS_INIT {sizeof(ncclepRows_t), NULL, NULL, NULL, NULL, NULL, 32, NULL}

/* Queues copying tokens, and their weights, to the ranks of their experts.  Collective. */
NCCLEP_API ncclepResult_t ncclepDispatch(ncclepGroup_t group, ncclepPlan_t plan,
                                         const ncclepRows_t* rows);

/* Queues adding up the experts' rows for each token, unweighted; row_w arrive in topk_w, one for
 * each assignment.  Collective. */
NCCLEP_API ncclepResult_t ncclepCombine(ncclepGroup_t group, ncclepPlan_t plan,
                                        const ncclepRows_t* rows);

/* Rows of scratch that a combine of such rows needs. */
NCCLEP_API ncclepResult_t ncclepCombineScratch(ncclepGroup_t group, ncclepPlan_t plan, int num_sms,
                                               int row_bytes, int64_t* num_rows);

/* --- low-latency mode: few tokens, without a plan --------------------------------------------- */

typedef struct {
  size_t size;
  int max_tokens;           /* M, of a rank, at most NCCLEP_LOW_LATENCY_TOKENS */
  int hidden;               /* H */
  int top_k;                /* K */
  ncclepDataType_t payload; /* of dispatched rows: `dtype`, or uint8 */
  ncclepDataType_t dtype;   /* of combined rows: bf16, fp16 or fp32 */
  int num_scales;           /* fp32 scales that travel with each dispatched row; may be 0 */
} ncclepLowLatencyConfig_t;
#define NCCLEP_LOW_LATENCY_CONFIG_INIT \
  {sizeof(ncclepLowLatencyConfig_t), 0, 0, 0, ncclepBfloat16, ncclepBfloat16, 0}

/* The results of a dispatch, in memory of the object: by source rank and token.  The addresses stay
 * the same for the object's life; the contents, until the next dispatch. */
typedef struct {
  size_t size;
  void* rows;       /* payload [R, M, H] */
  float* scales;    /* [R, M, num_scales] */
  int32_t* experts; /* [R, M, K], read only: local experts; -1: not routed to this rank */
  float* weights;   /* [R, M, K] */
  size_t num_bytes; /* of the object's window on this rank */
} ncclepLowLatencyBuffers_t;
#define NCCLEP_LOW_LATENCY_BUFFERS_INIT \
  {sizeof(ncclepLowLatencyBuffers_t), NULL, NULL, NULL, NULL, 0}

/* Makes an object for calls of one shape, and windows for a group without any.  Collective, with
 * the same config.  Dispatch and combine must alternate. */
NCCLEP_API ncclepResult_t ncclepLowLatencyCreate(ncclepLowLatency_t* low_latency,
                                                 ncclepGroup_t group,
                                                 const ncclepLowLatencyConfig_t* config);

NCCLEP_API ncclepResult_t ncclepLowLatencyGetBuffers(ncclepLowLatency_t low_latency,
                                                     ncclepLowLatencyBuffers_t* buffers);

typedef struct {
  size_t size;
  const ncclepTensor_t* x;        /* payload [T, H]; NULL: only complete the last dispatch */
  const ncclepTensor_t* scales;   /* fp32 [T, num_scales]; NULL without scales */
  const ncclepTensor_t* topk_idx; /* int32 or int64 [T, K]; -1: not routed */
  const ncclepTensor_t* weights;  /* fp32 [T, K] */
  const ncclepTensor_t* counts;   /* int32 [R], written: tokens of each rank */
  int completes;                  /* 0: send only; another call with x NULL completes it */
  int num_ctas;                   /* of the kernel, at most the GPU's SMs */
  void* stream;
} ncclepLowLatencyDispatch_t;
#define NCCLEP_LOW_LATENCY_DISPATCH_INIT \
  {sizeof(ncclepLowLatencyDispatch_t), NULL, NULL, NULL, NULL, NULL, 1, 8, NULL}

/* Queues a dispatch or half of one.  Collective. */
NCCLEP_API ncclepResult_t ncclepLowLatencyDispatch(ncclepLowLatency_t low_latency,
                                                   const ncclepLowLatencyDispatch_t* dispatch);

typedef struct {
  size_t size;
  const ncclepTensor_t* y;       /* [R * M, H] of the config's dtype; with rows_of, [any, H] */
  const ncclepTensor_t* rows_of; /* int32 [R, M, K]: which rows of y are added up for each place, in
                                    this order; -1: none.  NULL: row i is that of place i */
  const ncclepTensor_t* out;     /* [T, H], written */
  int sends, completes;          /* either half, or both */
  int num_ctas;
  void* stream;
} ncclepLowLatencyCombine_t;
#define NCCLEP_LOW_LATENCY_COMBINE_INIT \
  {sizeof(ncclepLowLatencyCombine_t), NULL, NULL, NULL, 1, 1, 8, NULL}

/* Queues a combine or half of one, the second with the arguments of the first.  Collective. */
NCCLEP_API ncclepResult_t ncclepLowLatencyCombine(ncclepLowLatency_t low_latency,
                                                  const ncclepLowLatencyCombine_t* combine);

/* Frees the object.  Collective; waits for the device. */
NCCLEP_API ncclepResult_t ncclepLowLatencyDestroy(ncclepLowLatency_t low_latency);

#ifdef __cplusplus
}
#endif

#endif /* NCCLEP_H_ */
