"""A rank goes wrong where the others wait for it: they say who it was, and end, soon.

Their hosts wait, or their devices, as those of `native` do in dispatch and combine.

`end_of` asserts that no rank hangs, how each of them ends, and that nothing is left of the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rank import DEADLINE_S, LONG_S

pytestmark = [pytest.mark.needs_ranks(2)]

# How the hosts agree: through shared memory, or over the process group, as ranks of several hosts
# always do.
LINKS = {"shared memory": {}, "process group": {"NCCLEP_HOST_EXCHANGE": "0"}}
DIED = r"\(process \d+\) has died"
# A process that ends by itself is seen to close its end first.
LEFT = r"(\(process \d+\) has died|has closed its end)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "link" in metafunc.fixturenames:
        links = [*LINKS] if metafunc.config.getoption("--hosts") == 1 else ["process group"]
        metafunc.parametrize("link", links)


def assert_no_answer(texts: list[str], culprit: int, phase: str, reason: str) -> None:
    """All ranks but the culprit say where they waited and, with a `reason`, for whom.

    A rank may learn first that another one has given up or left, and name that one; whoever gave up
    first names the culprit.
    """
    others = {rank: text for rank, text in enumerate(texts) if rank != culprit}
    for rank, text in others.items():
        on_device = rf"rank \d did not come in {phase}, operation \d+ of the group "
        on_host = rf"expert-parallel group in {phase}(, [\w ]+| between nodes)* "
        pattern = (
            rf"PeerError: rank {rank} of {len(texts)}: (no answer from the other ranks of the "
            rf"{on_host}|{on_device})"
            rf"\(deadline ({DEADLINE_S:g}|{LONG_S:g}) s\): "
        )
        entered = "it has entered the call"
        why = rf"rank \d+|it died|{entered}" if reason else f"(a rank|it) died|{entered}"
        assert re.match(rf"{pattern}({why})", text), text
    if reason:
        # A device gives up before a process that takes its time to end is gone.
        of_culprit = rf"rank {culprit} ({reason}|did not come in {phase}, operation)"
        assert any(re.search(of_culprit, text) for text in others.values()), texts


# What the others say of the culprit, and what it says itself.
DOES_NOT_COME = {
    "dies": (DIED, ""),
    "raises": (LEFT, "ArithmeticError: the loss is NaN"),
    "destroys": (LEFT, "GroupClosedError: the .* process group was destroyed"),
    "comes_late": ("did not come", "PeerError: .* in (dispatch|plan)"),
}
FAILS_INSIDE = {
    "dies_in_dispatch": (DIED, ""),
    "runs_out_of_memory": (LEFT, "RuntimeError: .*can't allocate memory"),
}


@pytest.mark.parametrize("fault", DOES_NOT_COME)
def test_a_rank_that_does_not_come(end_of: Callable[..., list[str]], link: str, fault: str) -> None:
    reason, own = DOES_NOT_COME[fault]
    *_, last = texts = end_of(fault, **LINKS[link])
    shared = link == "shared memory"
    assert_no_answer(texts, len(texts) - 1, "dispatch", reason if shared else "")
    assert re.match(own or "$", last), texts
    if fault == "comes_late" and shared:
        # When it comes, it hears at once what became of the others.
        assert re.search(rf"rank \d (gave up|did not come in dispatch|{LEFT})", last), texts


# On GPUs no host waits inside a step; tests/faults/test_device.py has these faults there.
@pytest.mark.cpu_only
@pytest.mark.parametrize("fault", FAILS_INSIDE)
def test_a_rank_that_fails_inside_a_step(end_of: Callable[..., list[str]], fault: str) -> None:
    """The others count on its rows, and see a connection end: they say whose.

    They used to say only what gloo says, which names an address: "Connection reset by peer".
    """
    reason, own = FAILS_INSIDE[fault]
    *_, last = texts = end_of(fault)
    assert_no_answer(texts, len(texts) - 1, "dispatch", reason)
    assert re.match(own or "$", last), texts


def test_a_rank_that_dies_while_memory_is_shared_leaves_none(
    end_of: Callable[..., list[str]],
) -> None:
    texts = end_of("dies_while_opening")
    assert texts[0] == ""
    assert_no_answer(texts, 0, "open", "")


def test_a_rank_that_leaves_out_a_call(end_of: Callable[..., list[str]], engine_name: str) -> None:
    *others, last = texts = end_of("skips")
    assert all(text.startswith("PeerError: ") for text in texts), texts
    if engine_name == "native":
        # Only its own host waits, and the others' devices, which it does not reach.
        # Without shared memory its host learns only that nobody comes.
        gone = r"(rank 0 has gone on to call \d+ without an exchange|plan, call \d+ \(deadline)"
        assert re.search(gone, last), last
        assert all(re.search(r"rank \d did not come in combine", text) for text in others), texts
        assert any(f"rank {len(others)} did not come in combine" in text for text in others), texts
        return
    for text in texts:
        for rank, phase in enumerate(["combine"] * len(others) + ["plan"]):
            assert re.search(rf"rank {rank} is in {phase}, call \d+", text), text


def test_ctrl_c_ends_ranks_that_wait(end_of: Callable[..., list[str]], link: str) -> None:
    """Far sooner than their deadline, which is long here, and as it ends any program."""
    assert set(end_of("all_are_interrupted", **LINKS[link])) == {"KeyboardInterrupt"}
