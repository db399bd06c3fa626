"""Mistakes in rounds, with many ranks and in messages, which must show (test_emulation.py)."""

# As `Mistake` has them.
# fmt: off
MISTAKES = {
    # In rounds, which every step of a training with large batches has, with weights.
    "rounds: two of a dispatch lie in one half": (
        "native/rows/stage.cuh", "(parity + «round.number») % 2", "0",
        "rails-dispatches", 4, "dispatch: ", 107),
    "rounds: CTAs that have staged two are counted together": (
        "native/rows/stage.cuh", "ctx.control_of[ctx.rank] + counts) + «unit»;", "phase",
        "rails-dispatches", 4, ".", 107),
    "rounds: the second is staged before all ranks have entered": (
        "native/rails/phases.cuh",
        "is_free = «wait_for_entry(ctx, Phase::kDispatch, rank, entry, epoch) != 0»;", "true",
        "rails-dispatches", 4, "dispatch: ", 2),
    "rounds: one is staged before this domain has pulled the last but one": (
        "native/rails/phases.cuh",
        "«wait_for_round(ctx, Phase::kDispatch, rank_at(ctx, threadIdx.x), round.number - 2, "
        "epoch)»;",
        "true",
        "rails-dispatches", 4, "dispatch: ", 7),
    "rounds: one is staged before other domains have pulled the last but one": (
        "native/rails/phases.cuh",
        "is_free = «wait_for_signal(ctx, rails, Phase::kDispatch, kPulledPut, threadIdx.x,\n"
        + " " * 32 + "round.number - 1, epoch)» &&",
        "true",
        "rails-dispatches", 4, "dispatch: ", 5),
    "rounds: a domain says that it has pulled one before all of its ranks have": (
        "native/rails/phases.cuh",
        "«wait_for_round(ctx, Phase::kDispatch, rank_at(ctx, local_rank), number, epoch)»);",
        "true",
        "rails-dispatches", 4, "dispatch: "),
    "rounds: a dispatch is over before other domains have pulled its last but one": (
        "native/rails/phases.cuh",
        "if («!wait_for_signal(ctx, rails, Phase::kDispatch, kPulledPut, domain, last, epoch)»)",
        "false",
        "rails-dispatches", 4, ".", 9),
    "rounds: sums of ranks are sent before there is room": (
        "native/rows/combine.cu",
        "«wait_for_round(ctx, Phase::kCombine, host_of(ctx, source),\n"
        + " " * 40 + "round.number - 1, epoch)»", "true",
        "rails-combines", 4, ".", 1),
    "rounds: domains' sums of two lie in one place": (
        "native/rail_layout.h", "return «round % 2» * turn_parts()", "0",
        "rails-combines", 4, "combine: ", 1),
    "rounds: a domain's sums are made before this rank's last but one are added up": (
        "native/rows/domain_sums.cuh",
        "is_free = «wait_for_warps(ctx_, [&] { return are_added(ctx_, before); })»;", "true",
        "rails-combines", 4, "combine: ", 2),
    "rounds: a domain's sums are made before the rail peers' last but one are added up": (
        "native/rows/domain_sums.cuh",
        "is_free = «wait_for_signal(ctx_, rails_, Phase::kCombine, kAddedUpPut, domain,\n"
        + " " * 34 + "round.number - 1, epoch_)»;", "true",
        "rails-combines", 4, "combine: ", 1),
    "rounds: a rank says that its sums are added up before they are": (
        "native/rows/domain_sums.cuh",
        "is_over = «wait_for_warps(ctx, [&] { return are_added(ctx, round); })»;", "true",
        "rails-combines", 4, "combine: ", 2),
    "rounds: rows of one are taken after those of the last did not come": (
        "native/rows/dispatch.cu", "num_rounds_of(job) && «goes_on»; ++number", "true",
        "rails-failures", 4, ".", 5),
    "rounds: windows say how many there are, not the batch": (
        "native/rails/rounds.cuh", "return «*job.rail_routes.most_chunks * kChunk»;",
        "job.most_tokens",
        "rails-dispatches", 2, "dispatch: rounds of rank", 8),
    "rounds: only the first one's weights are put": (
        "native/rails/phases.cuh", "if («job.has_weights && last > start») {",
        "job.has_weights && last > start && round.number == 0",
        "rails-rows", 4, "dispatch: weight", 1),
    "rounds: a dispatch begins in the half of the last one's last but one": (
        "native/rows/dispatch.cu", "dispatches = dispatches + «num_rounds - 1»;", "0",
        "rails-dispatches", 4, "."),
    "rounds: values of later ones are put where the first's are": (
        "native/rows/domain_sums.cuh", "first = std::size_t{4} * «start» * job.top_k;",
        "(start - round.begin)",
        "rails-combines", 4, "combine: weights", 1),
    "rounds: the phases of one are counted once": (
        "native/rows/combine.cu",
        "count_signals<R>(ctx, kSumsPut, «num_rounds * num_phases_in(job)»);", "num_phases_in(job)",
        "rails-combines", 2, "."),

    # Of one round as of several.
    "rails: the last phase is not followed by the first": (
        "native/rails/phases.cuh", "«unit + 1 < all ? unit + 1 : 0u»", "unit + 1",
        "rails-dispatches", 2, "a wait was in vain|nobody gets any further"),
    "rails: a refusal stays in its domain": (
        "native/device/stop.cu",
        "put_last(ctx, rails, now_ns(), domain, ctx.control.stop(), sent, 8, kStopPut);", "",
        "rails-failures", 2, "failure: rank . does not say that rank . refused", 8),
    "rails: a second closing waits for nothing": (
        "native/device/stop.cu", "count_signals<Rails>(ctx, kLastPut, kLastRounds);", "",
        "rails-plans", 4, "bytes are on their way", 5),
    "rails: counts of dropped assignments are those of the plan before": (
        "native/plan/overflow.cu", "count_signals<R>(ctx, kRequestsPut, 1);", "",
        "rails-plans", 4, ".", 2),

    # More ranks than a warp has lanes.
    "many ranks: a bad routing is said to be of one of the first 32": (
        "native/plan/plan.cu", "«32 * word» + __ffs(", "0",
        "rails-many", 33, "plan: the first bad rank"),
    "many ranks: what was seen of another group of sources counts": (
        "native/rows/progress.cuh", "if («seen / kMostUnits == group» && unit", "true",
        "rails-many", 36, "dispatch: ", 2),
    "many ranks: LL: a bad routing is said to be of one of the first 32": (
        "native/low_latency/dispatch.cu", "atomicOr(«bad_ranks + rank / 32»,", "bad_ranks",
        "rails-ll-many", 33, "ll dispatch: bad ranks", 1),

    # What travels with rows, and what ranks compare.
    "LL: scales do not come within a domain": (
        "native/low_latency/dispatch.cu",
        "row * scale_vectors;\n    for (int i = lane; i < scale_vectors; i += 32) "
        "«to_scales[i] = __ldg(scales + i);»", "",
        "ll", 2, "ll dispatch: scales"),
    "rails: LL: scales are not passed on": (
        "native/low_latency/rail_tokens.cuh", "to_scales[s] = __ldcg(scales + s);", "",
        "rails-ll", 4, "ll dispatch: scales"),
    "bad routings of the plans before are forgotten": (
        "native/plan/plan.cu", "ctx.mailbox->bad_ranks.words[lane] |= bad;",
        "ctx.mailbox->bad_ranks.words[lane] = bad;",
        "plans", 3, "plan: bad ranks of static plans", 39),
    "the presence of weights is not in a call": (
        "native/host/call_signature.cpp", ".put(«has_weights», kWeightBits)", "false",
        "calls", 2, "failure: rank . has waited for nobody", 14),
}
# fmt: on
