// Plan's second kernel for NVLink domains of more than 32 ranks (state.h).
#define NCCLEP_RANK_GROUPS 3
#include "native/plan/plan_receive.cu"
