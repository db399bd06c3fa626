/* Dispatch and combine between processes, with the C interface alone: no Python, no torch.
 *
 * Each of two ranks has tokens; each token goes to two experts, which multiply their rows by the
 * number of the expert plus one; combine adds up the returned rows.  Each rank checks every number.
 *
 *     dispatch_combine [RANKS [EXPERTS]]     2 ranks and 4 experts unless given
 *
 * Build, with the installed package and a CUDA toolkit (editable installations have the header in
 * csrc/include):
 *
 *     P=$(python -c "import megatron_ncclep as m; print(m.__path__[0])")
 *     cc -std=c99 -I"$P/include" -I/usr/local/cuda/include dispatch_combine.c -L"$P" -lncclep \
 *        -Wl,-rpath,"$P" -L/usr/local/cuda/lib64 -lcudart -o dispatch_combine
 *
 * NCCLEP_NCCL_LIBRARY may name NCCL, and each rank uses its own GPU if there are enough.
 * On one GPU: NCCL_MULTI_RANK_GPU_ENABLE=1, with NCCL 2.30 or newer.
 */
#define _POSIX_C_SOURCE 200809L
#include <cuda_runtime_api.h>
#include <ncclep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TOKENS = 5, TOP_K = 2, HIDDEN = 8, MOST_RANKS = 8 };

static int rank = -1;

static void check(ncclepResult_t result, const char* call) {
  if (result == ncclepSuccess) return;
  fprintf(stderr, "rank %d: %s: %s (code %d): %s\n", rank, call, ncclepGetErrorString(result),
          result, ncclepGetLastError());
  exit(1);
}
#define CHECK(call) check(call, #call)

static void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, call, cudaGetErrorString(error));
  exit(1);
}
#define CUDA(call) check_cuda(call, #call)

/* A tensor [rows, columns], or [rows] for 0 columns, in new device memory. */
static ncclepTensor_t tensor(ncclepDataType_t dtype, int64_t rows, int64_t columns) {
  ncclepTensor_t made = NCCLEP_TENSOR_INIT;
  made.dtype = dtype;
  made.ndim = columns ? 2 : 1;
  made.shape[0] = rows;
  made.shape[1] = columns;
  CUDA(cudaMalloc(&made.data, (size_t)(rows * (columns ? columns : 1)) * 8));
  return made;
}

/* Routing: token t of rank r goes to the experts t + r and t + r + 1, modulo E. */
static int expert_of(int token, int of_rank, int k, int experts) {
  return (token + of_rank + k) % experts;
}

/* Content that identifies its rank, token and column; small enough to add exactly in fp32. */
static float content(int of_rank, int token, int column) {
  return (float)(1000 * of_rank + 10 * token + column % 8 + 1);
}

static int run(int ranks, int experts, const ncclepUniqueId_t* id) {
  int gpus = 0, local = experts / ranks, fits = 0, wrong = 0;
  CUDA(cudaGetDeviceCount(&gpus));
  ncclepCommConfig_t comm_config = NCCLEP_COMM_CONFIG_INIT;
  comm_config.unique_id = *id;
  comm_config.num_ranks = ranks;
  comm_config.rank = rank;
  comm_config.device = rank % gpus;
  comm_config.nccl_path = getenv("NCCLEP_NCCL_LIBRARY");
  ncclepComm_t comm;
  CHECK(ncclepCommCreate(&comm, &comm_config));
  ncclepGroupConfig_t group_config = NCCLEP_GROUP_CONFIG_INIT;
  group_config.num_experts = experts;
  ncclepGroup_t group;
  CHECK(ncclepGroupCreate(&group, comm, &group_config));
  ncclepShape_t shape = NCCLEP_SHAPE_INIT;
  shape.num_tokens = TOKENS;
  shape.top_k = TOP_K;
  shape.row_bytes = HIDDEN * sizeof(float);
  CHECK(ncclepGroupReserve(group, &shape, NULL));
  CHECK(ncclepGroupBegin(group, 60, &shape, &fits));

  int64_t topk[TOKENS * TOP_K], routes_size, rows_of_expert[NCCLEP_MAX_EXPERTS];
  float x[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
  for (int t = 0; t < TOKENS; ++t) {
    for (int k = 0; k < TOP_K; ++k) topk[t * TOP_K + k] = expert_of(t, rank, k, experts);
    for (int h = 0; h < HIDDEN; ++h) x[t * HIDDEN + h] = content(rank, t, h);
  }
  ncclepTensor_t topk_idx = tensor(ncclepInt64, TOKENS, TOP_K);
  ncclepTensor_t tokens = tensor(ncclepFloat32, TOKENS, HIDDEN);
  CUDA(cudaMemcpy(topk_idx.data, topk, sizeof(topk), cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(tokens.data, x, sizeof(x), cudaMemcpyHostToDevice));

  /* The plan: room for any routing. */
  ncclepTensor_t counts = tensor(ncclepInt64, 2 * local + 1, 0);
  ncclepTensor_t token_routes = tensor(ncclepInt32, 4, TOKENS);
  ncclepPlanConfig_t config = NCCLEP_PLAN_CONFIG_INIT;
  config.max_pairs = (int64_t)ranks * TOKENS;
  config.max_assignments = config.max_pairs * (TOP_K < local ? TOP_K : local);
  CHECK(ncclepRoutesSize(group, config.max_pairs, config.max_assignments, TOKENS, &routes_size));
  ncclepTensor_t routes = tensor(ncclepInt32, routes_size, 0);
  config.topk_idx = &topk_idx;
  config.most_tokens = TOKENS;
  config.number = 1;
  config.counts = &counts;
  config.token_routes = &token_routes;
  config.routes = &routes;
  config.num_sms = 16;
  ncclepPlan_t plan;
  CHECK(ncclepPlanCreate(&plan, group, &config));
  ncclepTensor_t on_host = NCCLEP_TENSOR_INIT; /* rows_of_expert, int64 [L] */
  on_host.data = rows_of_expert;
  on_host.dtype = ncclepInt64;
  on_host.ndim = 1;
  on_host.shape[0] = local;
  ncclepPlanSizes_t sizes = NCCLEP_PLAN_SIZES_INIT;
  CHECK(ncclepPlanWait(plan, group, &on_host, NULL, &sizes));

  ncclepTensor_t rows = tensor(ncclepFloat32, sizes.num_rows, HIDDEN);
  ncclepRows_t moved = NCCLEP_ROWS_INIT;
  moved.tokens = &tokens;
  moved.rows = &rows;
  moved.num_sms = 16;
  CHECK(ncclepDispatch(group, plan, &moved));

  /* The experts: blocks of rows, one after the other. */
  const size_t bytes = (size_t)sizes.num_rows * HIDDEN * sizeof(float);
  float *y = malloc(bytes + 1), *row = y;
  CUDA(cudaMemcpy(y, rows.data, bytes, cudaMemcpyDeviceToHost));
  for (int e = 0; e < local; ++e) {
    for (int64_t i = 0; i < rows_of_expert[e] * HIDDEN; ++i)
      *row++ *= (float)(rank * local + e + 1);
  }
  CUDA(cudaMemcpy(rows.data, y, bytes, cudaMemcpyHostToDevice));

  int64_t num_sums;
  CHECK(ncclepCombineScratch(group, plan, 16, HIDDEN * sizeof(float), &num_sums));
  ncclepTensor_t sums = tensor(ncclepFloat32, num_sums, HIDDEN);
  moved.sums = num_sums ? &sums : NULL;
  CHECK(ncclepCombine(group, plan, &moved));
  CHECK(ncclepGroupWait(group));
  CHECK(ncclepGroupBegin(group, 60, &shape, &fits)); /* an error of another rank */
  CUDA(cudaMemcpy(out, tokens.data, sizeof(out), cudaMemcpyDeviceToHost));
  for (int t = 0; t < TOKENS; ++t) {
    float factor = 0;
    for (int k = 0; k < TOP_K; ++k) factor += (float)(expert_of(t, rank, k, experts) + 1);
    for (int h = 0; h < HIDDEN; ++h) {
      wrong += out[t * HIDDEN + h] != factor * content(rank, t, h);
    }
  }
  printf("rank %d of %d: sent %d tokens, received %lld rows, %d of %d numbers are wrong\n", rank,
         ranks, TOKENS, (long long)sizes.num_rows, wrong, TOKENS * HIDDEN);
  CHECK(ncclepPlanDestroy(plan));
  CHECK(ncclepGroupDestroy(group));
  CHECK(ncclepCommDestroy(comm));
  return wrong != 0;
}

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? atoi(argv[1]) : 2, experts = argc > 2 ? atoi(argv[2]) : 2 * ranks;
  if (ranks < 1 || ranks > MOST_RANKS || experts < ranks || experts % ranks != 0) {
    fprintf(stderr, "%d ranks, %d experts: 1 to 8 ranks, and a multiple of them\n", ranks, experts);
    return 2;
  }
  int pipes[MOST_RANKS][2], failed = 0;
  for (int r = 0; r < ranks; ++r) {
    if (pipe(pipes[r]) != 0) return 2;
  }
  /* CUDA must not be used before fork: rank 0 makes the id, and sends it through the pipes. */
  for (int r = 0; r < ranks; ++r) {
    if (fork() != 0) continue;
    rank = r;
    ncclepUniqueId_t id;
    if (r == 0) CHECK(ncclepGetUniqueId(&id, getenv("NCCLEP_NCCL_LIBRARY")));
    for (int to = 1; r == 0 && to < ranks; ++to) {
      if (write(pipes[to][1], &id, sizeof(id)) != sizeof(id)) return 2;
    }
    for (int to = 0; to < ranks; ++to) close(pipes[to][1]);
    if (r != 0 && read(pipes[r][0], &id, sizeof(id)) != sizeof(id)) return 2;
    return run(ranks, experts, &id);
  }
  for (int r = 0; r < ranks; ++r) close(pipes[r][1]);
  for (int r = 0; r < ranks; ++r) {
    int status = 0;
    wait(&status);
    failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  }
  printf("%s\n", failed ? "failed" : "all ranks: right");
  return failed != 0;
}
