"""Whole layers: right ones pass the check, wrong ones do not, and their weights are shared."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from dispatcher_bugs import put_into, setting_of

from megatron_ncclep.benchmark import layer_subject
from megatron_ncclep.benchmark.catalogue import make_subject
from megatron_ncclep.benchmark.layer import route, shared_layer
from megatron_ncclep.benchmark.layer_subject import LayerSubject, PreparedLayer, Results
from megatron_ncclep.benchmark.subjects import (
    BOTH,
    Setting,
    UnavailableError,
    Workload,
    make_workload,
)
from megatron_ncclep.testing.cases import Case
from megatron_ncclep.testing.launcher import RankContext, RankPool

pytest.importorskip("megatron.core")

CASES = {
    "bf16": Case("bf16", (20, 20), 8, top_k=3, hidden=32, dtype=torch.bfloat16),
    "fp32": Case("fp32", (20, 20), 8, top_k=3, hidden=32, alignment=16),
    "top-1": Case("top-1", (20, 20), 8, top_k=1, hidden=32, skew=0.5),
    "an expert without rows": Case("empty", (9, 9), 8, top_k=2, hidden=32, skew=100.0),
}
FFN = 48
GROUPED = "layer:ncclep:reference:grouped"
GRAPH = f"{GROUPED}:full_iteration"
SUBJECTS = ["layer:alltoall", "layer:allgather", "layer:ncclep:reference", GROUPED, GRAPH]
WITH_BUGS = ["layer:alltoall", "layer:ncclep:reference", GROUPED]
EXPECTED = {
    "swapped rows": "output",
    "reversed probabilities": "output",
    "wrong counts": "output",
    "half the gradient of probabilities": "gradient of the probabilities",
    "a row without gradient": "gradient of the hidden states",
    "rows overwritten before backward": "gradient of experts.",
    "another routing": "not the shape's routing",
}


def replayed_on_cpu(call: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """In place of a CUDA graph: every replay leaves its results where the first one has."""
    results = call()

    def replay() -> None:
        for name, value in call().items():
            kept = results[name]
            assert (kept is None) == (value is None)
            if kept is not None and value is not None:
                kept.copy_(value)

    return replay, results


def prepared_on(
    context: RankContext, name: str, workload: Workload, max_recv_rows: Any = "worst"
) -> PreparedLayer:
    """Prepare a subject."""
    subject = make_subject(name, max_recv_rows)
    assert isinstance(subject, LayerSubject)
    with (
        mock.patch.object(layer_subject, "captured", replayed_on_cpu),
        mock.patch.object(layer_subject, "layer_obstacle", return_value=None),
    ):
        return subject.prepare(setting_of(context), workload)


def check_on_rank(
    context: RankContext, name: str, case: str, bug: str, max_recv_rows: Any = "worst"
) -> str | None:
    """Prepare a layer that has a bug on rank 1, run it as if it were timed, and check it."""
    workload = make_workload(CASES[case], context.rank, FFN)
    prepared = prepared_on(context, name, workload, max_recv_rows)
    layer, dispatcher = prepared._layer, prepared._dispatcher
    if context.rank == 1:
        if bug == "rows overwritten before backward":
            overwrite_rows(dispatcher)
        elif bug == "another routing":
            layer.router.given_logits = layer.router.given_logits.flip(1)
        elif bug == "a graph that keeps its routing":
            routing = make_workload(CASES[case], context.rank, FFN)
            replay = prepared.passes[BOTH]
            prepared.passes[BOTH] = lambda: (route(prepared._shared, routing), replay())
        else:
            put_into(dispatcher, bug)
    try:
        for call in prepared.passes.values():
            call()
        problem = prepared.problem()
        assert all(weight.grad is None for weight in layer.parameters())
        return problem
    finally:
        prepared.close()


def overwrite_rows(dispatcher: Any) -> None:
    """As if the dispatcher's buffer were used again while the experts still need it."""
    kept: list[torch.Tensor] = []
    after_dispatch, before_combine = dispatcher.dispatch_postprocess, dispatcher.combine_preprocess

    def keep(*args: Any) -> Any:
        results = after_dispatch(*args)
        kept.append(results[0])
        return results

    def overwrite(*args: Any) -> Any:
        kept.pop().data.mul_(0.5)  # behind autograd's back
        return before_combine(*args)

    dispatcher.dispatch_postprocess, dispatcher.combine_preprocess = keep, overwrite


def share_on_rank(context: RankContext) -> list[Any]:
    """Two subjects of one run: the second takes the first one's weights; both let go of them."""
    workload = make_workload(CASES["fp32"], context.rank, FFN)
    first, second = (prepared_on(context, name, workload) for name in (WITH_BUGS[0], GROUPED))
    pairs = zip(first._layer.parameters(), second._layer.parameters(), strict=True)
    kinds = [type(prepared._layer.experts).__name__ for prepared in (first, second)]
    found: list[Any] = [kinds, all(a is b for a, b in pairs)]
    found += [first.shared_bytes, second.shared_bytes]
    for prepared in (first, second):
        for call in prepared.passes.values():
            call()
    problems = [first.problem(), second.problem()]
    first.close()
    found.append(len(workload.shared))
    second.close()
    gc.collect()
    return [*found, len(workload.shared), problems]


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    """Two processes of their own: Megatron on a CPU needs patches that last."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_right_results_pass(two_ranks: RankPool, name: str, case: str) -> None:
    assert two_ranks.run(check_on_rank, name, case, "none") == [None, None]


@pytest.mark.parametrize("bug", EXPECTED)
@pytest.mark.parametrize("name", WITH_BUGS)
def test_wrong_results_are_rejected(two_ranks: RankPool, name: str, bug: str) -> None:
    problems = [found for found in two_ranks.run(check_on_rank, name, "bf16", bug) if found]
    assert any(EXPECTED[bug] in problem for problem in problems), problems


def test_a_graph_is_replayed_with_another_routing(two_ranks: RankPool) -> None:
    """One that goes on with the routing of its capture is right as long as that stays."""
    problems = two_ranks.run(check_on_rank, GRAPH, "bf16", "a graph that keeps its routing")
    assert "replayed with another routing: rank 1: the router's map is not" in str(problems)


def test_rows_that_do_not_fit_are_no_result(two_ranks: RankPool) -> None:
    """20 tokens of 2 ranks with 3 experts each, of which a rank has 60 on average."""
    problems = two_ranks.run(check_on_rank, f"{GROUPED}:static", "bf16", "none", 64)
    assert "did not fit into 64 received rows and were dropped" in str(problems)


def test_layers_share_weights_and_free_them(two_ranks: RankPool) -> None:
    # Router, and in each of four experts fc1 (its output is gated: twice as wide) and fc2.
    num_weights = 8 * 32 + 4 * (2 * FFN * 32 + 32 * FFN)
    for found in two_ranks.run(share_on_rank):
        kinds = ["SequentialMLP", "GroupedLocalExperts"]
        assert found == [kinds, True, 0, 4 * num_weights, 1, 0, [None, None]]


def test_what_a_layer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    setting = Setting(0, 2, "cuda", 60, lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UnavailableError, match="does not give ffn_hidden_size"):
        shared_layer(setting, make_workload(CASES["fp32"], 0))
    with pytest.raises(UnavailableError, match=r"pip install 'megatron-ncclep\[te\]'"):
        shared_layer(setting, make_workload(CASES["fp32"], 0, FFN))
