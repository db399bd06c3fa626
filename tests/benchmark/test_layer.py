"""Megatron's dispatchers and whole layers: right ones pass the check, wrong ones do not.

And layers share their weights.
"""

from __future__ import annotations

import gc
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from dispatcher_bugs import put_into
from imports import import_megatron_on_cpu
from patience import PatientPool
from prepared_subject import CASES, FFN, prepared_on

from megatron_ncclep.benchmark.run import make_subject
from megatron_ncclep.benchmark.shared_layer import route, shared_layer
from megatron_ncclep.benchmark.subjects import BOTH, Setting, UnavailableError
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.ranks.pool import RankContext, RankPool

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

GROUPED = "layer:ncclep:reference:grouped"
GRAPH = f"{GROUPED}:full_iteration"
DISPATCHERS = ["alltoall", "allgather", "ncclep:reference"]
SUBJECTS = [*DISPATCHERS, *(f"layer:{name}" for name in DISPATCHERS), GROUPED, GRAPH]
WITH_BUGS = ["layer:alltoall", "layer:ncclep:reference", GROUPED]
EXPECTED = {
    "swapped rows": "output",
    "reversed probabilities": "output",
    "wrong counts": "rows of each expert",
    "half the gradient of probabilities": "gradient of the probabilities",
    "a row without gradient": "gradient of the hidden states",
}
OF_LAYERS = EXPECTED | {
    "wrong counts": "output",
    "rows overwritten before backward": "gradient of experts.",
    "another routing": "not the shape's routing",
}
REJECTED = [
    *((name, bug) for name in ("alltoall", "ncclep:reference") for bug in EXPECTED),
    *((name, bug) for name in WITH_BUGS for bug in OF_LAYERS),
]


def check_on_rank(
    context: RankContext, name: str, case: str, bug: str, max_recv_rows: Any = "worst"
) -> str | None:
    """Prepare a layer that has a bug on rank 1, run it as if it were timed, and check it."""
    workload = Workload(CASES[case], context.rank, FFN)
    prepared = prepared_on(context, name, workload, max_recv_rows)
    layer = getattr(prepared, "_layer", None)
    if context.rank == 1:
        if bug == "rows overwritten before backward":
            overwrite_rows(prepared._dispatcher)
        elif bug == "another routing":
            layer.router.given_logits = layer.router.given_logits.flip(1)
        elif bug == "a graph that keeps its routing":
            routing = Workload(CASES[case], context.rank, FFN)
            replay = prepared.passes[BOTH]
            prepared.passes[BOTH] = lambda: (route(prepared._shared, routing), replay())
        else:
            put_into(prepared._dispatcher, bug)
    try:
        for call in prepared.passes.values():
            call()
        problem = prepared.problem()
        assert layer is None or all(weight.grad is None for weight in layer.parameters())
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
    workload = Workload(CASES["fp32"], context.rank, FFN)
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
    pool = PatientPool(2, prepare=import_megatron_on_cpu)
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_right_results_pass(two_ranks: RankPool, name: str, case: str) -> None:
    assert two_ranks.run(check_on_rank, name, case, "none") == [None, None]


@pytest.mark.parametrize(("name", "bug"), REJECTED)
def test_wrong_results_are_rejected(two_ranks: RankPool, name: str, bug: str) -> None:
    problems = [found for found in two_ranks.run(check_on_rank, name, "bf16", bug) if found]
    expected = (OF_LAYERS if name in WITH_BUGS else EXPECTED)[bug]
    assert any(expected in problem for problem in problems), problems


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
        # Weights in fp32, and as much of gradients.
        assert found == [kinds, True, 0, 8 * num_weights, 1, 0, [None, None]]


def test_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    setting = Setting(0, 2, "cuda", 60, lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UnavailableError, match=r"pip install 'megatron-ncclep\[train\]'"):
        make_subject("alltoall", setting, Workload(CASES["fp32"], 0))
    with pytest.raises(UnavailableError, match="does not give ffn_hidden_size"):
        shared_layer(setting, Workload(CASES["fp32"], 0))
    with pytest.raises(UnavailableError, match=r"pip install 'megatron-ncclep\[te\]'"):
        shared_layer(setting, Workload(CASES["fp32"], 0, FFN))
