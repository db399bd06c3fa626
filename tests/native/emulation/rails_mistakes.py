"""Mistakes that must show in groups of several domains, or of many ranks (test_emulation.py)."""

from emulation.mistakes import Mistake

# fmt: off
MISTAKES = {
    "probe: words of two rounds lie in one place": Mistake(
        "network/probe.cu", "«static_cast<int>(job.round % 2)» * 2", "0",
        "probes", 2, "probe: the word"),
    "probe: a word is taken before its signal": Mistake(
        "network/probe.cu", "(!is_put || «signals < job.round») &&", "signals + 1 < job.round",
        "probes", 2, "probe: "),
    "rails: counts are passed on before they have come": Mistake(
        "native/plan/plan_rails.cuh",
        "«wait_for_signal(ctx, rails, Phase::kPlan, kCountsPut, domain, 1, epoch)»;",
        "true",
        "rails-plans", 2, "plan: "),
    "rails: routes are written while the last ones are put": Mistake(
        "native/plan/plan.cu",
        "is_free = «wait_for_numbered(ctx, Phase::kRoutes, rank, epoch, word, plans) >= 0»;",
        "true",
        "rails-plans", 4, "."),
    "rails: who passes routes on does not pass on what it has seen": Mistake(
        "native/plan/plan_rails.cuh", "epoch)) {\n      «fence_system();»", "",
        "rails-plans", 4, "plan: "),
    "rails: an entry is passed on before it has come": Mistake(
        "native/device/call_barrier.cuh",
        "if («!wait_for_signal(ctx, rails, phase, kEntryPut, domain, 1, epoch)») return;",
        "false",
        "rails-calls", 4, ".", 2),
    "rails: a refusal stays with the rail peer": Mistake(
        "native/device/wait.cuh", "if («ctx.control.num_domains > 1») {", "false",
        "rails-failures", 4, "failure: rank . does not say that rank . refused", 4),
    "rails: a phase is put before the one before it": Mistake(
        "native/rails/phases.cuh",
        "while (goes_on && «!is_next()») goes_on", "false",
        "rails-dispatches", 2, "dispatch: ", 32),
    "rails: a phase is passed on before it has come": Mistake(
        "native/rails/phases.cuh",
        "«has_counted(ctx, rails, kRowsPut, domain, signals_up_to(ctx, kRowsPut, unit + 1))»;",
        "true",
        "rails-dispatches", 2, "dispatch: "),
    "rails: a phase is passed on without what it stands for": Mistake(
        "native/rails/phases.cuh",
        "{\n    «fence_system();»\n    for (int local_rank = 0;", "",
        "rails-dispatches", 4, "dispatch: "),
    "rails: sums are put before they are made": Mistake(
        "native/rows/domain_sums.cuh",
        "return «are_summed<R>(ctx, job, round_of(job, unit / num_phases), domain, unit %"
        " num_phases)»;",
        "true",
        "rails-combines", 2, "combine: "),
    "rails: a domain's sums are taken before they have come": Mistake(
        "native/rows/domain_sums.cuh",
        "kSumsPut, domain,\n" + " " * 51 + "«number_of_phase<R>(round_, phase) + 1», epoch_)",
        "0",
        "rails-combines", 2, "combine: "),
    "rails: sums are put before the rail peer has entered": Mistake(
        "native/rows/domain_sums.cuh",
        "entered = «wait_for_entry(ctx, Phase::kCombine, rail_peer_in(ctx, domain), entry, epoch)"
        " != 0»;",
        "true",
        "rails-combines", 2, ".", 2),
    "rails: a sum is counted before it is stored": Mistake(
        "native/rows/domain_sums.cuh", "«__threadfence();»\n      atomicAdd(number", "",
        "rails-combines", 4, "combine: "),
    "rails: sums of the combine before are counted": Mistake(
        "native/rails/rounds.cuh", "counts[i] = 0;", "",
        "rails-combines", 2, "combine: "),
    "rails: LL: tokens are taken before they have come": Mistake(
        "native/low_latency/rail_tokens.cuh",
        "arrived = «has_counted(ctx, rails, signal, domain, goal)»;", "true",
        "rails-ll", 2, "ll dispatch: "),
    "rails: LL: a source's word is given when one CTA has passed its tokens on": Mistake(
        "native/low_latency/rail_tokens.cuh",
        "mine = «count_in(ll.state->passed_on + domain, kSentCta + has_failed * kSentFailed,"
        " gridDim.x)»;", "kSentCta",
        "rails-ll", 4, "."),
    "rails: LL: who gives the words has not seen what other CTAs sent on": Mistake(
        "native/low_latency/rail_tokens.cuh", "if (mine != 0) fence_system();", "",
        "rails-ll", 4, "ll "),
    "rails: LL: rows are counted from the first token of a batch": Mistake(
        "native/low_latency/rail_tokens.cuh",
        "rows.index(rank, token) - «rows.index(rank, first[domain_of[token]])»", "0",
        "rails-ll", 6, "."),
    "rails: LL: indices that had rows keep their experts": Mistake(
        "native/low_latency/dispatch.cu", "window.max_tokens - «begin»;", "0",
        "rails-ll", 2, "ll dispatch: experts"),
    "rails: LL: rows are counted from the first rank's in each group of 32": Mistake(
        "native/low_latency/combine.cu", "kGroups == 1 ? 0 : «before(groups_up_to_, row)»;", "0",
        "rails-ll-many", 36, "."),
    "rails: LL: a message is put without what other CTAs wrote": Mistake(
        "native/low_latency/rail_tokens.cuh", "«if (threadIdx.x == 0) fence_system();»\n  __sync",
        "",
        "rails-ll", 2, "ll "),
    "rails: windows close while something is on its way": Mistake(
        "native/device/stop.cu", "round <= «kLastRounds»;", "1",
        "rails-plans", 4, "bytes are on their way", 52),
    "rails: a signal of the operation before is taken": Mistake(
        "native/device/rails.cuh", "(&ctx.state->rail_signals[signal]) + «number»;", "number - 1",
        "rails-plans", 2, "."),
    "queues: a probe does not wait for room": Mistake(
        "network/probe.cu", "is_put = «room_up_to(rail, peer, end) >= end»", "true",
        "short-probes", 4, "a put waits without an end"),
    "queues: nobody waits for room": Mistake(
        "native/device/rails.cuh", "if («!wait(has_room)») return false;", "false",
        "short-rails-rows", 4, "a put waits without an end"),
    "queues: a wait for room has no deadline": Mistake(
        "native/device/rails.cuh",
        "return «wait_until(ctx, phase, rail_peer_in(ctx, domain), epoch, is_over)»;",
        "[&] { while (!is_over()) continue; return true; }()",
        "short-rails-cut", 4, "nobody gets any further"),
    "queues: a last word has no deadline": Mistake(
        "native/device/stop.cu",
        "ctx.deadline_ns)) «return false;»", "continue;",
        "short-rails-cut", 2, "nobody gets any further"),
    "many ranks: sums over ranks begin anew with each lane": Mistake(
        "native/plan/chunks.cuh", "sum_to_here = «sum» + warp_scan", "0",
        "rails-many", 33, "plan: "),
    "many ranks: only a warp's lanes of sources are watched": Mistake(
        "native/rows/progress.cuh", "source = lane; source < «num_ranks»; source", "kWarpSize",
        "rails-many", 33, "."),
    "rounds: weights lie where rows of a round do": Mistake(
        "native/rows/dispatch.cu", "place_weights<R>(ctx, job, «calls % 2»)", "parity",
        "rails-dispatches", 4, "dispatch: weight"),
    "rounds: pairs of earlier ones are pulled": Mistake(
        "native/rails/phases.cuh", "(routes.num_chunks + 1) + «round.begin / kChunk»]", "0",
        "rails-dispatches", 4, ".", 106),
    # In rounds, which every step of a training with large batches has, with weights.
    "rounds: two of a dispatch lie in one half": Mistake(
        "native/rows/stage.cuh", "(parity + «round.number») % 2", "0",
        "rails-dispatches", 4, "dispatch: ", 107),
    "rounds: the second is staged before all ranks have entered": Mistake(
        "native/rails/phases.cuh",
        "is_free = «wait_for_entry(ctx, Phase::kDispatch, rank, entry, epoch) != 0»;", "true",
        "rails-dispatches", 4, "dispatch: ", 2),
    "rounds: one is staged before other domains have pulled the last but one": Mistake(
        "native/rails/phases.cuh",
        "is_free = «wait_for_signal(ctx, rails, Phase::kDispatch, kPulledPut, threadIdx.x,\n"
        + " " * 32 + "round.number - 1, epoch)» &&",
        "true",
        "rails-dispatches", 4, "dispatch: ", 5),
    "rounds: sums of ranks are sent before there is room": Mistake(
        "native/rows/combine.cu",
        "«wait_for_round(ctx, Phase::kCombine, host_of(ctx, source),\n"
        + " " * 40 + "round.number - 1, epoch)»", "true",
        "rails-combines", 4, ".", 1),
    "rounds: domains' sums of two lie in one place": Mistake(
        "native/rail_layout.h", "return «round % 2» * turn_parts()", "0",
        "rails-combines", 4, "combine: ", 1),
    "rounds: a domain's sums are made before this rank's last but one are added up": Mistake(
        "native/rows/domain_sums.cuh",
        "is_free = «wait_for_warps(ctx_, [&] { return are_added(ctx_, before); })»;", "true",
        "rails-combines", 4, "combine: ", 2),
    "rounds: rows of one are taken after those of the last did not come": Mistake(
        "native/rows/dispatch.cu", "num_rounds_of(job) && «goes_on»; ++number", "true",
        "rails-failures", 4, ".", 5),
    "rounds: windows say how many there are, not the batch": Mistake(
        "native/rails/rounds.cuh", "return «*job.rail_routes.most_chunks * kChunk»;",
        "job.most_tokens",
        "rails-dispatches", 2, "dispatch: rounds of rank", 8),
    "rounds: a dispatch begins in the half of the last one's last but one": Mistake(
        "native/rows/dispatch.cu", "dispatches = dispatches + «num_rounds - 1»;", "0",
        "rails-dispatches", 4, "."),
    "rounds: values of later ones are put where the first's are": Mistake(
        "native/rows/domain_sums.cuh", "first = std::size_t{4} * «start» * job.top_k;",
        "(start - round.begin)",
        "rails-combines", 4, "combine: weights", 1),

    # Of one round as of several.
    "rails: the last phase is not followed by the first": Mistake(
        "native/rails/phases.cuh", "«unit + 1 < all ? unit + 1 : 0u»", "unit + 1",
        "rails-dispatches", 2, "a wait was in vain|nobody gets any further"),

    # More ranks than a warp has lanes.
    "many ranks: a bad routing is said to be of one of the first 32": Mistake(
        "native/plan/plan.cu", "«32 * word» + __ffs(", "0",
        "rails-many", 33, "plan: the first bad rank"),
    "many ranks: what was seen of another group of sources counts": Mistake(
        "native/rows/progress.cuh", "if («seen / kMostUnits == group» && unit", "true",
        "rails-many", 36, "dispatch: ", 2),
    "many ranks: LL: a bad routing is said to be of one of the first 32": Mistake(
        "native/low_latency/dispatch.cu", "atomicOr(«bad_ranks + rank / 32»,", "bad_ranks",
        "rails-ll-many", 33, "ll dispatch: bad ranks", 1),

    # What travels with rows, and what ranks compare.
    "LL: scales do not come within a domain": Mistake(
        "native/low_latency/dispatch.cu",
        "row * scale_vectors;\n    for (int i = lane; i < scale_vectors; i += 32) "
        "«to_scales[i] = __ldg(scales + i);»", "",
        "ll", 2, "ll dispatch: scales"),
    "bad routings of the plans before are forgotten": Mistake(
        "native/plan/plan.cu", "ctx.mailbox->bad_ranks.words[lane] |= bad;",
        "ctx.mailbox->bad_ranks.words[lane] = bad;",
        "plans", 3, "plan: bad ranks of static plans", 39),
    "wide: pairs of the first 32 ranks are counted": Mistake(
        "native/plan/chunks.cuh", "group < «kRankGroups»; ++group) {\n      const int first", "1",
        "wide-many", 33, "plan: ", 2),
    "wide: a rank has a bit in each group": Mistake(
        "native/rank_set.cuh", "return «local_rank / kWarpSize == group» ?", "true",
        "wide-many", 33, "."),
    "wide: sums of ranks after the first 32 are added up before they are there": Mistake(
        "native/rows/combine.cu", "if («is_part[group] && arrived») {",
        "group == 0 && is_part[group]",
        "wide-many", 33, "combine: ", 2),
    "wide: a refusal reaches the first 32 ranks": Mistake(
        "native/device/stop.cu", "<<<1, «kThreads», 0, reinterpret_cast<cudaStream_t>(stream)>>>"
        "(ctx, phase, rails)", "kWarpSize",
        "wide-failures", 36, "failure: rank .* does not say that rank .* refused", 2),
    "wide: the first 32 ranks of each node token are fetched": Mistake(
        "native/plan/plan_receive.cu", "words = «rails.most_tokens * kRankGroups»;",
        "rails.most_tokens",
        "wide-rails-many", 66, "plan: ranks of node token"),
}
# fmt: on
