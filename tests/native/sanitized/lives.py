"""Lives of the extension's objects over the stand-ins, a case at a time; run by a test.

    python lives.py EXTENSION FAKE_LIBRARY CASE

In `failures` every call of NCCL and of CUDA fails once; what is left over is a leak.  The other
cases are about what the host does for kernels: who waits for whom, and what they are told.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hostile import plain
from hostile_values import Numbers
from objects import (
    HIDDEN,
    LOCAL,
    OTHER_STREAM,
    RANKS,
    ROWS,
    STREAM,
    TOKENS,
    TOP_K,
    Objects,
    Program,
)

from megatron_ncclep.errors import EpError, PeerError

MOST_CALLS = 500  # of one life
STEPS = (
    "group.reserve", "handle.update", "handle.dispatch", "handle.combine", "ep_ll_handle.dispatch",
    "ep_ll_handle.combine", "group.plan", "group.dispatch", "group.combine", "low_latency.dispatch",
    "low_latency.combine", "group.copy_waited_ns", "group.refuse", "group.wait_until_idle",
    "handle.close", "ep_group.close", "ep_ll_handle.close", "low_latency.close", "group.close",
    "window.close", "communicator.close",
)  # fmt: skip


def raises(text: str, call: Callable[..., Any], *arguments: Any) -> None:
    """Require that a call raises an error with this text."""
    with pytest.raises(EpError) as caught:
        call(*arguments)
    assert text in str(caught.value)


def live(program: Program) -> None:
    """Make one of everything, use it and close it; whatever fails, nothing is left."""
    o = Objects(program)
    try:
        for name in STEPS:
            o.prepare(name)
            o.bound(name)(**plain(o.arguments()[name]))
            if name == "group.reserve":  # the new windows; a graph holds them from now on
                o.make_plan(max_recv_rows=ROWS)
                program.gpu.standin_capture(STREAM, 0)
                o.dispatch()
                program.gpu.standin_capture(0, 0)
                assert o.group.was_captured
    finally:
        program.gpu.standin_capture(0, 0)
        o.close()


def failures(program: Program) -> None:
    live(program)
    assert program.nccl.fake_num_open_windows() == 0
    for where in ("nccl", "cuda"):
        for call in range(MOST_CALLS):
            program.fail_after(where, call)
            with suppress(EpError):
                live(program)
            is_pending = program.fail_after(where, -1)
            assert program.num_alive() == 0, f"call {call} of {where} fails: a leak"
            if is_pending:  # a life has no more calls
                assert call > 10
                break
        else:
            raise AssertionError("it never comes to an end")


def order(program: Program) -> None:
    """The stand-in ends the program when an operation does not wait for the one before, or waits
    for an event that is not its capture's.
    """
    o, gpu = Objects(program), program.gpu
    second = o.new_group()
    o.make_plan(max_recv_rows=ROWS)
    o.make_plan(second, max_recv_rows=ROWS, stream=OTHER_STREAM)
    o.dispatch_few()
    o.dispatch(OTHER_STREAM, second)
    o.dispatch_few()
    o.dispatch(OTHER_STREAM)
    o.group.refuse("combine", OTHER_STREAM)

    # An operation waits for the one before, and for nothing that was queued after that.
    o.dispatch()
    gpu.standin_hold(STREAM)
    o.dispatch(OTHER_STREAM, second)
    assert not gpu.standin_is_held(OTHER_STREAM)
    o.dispatch()
    o.dispatch(OTHER_STREAM, second)
    assert gpu.standin_is_held(OTHER_STREAM)
    gpu.standin_release_at_query(3)
    o.group.wait_until_idle()
    assert not gpu.standin_is_held(OTHER_STREAM)

    # A stream is not the one that had its handle before.
    for _ in range(2):
        gpu.standin_remake(OTHER_STREAM)
        o.dispatch()
        o.dispatch(OTHER_STREAM)
    gpu.standin_remake(OTHER_STREAM)
    o.dispatch(OTHER_STREAM)

    # Captures: an order of their own in each, and none between them and what is not captured.
    gpu.standin_capture(STREAM, OTHER_STREAM)
    o.dispatch()
    o.dispatch(OTHER_STREAM)
    gpu.standin_capture(OTHER_STREAM, 0)
    o.dispatch(OTHER_STREAM)
    gpu.standin_capture(0, 0)
    o.dispatch()
    assert o.group.was_captured
    assert not second.was_captured
    gpu.standin_capture(OTHER_STREAM, 0)
    o.dispatch_few(stream=OTHER_STREAM)
    o.dispatch(OTHER_STREAM, second)
    gpu.standin_capture(0, 0)
    o.dispatch(OTHER_STREAM, second)
    o.dispatch()
    assert second.was_captured
    o.close()


def calls(program: Program) -> None:
    """What kernels compare between ranks: no two calls look alike."""
    o, gpu = Objects(program), program.gpu
    known: set[int] = set()

    def word_of_rows(phase: str, number: int, dtype: str, hidden: int, has_weights: bool) -> int:
        o.make_plan(number=number, max_recv_rows=ROWS)
        gpu.standin_take_call()
        x, rows = Numbers(dtype, TOKENS, hidden), Numbers(dtype, ROWS, hidden)
        w, row_w = (o.w, o.row_w) if has_weights else (None, None)
        given = {"plan": o.plan, "num_sms": 8, "stream": STREAM}
        if phase == "dispatch":
            o.group.dispatch(x=x, w=w, rows=rows, row_w=row_w, **given)
        else:
            sums = Numbers(dtype, 3, hidden)
            o.group.combine(y=rows, w=row_w, sums=sums, out=x, topk_w=w, **given)
        return gpu.standin_take_call()

    names = ("phase", "plan", "dtype", "hidden size", "presence of weights")
    usual = ("dispatch", 1, "bfloat16", HIDDEN, True)
    for i, others in enumerate((
        ("dispatch", "combine"), (1, *(1 + (1 << bit) for bit in range(1, 14))), ("float16",),
        (2 * HIDDEN,), (False,),
    )):  # fmt: skip
        for other in others:
            values = (*usual[:i], other, *usual[i + 1 :])
            word = word_of_rows(*values)
            assert word not in known or values == usual
            assert program.module.call_values(word) == dict(zip(names, values, strict=True))
            known.add(word)
    # Of a plan's number a call has 14 bits.
    assert word_of_rows("dispatch", 1 + (1 << 14), *usual[2:]) == word_of_rows(*usual)

    for may_drop in (True, False):  # the word is the same
        for top_k, alignment, rows in ((TOP_K, 1, 2), (1, 1, 2), (TOP_K, 256, 2), (TOP_K, 1, 3),
                                       (TOP_K, 1, 2**31 - 1)):  # fmt: skip
            o.make_plan(
                topk_idx=Numbers("int64", TOKENS, top_k), alignment=alignment, max_recv_rows=rows,
                kept=Numbers("int32", TOKENS, top_k) if may_drop else None,
            )  # fmt: skip
            word = gpu.standin_take_call()
            assert (word in known) == (not may_drop)
            known.add(word)
            assert program.module.call_values(word) == {
                "phase": "plan", "top_k": top_k, "alignment": alignment, "max_recv_rows": rows,
            }  # fmt: skip
    o.make_plan()
    assert gpu.standin_take_call() == 0  # the hosts agree
    o.close()


def sizes(program: Program) -> None:
    """How the host waits for a plan's sizes."""
    o, gpu = Objects(program), program.gpu
    room = {"max_pairs": 3, "max_assignments": 6}
    for small in (room | {"max_pairs": 1}, room | {"max_assignments": 3}):
        gpu.standin_set_plans(ROWS, 2, 4, 0, 0, 0)
        o.make_plan(**small)
        raises("not received", o.dispatch)  # nobody knows how much arrives
        assert not o.wait_for_sizes().has_room
        raises("room for {max_pairs} pairs and {max_assignments}".format(**small), o.dispatch)
        o.group.plan_receive(plan=o.plan, routes=o.routes, **room, num_sms=8, stream=STREAM)
        o.dispatch()
    gpu.standin_set_plans(ROWS, 1, 2, 0, 0, 0)
    first = o.plan
    o.make_plan()
    o.plan, second = first, o.plan
    raises("not that of the last plan", o.wait_for_sizes)
    o.plan = second
    found = o.wait_for_sizes()
    assert (found.num_rows, found.has_room) == (ROWS, 1)
    # A routing that is refused: nobody may go on with the plan.
    gpu.standin_set_plans(ROWS, 1, 2, 4, 0, 0)
    o.make_plan()
    assert o.wait_for_sizes().bad_ranks == 4
    raises("not received", o.dispatch)

    # What was queued before may take as long as it likes, also on a stream that this one waits for.
    gpu.standin_set_plans(ROWS, 1, 2, 0, 0, 0)
    o.group.begin(timeout_s=0.01, num_tokens=TOKENS, top_k=TOP_K, row_bytes=64)
    for stream in (STREAM, OTHER_STREAM):
        gpu.standin_hold(stream)
        o.group.refuse("plan", stream)
        o.make_plan()
        gpu.standin_release_at_query(100)
        assert o.wait_for_sizes().num_rows == ROWS
    # A kernel may not; nor may a device fail.
    gpu.standin_set_plans(ROWS, 1, 2, 0, 0xFFFFFFFF, 0)
    o.make_plan()
    raises("not count the rows of a plan within 0.02 s", o.wait_for_sizes)
    program.fail_after("cuda", 0)
    raises("waiting for a plan's rows", o.wait_for_sizes)
    gpu.standin_release()
    assert o.wait_for_sizes().num_rows == ROWS  # it has come meanwhile

    # Words come in any order: none is taken before it is there.
    o.group.begin(timeout_s=60.0, num_tokens=TOKENS, top_k=TOP_K, row_bytes=64)
    for word in range(4 + LOCAL):
        rows = 10 + word
        gpu.standin_set_plans(rows * LOCAL, rows + 1, rows + 2, rows + 3, 1 << word, 0)
        o.make_plan()
        gpu.standin_release_at_query(3)
        found = o.wait_for_sizes()
        assert (found.num_rows, found.num_pairs) == (rows * LOCAL, rows + 1)
        assert (found.num_assignments, found.bad_ranks) == (rows + 2, rows + 3)
        assert list((ctypes.c_int64 * LOCAL).from_address(o.rows_of_expert.address)) == [rows] * 2
    gpu.standin_set_plans(ROWS, 1, 2, 0, 1, 1)
    o.make_plan()
    gpu.standin_release_at_query(3)
    assert o.wait_for_sizes() is None
    assert o.group.failure().peer == 1
    o.close()


def growth(program: Program) -> None:
    """Windows grow on all ranks or on none, and not where a graph holds them."""
    o, gathered = Objects(program), []

    def gather(mine: bytes, what: str, timeout_s: float) -> bytes:
        gathered.append(what)
        return mine * RANKS

    def fail(mine: bytes, what: str, timeout_s: float) -> bytes:
        raise PeerError("rank 2 did not come")

    def reserve(num_tokens: int, all_gather: Callable[..., bytes] = gather, stream: int = STREAM):
        shape = {"top_k": TOP_K, "row_bytes": 64, "stream": stream, "all_gather": all_gather}
        return o.group.reserve(num_tokens=num_tokens, **shape)

    def fits(num_tokens: int) -> bool:
        shape = {"num_tokens": num_tokens, "top_k": TOP_K, "row_bytes": 64}
        return o.group.begin(timeout_s=1.0, **shape)

    assert reserve(TOKENS) is None
    assert not gathered  # large enough
    assert reserve(400) == "tokens 128 -> 400"
    assert gathered
    # No memory: all ranks hear of it, and no windows are left.
    program.fail_after("nccl", 2)
    raises("use smaller micro-batches", reserve, 600)
    program.fail_after("nccl", -1)
    assert not fits(1)
    raises("rank 2 did not come", reserve, 600, fail)
    reserve(600)
    # A graph holds the windows, or is about to.
    program.gpu.standin_capture(OTHER_STREAM, 0)
    raises("a CUDA graph holds calls of this group", reserve, 800, gather, OTHER_STREAM)
    o.make_plan(max_recv_rows=ROWS, stream=OTHER_STREAM)
    program.gpu.standin_capture(0, 0)
    raises("its windows cannot grow: a CUDA graph holds", reserve, 800)
    assert fits(600)
    o.close()


# --- what the sanitizers and the stand-ins must report -------------------------------------------


def mistake_out_of_bounds(program: Program) -> None:
    word = Numbers("int64", 1)
    program.module.copy_memory(word.address, word.address + 8, 8)


def mistake_undefined(program: Program) -> None:
    program.gpu.standin_overflow(1)


def mistake_leak(program: Program) -> None:
    program.fail_after("cuda", 10)
    with suppress(EpError):
        Objects.close = lambda self: None  # type: ignore[method-assign]
        Objects(program)
    assert program.num_alive() == 0, "a leak"


def mistake_without_order(program: Program) -> None:
    for stream in (STREAM, OTHER_STREAM):
        program.gpu.standin_note_kernel(stream)


CASES = {
    case.__name__: case
    for case in (
        *(failures, order, calls, sizes, growth, mistake_out_of_bounds, mistake_undefined),
        *(mistake_leak, mistake_without_order),
    )
}

if __name__ == "__main__":
    CASES[sys.argv[3]](Program(*sys.argv[1:3]))
