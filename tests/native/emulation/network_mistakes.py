"""Sequences over the network, and mistakes that must show in them (test_emulation.py)."""

# Kind, ranks, number.
CASES = (
    ("probes", 2, 12), ("probes", 4, 12), ("probes", 6, 12), ("rails-plans", 2, 6),
    ("rails-plans", 4, 4), ("rails-plans", 6, 3), ("rails-many", 33, 1), ("rails-failures", 2, 6),
    ("rails-rows", 2, 4), ("rails-rows", 4, 3), ("rails-rows", 6, 1), ("rails-dispatches", 4, 2),
    ("rails-dispatches", 6, 1), ("rails-combines", 4, 2), ("rails-combines", 6, 1),
    ("rails-failures", 4, 5), ("rails-calls", 4, 4), ("rails-late", 4, 3), ("rails-ll", 2, 10),
    ("rails-ll", 4, 8), ("rails-ll", 6, 4), ("rails-ll-many", 36, 1), ("rails-ll-failures", 2, 8),
    ("rails-ll-failures", 4, 6),
    # Queues with few places, and a direction in which nothing gets any further.
    ("short-probes", 4, 6), ("short-rails-plans", 4, 3), ("short-rails-rows", 4, 2),
    ("short-rails-failures", 4, 4), ("short-rails-ll", 4, 4), ("short-rails-ll-failures", 4, 4),
    ("short-rails-cut", 2, 8), ("short-rails-cut", 4, 5), ("rails-cut", 4, 4),
    ("short-rails-ll-cut", 2, 8), ("short-rails-ll-cut", 4, 8),
)  # fmt: skip

# As `Mistake` has them.
# fmt: off
MISTAKES = {
    "probe: words of two rounds lie in one place": (
        "network/probe.cu", "«static_cast<int>(job.round % 2)» * 2", "0",
        "probes", 2, "probe: the word"),
    "probe: a word is taken before its signal": (
        "network/probe.cu", "(!is_put || «signals < job.round») &&", "signals + 1 < job.round",
        "probes", 2, "probe: "),
    "rails: counts are passed on before they have come": (
        "native/plan/plan_rails.cuh",
        "«wait_for_signal(ctx, rails, Phase::kPlan, kCountsPut, domain, 1, epoch)»;",
        "true",
        "rails-plans", 2, "plan: "),
    "rails: routes are passed on before they have come": (
        "native/plan/plan_rails.cuh",
        "are_put && «wait_for_signal(ctx, rails, Phase::kRoutes, kRoutesPut, domain, 1, epoch)»)",
        "true",
        "rails-plans", 2, "."),
    "rails: routes are written while the last ones are put": (
        "native/plan/plan.cu",
        "is_free = «wait_for_numbered(ctx, Phase::kRoutes, rank, epoch, word, plans) >= 0»;",
        "true",
        "rails-plans", 4, "."),
    "rails: who passes routes on does not pass on what it has seen": (
        "native/plan/plan_rails.cuh", "epoch)) {\n      «fence_system();»", "",
        "rails-plans", 4, "plan: "),
    "rails: counts of dropped assignments are passed on before they have come": (
        "native/plan/overflow.cu",
        "«wait_for_signal(ctx, rails, Phase::kPlan, kRequestsPut, domain, 1, epoch)»;",
        "true",
        "rails-plans", 4, "."),
    "rails: an entry is passed on before it has come": (
        "native/device/call_barrier.cuh",
        "if («!wait_for_signal(ctx, rails, phase, kEntryPut, domain, 1, epoch)») return;",
        "false",
        "rails-calls", 4, ".", 2),
    "rails: a refusal stays with the rail peer": (
        "native/device/wait.cuh", "if («ctx.control.num_domains > 1») {", "false",
        "rails-failures", 4, "failure: rank . does not say that rank . refused", 4),
    "rails: a phase is put before the one before it": (
        "native/rails/phases.cuh",
        "while (goes_on && «!is_next()») goes_on", "false",
        "rails-dispatches", 2, "dispatch: ", 32),
    "rails: a phase is passed on before it has come": (
        "native/rails/phases.cuh",
        "«has_counted(ctx, rails, kRowsPut, domain, signals_up_to(ctx, kRowsPut, unit + 1))»;",
        "true",
        "rails-dispatches", 2, "dispatch: "),
    "rails: a phase is passed on without what it stands for": (
        "native/rails/phases.cuh",
        "{\n    «fence_system();»\n    for (int local_rank = 0;", "",
        "rails-dispatches", 4, "dispatch: "),
    "rails: sums are put before they are made": (
        "native/rows/domain_sums.cuh",
        "return «are_summed<R>(ctx, job, round_of(job, unit / num_phases), domain, unit %"
        " num_phases)»;",
        "true",
        "rails-combines", 2, "combine: "),
    "rails: a domain's sums are taken before they have come": (
        "native/rows/domain_sums.cuh",
        "kSumsPut, domain,\n" + " " * 51 + "«number_of_phase<R>(round_, phase) + 1», epoch_)",
        "0",
        "rails-combines", 2, "combine: "),
    "rails: this domain's sums are taken before they are made": (
        "native/rows/domain_sums.cuh",
        "? «wait_for_warps(ctx_, are_here)»", "true",
        "rails-combines", 4, "combine: "),
    "rails: sums are put before the rail peer has entered": (
        "native/rows/domain_sums.cuh",
        "entered = «wait_for_entry(ctx, Phase::kCombine, rail_peer_in(ctx, domain), entry, epoch)"
        " != 0»;",
        "true",
        "rails-combines", 2, ".", 2),
    "rails: a sum is counted before it is stored": (
        "native/rows/domain_sums.cuh", "«__threadfence();»\n      atomicAdd(number", "",
        "rails-combines", 4, "combine: "),
    "rails: sums of the combine before are counted": (
        "native/rails/rounds.cuh", "counts[i] = 0;", "",
        "rails-combines", 2, "combine: "),
    "rails: LL: tokens are taken before they have come": (
        "native/low_latency/rail_tokens.cuh",
        "arrived = «has_counted(ctx, rails, signal, domain, goal)»;", "true",
        "rails-ll", 2, "ll dispatch: "),
    "rails: LL: sums are taken before they have come": (
        "native/low_latency/rail_tokens.cuh",
        "arrived = «wait_for_signals(ctx, rails, phase, signal, threadIdx.x, goal, number)»;",
        "true",
        "rails-ll", 2, "ll combine: "),
    "rails: LL: a source's word is given when one CTA has passed its tokens on": (
        "native/low_latency/rail_tokens.cuh",
        "mine = «count_in(ll.state->passed_on + domain, kSentCta + has_failed * kSentFailed,"
        " gridDim.x)»;", "kSentCta",
        "rails-ll", 4, "."),
    "rails: LL: who gives the words has not seen what other CTAs sent on": (
        "native/low_latency/rail_tokens.cuh", "if (mine != 0) fence_system();", "",
        "rails-ll", 4, "ll "),
    "rails: LL: rows are counted from the first token of a batch": (
        "native/low_latency/rail_tokens.cuh",
        "rows.index(rank, token) - «rows.index(rank, first[domain_of[token]])»", "0",
        "rails-ll", 6, "."),
    "rails: LL: indices that had rows keep their experts": (
        "native/low_latency/dispatch.cu", "window.max_tokens - «begin»;", "0",
        "rails-ll", 2, "ll dispatch: experts"),
    "rails: LL: rows are counted from the first rank's in each group of 32": (
        "native/low_latency/combine.cu", "kGroups == 1 ? 0 : «before(groups_up_to_, row)»;", "0",
        "rails-ll-many", 36, "."),
    "rails: LL: the last message is taken for this one": (
        "native/low_latency/dispatch.cu", "rail_signals[kTokensPut]) + «1»", "0",
        "rails-ll", 2, "."),
    "rails: LL: the last sums are taken for these": (
        "native/low_latency/combine.cu", "rail_signals[kTokenSumsPut]) + «1»", "0",
        "rails-ll", 2, "."),
    "rails: LL: a message is put without what other CTAs wrote": (
        "native/low_latency/rail_tokens.cuh", "«if (threadIdx.x == 0) fence_system();»\n  __sync",
        "",
        "rails-ll", 2, "ll "),
    "rails: LL: a source's word is seen before its tokens": (
        "native/low_latency/rail_tokens.cuh", "«fence_system();»  // passes on", "",
        "rails-ll", 4, "ll dispatch: "),
    "rails: windows close while something is on its way": (
        "native/device/stop.cu", "round <= «kLastRounds»;", "1",
        "rails-plans", 4, "bytes are on their way", 52),
    "rails: a signal of the operation before is taken": (
        "native/device/rails.cuh", "(&ctx.state->rail_signals[signal]) + «number»;", "number - 1",
        "rails-plans", 2, "."),
    "queues: a probe does not wait for room": (
        "network/probe.cu", "is_put = «room_up_to(rail, peer, end) >= end»", "true",
        "short-probes", 4, "a put waits without an end"),
    "queues: nobody waits for room": (
        "native/device/rails.cuh", "if («!wait(has_room)») return false;", "false",
        "short-rails-rows", 4, "a put waits without an end"),
    "queues: a wait for room has no deadline": (
        "native/device/rails.cuh",
        "return «wait_until(ctx, phase, rail_peer_in(ctx, domain), epoch, is_over)»;",
        "[&] { while (!is_over()) continue; return true; }()",
        "short-rails-cut", 4, "nobody gets any further"),
    "queues: puts take the same place": (
        "native/device/rails.cuh", "end = «atomicAdd(&places.given, number)» + number;",
        "places.given", "short-rails-plans", 4, "a put waits without an end"),
    "queues: room for one more put than there is": (
        "native/device/rails.cuh", "return «room >= end»;", "room + 1 >= end",
        "short-rails-plans", 4, "a put waits without an end"),
    "queues: more room is kept than was seen": (
        "native/device/rails.cuh", "store_relaxed(&places.room, «room»);", "room + 1",
        "short-rails-plans", 4, "a put waits without an end"),
    "queues: a last word has no deadline": (
        "native/device/stop.cu",
        "ctx.deadline_ns)) «return false;»", "continue;",
        "short-rails-cut", 2, "nobody gets any further"),
    "many ranks: sums over ranks begin anew with each lane": (
        "native/plan/chunks.cuh", "sum_to_here = «sum» + warp_scan", "0",
        "rails-many", 33, "plan: "),
    "many ranks: only a warp's lanes of sources are watched": (
        "native/rows/progress.cuh", "source = lane; source < «num_ranks»; source", "kWarpSize",
        "rails-many", 33, "."),
    "rails: more phases are taken for seen than are": (
        "native/rows/progress.cuh", "is_missing[i] && epochs[i] >= «epoch»;", "epoch - 1",
        "rails-dispatches", 2, "dispatch: "),
    "rails: rows are loaded before their flag is seen": (
        "native/rows/progress.cuh", "sees_nothing = false;\n      «fence_system();»", "",
        "rails-dispatches", 2, "dispatch: "),
    "rails: an entry is compared before it has come": (
        "native/device/call_barrier.cuh", "if («!is_entry_of(entries[i], number)»)", "false",
        "rails-plans", 4, "a wait was in vain", 2),
    "rails: slots of all ranks but a warp's lanes are counted anew": (
        "native/plan/plan.cu", "slot += R::kEnabled ? «__shfl_sync(~0u, up_to, kLanes - 1)»", "0",
        "rails-many", 33, "plan: ", 3),
    "rounds: weights lie where rows of a round do": (
        "native/rows/dispatch.cu", "place_weights<R>(ctx, job, «calls % 2»)", "parity",
        "rails-dispatches", 4, "dispatch: weight"),
    "rounds: pairs of earlier ones are pulled": (
        "native/rails/phases.cuh", "(routes.num_chunks + 1) + «round.begin / kChunk»]", "0",
        "rails-dispatches", 4, ".", 106),
}
# fmt: on
