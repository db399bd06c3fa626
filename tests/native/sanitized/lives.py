"""Lives of the extension's objects over the stand-ins, a case at a time; run by a test.

    python lives.py EXTENSION FAKE_LIBRARY CASE

In `failures` every call of NCCL and of CUDA fails once; what is left over is a leak.  The other
cases are about what the host does for kernels: who waits for whom, and what they are told.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from objects import (
    HIDDEN,
    LOCAL,
    OTHER_STREAM,
    ROWS,
    STREAM,
    TOKENS,
    TOP_K,
    Numbers,
    Objects,
    Program,
    plain,
)

from megatron_ncclep.errors import EpError

MOST_CALLS = 500  # of one life
STEPS = (
    "handle.update", "handle.dispatch", "handle.combine", "ep_ll_handle.dispatch",
    "ep_ll_handle.combine", "group.plan", "group.dispatch", "group.combine", "low_latency.dispatch",
    "low_latency.combine", "group.copy_waited_ns", "group.refuse", "group.wait_until_idle",
    "handle.close", "ep_group.close", "ep_ll_handle.close", "low_latency.close", "group.close",
    "window.close", "communicator.close",
)  # fmt: skip


def raises(text: str, call: Callable[..., Any], *arguments: Any) -> None:
    """Require that a call raises an error with this text."""
    try:
        call(*arguments)
    except EpError as error:
        found = str(error)
    else:
        found = "no error"
    assert text in found, f"'{text}' is not in: {found}"


def live(program: Program) -> None:
    """Make one of everything, use it and close it; whatever fails, nothing is left."""
    o = Objects(program)
    try:
        o.group.reserve(**o.shape(TOKENS + 200))  # larger windows in place of the first
        o.make_plan(max_recv_rows=ROWS)
        program.gpu.standin_capture(STREAM, 0)
        o.dispatch()
        program.gpu.standin_capture(0, 0)
        assert o.group.was_captured
        for name in STEPS:
            o.bound(name)(**plain(o.arguments()[name]))
    finally:
        program.gpu.standin_capture(0, 0)
        o.close()


def live_and_count(program: Program, where: str, call: int) -> tuple[bool, int]:
    """Whether a life fails with one call, and how many bytes of the heap it leaves behind.

    The memory of windows that stay open after a failed step stays too and does not count.
    """
    gc.collect()
    num_bytes, num_windows = program.heap_bytes(), program.nccl.fake_num_open_windows()
    program.fail_after(where, call)
    has_failed = False
    try:
        live(program)
    except EpError:
        has_failed = True
    finally:
        program.fail_after(where, -1)
    assert program.num_alive() == 0, f"call {call} of {where} fails: a leak"
    gc.collect()
    stays = program.nccl.fake_num_open_windows() > num_windows
    return has_failed, 0 if stays else program.heap_bytes() - num_bytes


def failures(program: Program) -> None:
    for where in ("nccl", "cuda"):
        for call in range(MOST_CALLS):
            for _ in range(3):  # Python's own memory grows now and then, a leak every time
                has_failed, num_bytes = live_and_count(program, where, call)
                if num_bytes <= 0:
                    break
            else:
                raise AssertionError(f"call {call} of {where} fails: a leak of {num_bytes} bytes")
            if not has_failed:
                assert call > 10  # it does not come to that call any more
                break
        else:
            raise AssertionError("it never comes to an end")


def order(program: Program) -> None:
    """The stand-in ends the program when an operation does not wait for the one before, or waits
    for an event that is not its capture's.
    """
    o, gpu = Objects(program), program.gpu
    second = o.new_group()
    o.make_plan(ROWS)
    o.make_plan(ROWS, OTHER_STREAM, second)
    o.dispatch_few()
    o.dispatch(OTHER_STREAM, second)
    o.dispatch_few(stream=OTHER_STREAM)
    o.dispatch()
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
    """What kernels compare between ranks has the values that errors name."""
    o, gpu = Objects(program), program.gpu
    names = ("phase", "plan", "dtype", "hidden size", "presence of weights")
    for values in (
        ("dispatch", 1, "bfloat16", HIDDEN, 1),
        ("combine", 1 + (1 << 13), "float16", 2 * HIDDEN, 0),
    ):
        phase, number, dtype, hidden, has_weights = values
        plan = o.group.plan(**o.plan_arguments(number=number, max_recv_rows=ROWS))
        launch = {"plan": plan, "num_sms": 8, "stream": STREAM}
        gpu.standin_take_call()
        x, rows = Numbers(dtype, TOKENS, hidden), Numbers(dtype, ROWS, hidden)
        w, row_w = (o.w, o.row_w) if has_weights else (None, None)
        if phase == "dispatch":
            o.group.dispatch(x=x, w=w, rows=rows, row_w=row_w, **launch)
        else:
            sums = Numbers(dtype, 3, hidden)
            o.group.combine(y=rows, w=row_w, sums=sums, out=x, topk_w=w, **launch)
        found = program.module.call_values(gpu.standin_take_call())
        assert found == dict(zip(names, values, strict=True))
    most = 2**31 - 1
    o.group.plan(**o.plan_arguments(alignment=256, max_recv_rows=most))
    assert program.module.call_values(gpu.standin_take_call()) == {
        "phase": "plan", "top_k": TOP_K, "alignment": 256, "max_recv_rows": most,
    }  # fmt: skip
    o.make_plan()
    assert gpu.standin_take_call() == 0  # the hosts agree
    o.close()


def sizes(program: Program) -> None:
    """How the host waits for a plan's sizes."""
    o, gpu = Objects(program), program.gpu
    gpu.standin_set_plans(ROWS, 2, 4, 0, 0, 0)
    for room in ({"max_pairs": 1, "max_assignments": 6}, {"max_pairs": 3, "max_assignments": 3}):
        o.plan = o.group.plan(**o.plan_arguments(**room))
        raises("not received", o.dispatch)  # nobody knows how much arrives
        assert not o.wait_for_sizes().has_room
        raises("room for {max_pairs} pairs and {max_assignments}".format(**room), o.dispatch)
    gpu.standin_set_plans(ROWS, 1, 2, 0, 0, 0)
    before = o.plan
    o.make_plan()
    last, o.plan = o.plan, before
    raises("not that of the last plan", o.wait_for_sizes)
    o.plan = last
    found = o.wait_for_sizes()
    assert (found.num_rows, found.has_room) == (ROWS, 1)
    o.dispatch()
    # A routing that is refused: nobody may go on with the plan.
    gpu.standin_set_plans(ROWS, 1, 2, 4, 0, 0)
    o.make_plan()
    assert o.wait_for_sizes().bad_ranks == 4
    raises("not received", o.dispatch)

    # What was queued before may take as long as it likes, also on a stream that this one waits for.
    gpu.standin_set_plans(ROWS, 1, 2, 0, 0, 0)
    o.group.begin(0.01, 0, 0, 0)
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
    # Ctrl-C ends a wait that may take as long as it likes.
    gpu.standin_set_plans(ROWS, 1, 2, 0, 0, 0)
    gpu.standin_hold(STREAM)
    o.make_plan()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with suppress(KeyboardInterrupt):
        raise AssertionError(f"a wait ends with {o.wait_for_sizes()}")
    gpu.standin_release()

    # Words come in any order: none is taken before it is there.
    o.group.begin(60.0, 0, 0, 0)
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
    """Windows grow on all ranks or on none, and not while a graph holds them."""
    o, gpu = Objects(program), program.gpu
    group = o.new_group()
    assert group.reserve(**o.shape()) is None  # large enough
    assert group.reserve(**o.shape(400)) == "tokens 128 -> 400"

    def late(*_: Any) -> bytes:
        raise EpError("rank 2 did not come")

    raises("rank 2 did not come", lambda: group.reserve(**{**o.shape(800), "all_gather": late}))
    group.reserve(**o.shape(400))  # a rank that did not come has left no windows
    program.fail_after("nccl", 2)
    raises("use smaller micro-batches", lambda: group.reserve(**o.shape(800)))
    program.fail_after("nccl", -1)
    assert group.max_tokens == group.num_bytes == 0
    group.reserve(**o.shape(400))
    gpu.standin_capture(STREAM, 0)
    raises("a CUDA graph holds calls of this group", lambda: group.reserve(**o.shape(800)))
    o.make_plan(ROWS, STREAM, group)
    gpu.standin_capture(0, 0)
    raises("its windows cannot grow: a CUDA graph", lambda: group.reserve(**o.shape(800)))
    assert group.begin(1.0, 400, TOP_K, 64)
    o.close()


CASES = {case.__name__: case for case in (failures, order, calls, sizes, growth)}

if __name__ == "__main__":
    CASES[sys.argv[3]](Program(*sys.argv[1:3]))
