// Refusals and last words for NVLink domains of more than 32 ranks (state.h).
#define NCCLEP_RANK_GROUPS 3
#include "native/device/stop.cu"
