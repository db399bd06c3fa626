"""Sequences in NVLink domains of more than 32 ranks, and mistakes (test_emulation.py)."""

# Kind, ranks, number; no mistake, and a seed of which rows are dropped.  The last group of 32 has
# one rank, is full, or has as many as there may be; over the network it has one in each domain.
CASES = (
    ("wide-many", 33, 1), ("wide-many", 64, 1), ("wide-many", 72, 1),
    ("wide-rails-many", 66, 1, -1, 15), ("wide-failures", 36, 2),
)  # fmt: skip

# As `Mistake` has them.
# fmt: off
MISTAKES = {
    "wide: pairs of the first 32 ranks are counted": (
        "native/plan/chunks.cuh", "group < «kRankGroups»; ++group) {\n      const int first", "1",
        "wide-many", 33, "plan: ", 2),
    "wide: the ranks of each group are taken for the first 32": (
        "native/plan/chunks.cuh", "partition.num_experts + «group * kWarpSize»;", "0",
        "wide-many", 33, "plan: ", 2),
    "wide: a rank has a bit in each group": (
        "native/rank_set.cuh", "return «local_rank / kWarpSize == group» ?", "true",
        "wide-many", 33, "."),
    "wide: no group comes before that of a rank": (
        "native/rank_set.cuh", "return bits >= kWarpSize ? «~0u» :", "0u",
        "wide-many", 34, "."),
    "wide: sums of ranks after the first 32 are added up before they are there": (
        "native/rows/combine.cu", "if («is_part[group] && arrived») {",
        "group == 0 && is_part[group]",
        "wide-many", 33, "combine: ", 2),
    "wide: a refusal reaches the first 32 ranks": (
        "native/device/stop.cu", "<<<1, «kThreads», 0, reinterpret_cast<cudaStream_t>(stream)>>>"
        "(ctx, phase, rails)", "kWarpSize",
        "wide-failures", 36, "failure: rank .* does not say that rank .* refused", 2),
    "wide: the first 32 ranks of each node token are fetched": (
        "native/plan/plan_receive.cu", "words = «rails.most_tokens * kRankGroups»;",
        "rails.most_tokens",
        "wide-rails-many", 66, "plan: ranks of node token"),
    "wide: rails: sums of ranks after the first 32 are added up before they are there": (
        "native/rows/domain_sums.cuh", "arrived && («!is_part[group]» ||",
        "group > 0 || !is_part[group]",
        "wide-rails-many", 66, "combine: ", 12),
}
# fmt: on
