"""Mistakes in rounds, with many ranks and in messages, which must show (test_emulation.py)."""

# As `Mistake` has them.
# fmt: off
MISTAKES = {
    # In rounds, which every step of a training with large batches has, with weights.
    "rounds: places of weights change with each": (
        "native/rows/dispatch.cu", "if («job.end == job.most_tokens») me.state->dispatch_calls",
        "true",
        "rails-rows", 4, "dispatch: weight"),
    "rounds: only the first one's weights are sent": (
        "native/rails/phases.cuh", "part_up_to(job, phase, «job.most_tokens»)", "job.end",
        "rails-rows", 4, "dispatch: weight"),
    "rounds: domains' sums overlap": (
        "native/rail_layout.h", "num_domains - 1 + «num_rounds * domain»", "domain",
        "rails-combines", 6, "combine: ", 9),
    "rounds: all of a dispatch use one half of the window": (
        "native/rows/dispatch.cu", "me.state->dispatches = dispatches;",
        "if (job.end == job.most_tokens) me.state->dispatches = dispatches;",
        "rails-dispatches", 4, "."),
    "rounds: values of later ones are put where the first's are": (
        "native/rows/domain_sums.cuh", "first = 4 * «start» * job.top_k", "(start - job.begin)",
        "rails-combines", 4, "combine: weights"),
    "rounds: rows of those before a failure are left as they are": (
        "native/rows/dispatch.cu", "if («has_failed(me)») {\n    fill_nan(job.rows",
        "has_failed(me) && job.begin == 0",
        "rails-failures", 4, "dispatch: rows of rank .* not all NaN", 6),
    "rounds: tokens of those before a failure are left as they are": (
        "native/rows/combine.cu", "if («has_failed(me)») {\n    fill_nan(job.out",
        "has_failed(me) && job.begin == 0",
        "rails-failures", 4, "combine: tokens of rank .* not all NaN", 18),
    "rounds: the phases of one are counted once": (
        "native/rows/combine.cu", "count_signals<R>(me, kSumsPut, «job.num_phases»);", "1",
        "rails-combines", 2, "."),

    # Of one round as of several.
    "rails: the last phase is not followed by the first": (
        "native/rails/phases.cuh", "«phase + 1 < job.num_phases ? phase + 1 : 0u»", "phase + 1",
        "rails-dispatches", 2, "a wait was in vain"),
    "rails: a refusal stays in its domain": (
        "native/device/stop.cu",
        "put(me, rails, kControlWindow, domain, me.control.stop(), sent, 8, kStopPut);", "",
        "rails-failures", 2, "failure: rank . does not say that rank . refused"),
    "rails: a second closing waits for nothing": (
        "native/device/stop.cu", "count_signals<Rails>(me, kLastPut, kLastRounds);", "",
        "rails-plans", 4, "bytes are on their way"),
    "rails: counts of dropped assignments are those of the plan before": (
        "native/plan/overflow.cu", "count_signals<R>(me, kWantedPut, 1);", "",
        "rails-plans", 4, "."),

    # More ranks than a warp has lanes.
    "many ranks: a bad routing is said to be of one of the first 32": (
        "native/plan/plan.cu", "«32 * word» + __ffs(", "0",
        "rails-many", 33, "plan: the first bad rank"),
    "many ranks: what was seen of another group of sources counts": (
        "native/rows/progress.cuh", "if («seen / kMostUnits == group» && unit", "true",
        "rails-many", 40, "dispatch: ", 2),
    "many ranks: LL: a bad routing is said to be of one of the first 32": (
        "native/low_latency/dispatch.cu", "atomicOr(«bad_ranks + rank / 32»,", "bad_ranks",
        "rails-ll-many", 33, "ll dispatch: bad ranks"),

    # What travels with rows, and what ranks compare.
    "LL: scales do not come within a domain": (
        "native/low_latency/dispatch.cu",
        "row * scale_vectors;\n    for (int i = lane; i < scale_vectors; i += 32) "
        "«to_scales[i] = __ldg(scales + i);»", "",
        "ll", 2, "ll dispatch: scales"),
    "rails: LL: scales are not passed on": (
        "native/low_latency/rail_tokens.cuh", "to_scales[s] = __ldcg(scales + s);", "",
        "rails-ll", 4, "ll dispatch: scales"),
    "rails: LL: tokens of all domains are counted as one's": (
        "native/low_latency/rail_tokens.cuh", "«ll.state->passed_on + domain»",
        "ll.state->passed_on",
        "rails-ll", 6, "."),
    "bad routings of the plans before are forgotten": (
        "native/plan/plan.cu", "me.mailbox->bad_ranks.words[lane] |= bad;",
        "me.mailbox->bad_ranks.words[lane] = bad;",
        "plans", 3, "plan: bad ranks of static plans", 19),
    "the presence of weights is not in a call": (
        "native/host/call.cpp", ".put(«has_weights», kWeightBits)", "false",
        "calls", 2, "failure: rank . has waited for nobody"),
}
# fmt: on
