"""Mistakes in the kernels that tests must notice, within one NVLink domain (test_emulation.py)."""

from __future__ import annotations

from dataclasses import dataclass

from emulation.translate import Change


@dataclass(frozen=True)
class Mistake(Change):
    """A change, the sequences in which it shows, and what is said then."""

    kind: str
    ranks: int
    notice: str
    seed: int = 0  # from which on it soon shows


# Of schedules, order and failures.  What is a wrong number in every run the oracle sees anyway.
# fmt: off
MISTAKES = {
    # Who waits for what.
    "the work counter is not reset": Mistake(
        "native/device/wait.cuh",
        "ctx.state->arrived = ctx.state->leaving = «ctx.state->next = 0»;", "0",
        "rows", 2, "dispatch: row|combine: "),
    "both dispatches use one half of the window": Mistake(
        "native/rows/dispatch.cu", "dispatches % 2", "0",
        "dispatches", 2, "dispatch: "),
    "a dispatch is over before all ranks have entered it": Mistake(
        "native/rows/dispatch.cu",
        "== 0) {\n        «compare_entries(ctx, rails, Phase::kDispatch, entry, epoch);»",
        "",
        "dispatches", 4, "dispatch: "),
    "more phases are taken for seen than are": Mistake(
        "native/rows/progress.cuh", "kWarpSize : «__ffs(absent) - 1»;", "__ffs(absent)",
        "rows", 2, "dispatch: "),
    "a phase is flagged before its rows are written": Mistake(
        "native/rows/ring.cuh", "wait_for_stores();", "",
        "rows", 2, "."),
    "sums are sent before their rank has entered": Mistake(
        "native/rows/combine.cu", "bool has_entered = «!sends»;", "true",
        "rows", 2, "."),
    "sums of the combine before are taken": Mistake(
        "native/rows/combine.cu", "now.token / kChunk, «epoch»", "epoch - 1",
        "rows", 2, "combine: "),
    "rows are added up before they are there": Mistake(
        "native/rows/reduce_rows.cuh",
        "wait_for_copies<kStages - 2>();", "wait_for_copies<kStages - 1>();",
        "rows", 2, "combine: token"),
    "a stage is loaded while it is being stored": Mistake(
        "native/rows/ring.cuh", "wait_for_reads_of_stores<1>();", "wait_for_reads_of_stores<2>();",
        "rows", 2, "."),
    "routes are written while the last ones are fetched": Mistake(
        "native/plan/plan.cu", "*static_cast<volatile std::uint64_t*>(&ctx.state->received)", "0",
        "plans", 3, "plan: ", 14),
    "routes are fetched before they are written": Mistake(
        "native/plan/plan_receive.cu", "kRoutesWritten, source),\n" + " " * 30 + "«plans»)", "0",
        "rows", 2, "plan: "),

    # In which order others see it.
    "a phase's flag is seen before its rows": Mistake(
        "native/rows/stage.cuh", "«__threadfence_system();»  // for what all warps", "",
        "dispatches", 2, "dispatch: "),
    "what a flag stands for is loaded before the flag": Mistake(
        "native/device/wait.cuh", "return «load_acquire(word)» >= goal;", "load_relaxed(word)",
        "plans", 2, "plan: "),
    "rows are loaded before their flag is seen": Mistake(
        "native/rows/progress.cuh", "«fence_system();»\n      __syncwarp();", "",
        "dispatches", 2, "dispatch: "),

    "a grid's barrier is passed without a fence before it": Mistake(
        "native/device/wait.cuh", "«__threadfence();»\n    const unsigned int arrival", "",
        "chunks", 1, "plan: |an address"),
    "a grid's barrier is passed without a fence after it": Mistake(
        "native/device/wait.cuh", "«__threadfence();»\n  }\n  return __syncthreads_and", "",
        "chunks", 1, "plan: |an address"),
    "the last CTA leaves without what the others wrote": Mistake(
        "native/device/wait.cuh", "ctx.state->next = 0;\n    «__threadfence_system();»", "",
        "plans", 2, "plan: "),
    "what one lane has seen is not in what another one shows": Mistake(
        "native/rows/progress.cuh", "«__threadfence_block();»  // lane 0 also", "",
        "rows", 2, "dispatch: "),
    "the last staging CTA does not pass on the others' rows": Mistake(
        "native/rows/stage.cuh", "«fence_system();»  // passes on", "",
        "dispatches", 2, "dispatch: "),
    "rows are staged without a fence of bulk copies": Mistake(
        "native/rows/stage.cuh", "fence_for_bulk_copies();", "",
        "dispatches", 2, "dispatch: "),
    "rows are loaded without a fence of bulk copies": Mistake(
        "native/rows/progress.cuh", "fence_for_bulk_copies();", "",
        "dispatches", 2, "dispatch: "),
    "a bulk copy follows a store to shared memory": Mistake(
        "native/rows/dispatch.cu", "if («slot[s] < 0») return;",
        "(ring.pieces[s * shape.piece_bytes] = 0, slot[s] < 0)",
        "dispatches", 2, "a bulk copy uses shared memory"),

    # Counters that wrap.
    "a word of a new window is taken for number 2^31": Mistake(
        "native/device/wait.cuh",
        "return «kIsWritten | number << 32 | value»;", "number << 32 | value", "ll", 2, "ll "),
    "a flag has 32 bits": Mistake(
        "native/rows/progress.cuh", "«load_relaxed(flag(source, unit))» >= epoch",
        "static_cast<std::uint32_t>(load_relaxed(flag(source, unit)))",
        "rows", 2, "a wait was in vain", 3),
    "all bits of an entry's number are compared": Mistake(
        "native/device/wait.cuh", "entry >> 48 == «(number & 0xffffu)»", "number",
        "dispatches", 1, "a wait was in vain"),
    "all bits of a plan's number are in a call": Mistake(
        "native/host/call_signature.cpp", "|= «(value & mask(width))» << place_", "value",
        "rows", 1, "a wait was in vain"),

    # A rank that does not come.
    "the deadline is ignored": Mistake(
        "native/device/wait.cuh",
        "if («waited_ns <= static_cast<std::int64_t>(ctx.deadline_ns)») return false;",
        "now_ns() > 0", "failures", 2, "nobody gets any further"),
    "the clock goes back": Mistake(
        "native/device/wait.cuh", "waited_ns = «ns_since(start_)»;",
        "static_cast<std::int64_t>((now_ns() - start_) >> 1)", "rows", 2, "a wait was in vain"),
    "a rank that has not come is said to have": Mistake(
        "native/device/wait.cuh", "return «is_entry_of(entry, number)» ?", "true",
        "failures", 2, "failure: rank . says that rank . came"),
    "the wrong rank is named": Mistake(
        "native/device/wait.cuh", "ctx.mailbox->failed_peer = «peer»;", "ctx.rank",
        "failures", 3, "failure: rank . (names|does not say that) rank"),
    "what a barrier counts is named as the operation": Mistake(
        "native/device/wait.cuh", "ctx.rank, «current_epoch(ctx)»,", "goal",
        "late", 3, "failure: rank . names operation"),
    "nobody hears that a rank goes no further": Mistake(
        "native/device/wait.cuh", "«is_refused(ctx, phase, epoch)») return true;", "false",
        "failures", 3, "failure: rank . does not say that rank . refused"),
    "a refusal ends the operation before": Mistake(
        "native/device/wait.cuh", "if («static_cast<std::int64_t>(now - then) < 0») ", "false",
        "rails-failures", 6, "failure: rank . before the call that was refused", 19),
    "ranks that use different plans are not noticed": Mistake(
        "native/device/call_barrier.cuh", "entry != 0 && «entry != entry_of(ctx, number)»",
        "((entry ^ entry_of(ctx, number)) & ~(UINT64_C(0x3fff) << 34)) != 0",
        "calls", 2, "failure: rank . has waited for nobody"),
    "rows that did not come are left as they are": Mistake(
        "native/rows/dispatch.cu", "fill_nan(job.rows, job.num_rows * job.row_bytes);", "",
        "failures", 2, "dispatch: rows of rank .* not all NaN"),
    "a dispatch goes on after a failure": Mistake(
        "native/rows/dispatch.cu",
        "«!had_failed(ctx)») {\n    if (blockIdx.x == 0", "had_failed(ctx), true",
        "failures", 2, "failure: rank . writes into other ranks' windows"),
    "a grid's barrier lets through without all CTAs": Mistake(
        "native/device/wait.cuh", "__syncthreads_and(all_here)", "__syncthreads_and(true)",
        "late", 3, ".", 64),
    "a plan has rows after a failure": Mistake(
        "native/plan/plan.cu", "if («has_failed(ctx)») {\n    // No rank", "false",
        "failures", 3, "plan: rows of rank . after a failure"),
    "a CTA that starts after a failure leaves its grid waiting": Mistake(
        "native/plan/plan_receive.cu", "leave(ctx);\n    return;", "return;",
        "late", 3, ".", 53),

    # Low-latency mode: who waits for what.
    "LL: a CTA counts itself before its warps have sent": Mistake(
        "native/low_latency/operation.cuh", "is_bad = «__syncthreads_or(is_bad)»;", "is_bad",
        "ll", 2, "ll "),
    "LL: the first CTA advances the number, not the last": Mistake(
        "native/low_latency/dispatch.cu",
        "ll.state->domains_of[thread] = found.domains;",
        "ll.state->domains_of[thread] = found.domains;"
        "if (thread == 0) ll.state->dispatches = now.number;", "ll", 2, "."),
    "LL: a combine waits only for ranks with rows of its tokens": Mistake(
        "native/low_latency/combine.cu", "if («thread < locals && !has_failed») {",
        "thread < locals && !has_failed && rows.count(thread, job.num_tokens) > 0",
        "ll", 3, "."),
    "LL: a dispatch does not wait for one of the ranks": Mistake(
        "native/low_latency/dispatch.cu",
        "if («R::kEnabled && is_local(ctx, rank) != for_local») continue;",
        "rank == (ctx.rank + 1) % window.num_ranks",
        "ll", 2, "ll "),
    "LL: the word of the operation before is taken": Mistake(
        "native/device/wait.cuh", "return «has_number(found, number)»;",
        "(found >> 32) + 1 >= numbered(number, 0) >> 32",
        "ll", 2, "ll "),

    # In which order others see it.
    "LL: a CTA counts itself without a fence": Mistake(
        "native/low_latency/operation.cuh", "__threadfence();", "",
        "ll", 2, "ll "),
    "LL: a dispatch's word is seen before its rows": Mistake(
        "native/low_latency/dispatch.cu", "«fence_system();»  // passes on", "",
        "ll", 2, "ll dispatch: "),
    "LL: sums are loaded before their word": Mistake(
        "native/device/wait.cuh", "found = «kLoad(word)»;", "load_relaxed(word)",
        "ll", 2, "ll "),

    # A rank that does not come.
    "LL: rows that did not come are counted": Mistake(
        "native/low_latency/dispatch.cu", "has_failed ? 0 : counts[rank]", "counts[rank]",
        "ll-failures", 2, "ll dispatch: counts"),
    "LL: a dispatch goes on after a failure": Mistake(
        "native/low_latency/dispatch.cu",
        "has_failed || send_rows<R>(ctx, ll, job, rows, domains)",
        "send_rows<R>(ctx, ll, job, rows, domains)",
        "ll-failures", 2, "."),
    "LL: an operation out of turn is made": Mistake(
        "native/low_latency/operation.cuh",
        "if («sends && !is_in_turn && !now.has_failed»)", "false",
        "ll-failures", 2, "."),
}
# fmt: on
