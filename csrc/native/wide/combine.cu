// Combine for NVLink domains of more than 32 ranks (state.h).
#define NCCLEP_RANK_GROUPS 3
#include "native/rows/combine.cu"
