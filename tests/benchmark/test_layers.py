"""Megatron's dispatchers, whole layers and experts alone: the check accepts right ones only."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from rank_pool import RankContext, RankPool
from stand_ins import BUGS, FFN, prepared_on, problem_of, put_into

from benchmarks import layer_model as model
from benchmarks.job import make_subject
from benchmarks.layers import blocks_of
from megatron_ncclep.benchmark import BOTH, Setting, UnavailableError
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.ranks import Timer
from megatron_ncclep.benchmark.shapes import Workload

CASES = {
    "bf16": Case("bf16", (20, 20), 8, top_k=3, hidden=32, dtype=torch.bfloat16),
    "fp32": Case("fp32", (20, 20), 8, top_k=3, hidden=32, alignment=16),
    "top-1": Case("top-1", (20, 20), 8, top_k=1, hidden=32, skew=0.5),
    "an expert without rows": Case("empty", (9, 9), 8, top_k=2, hidden=32, skew=100.0),
}
GROUPED = "layer:ncclep:reference:grouped"
GRAPH = f"{GROUPED}:full_iteration"
DISPATCHERS = ["alltoall", "allgather", "ncclep:reference"]
EXPERTS = ["experts:megatron", "experts:grouped", "experts:grouped:full_iteration"]
# Bug -> what the check says.
FOUND = {
    "swapped rows": "output",
    "reversed probabilities": "output",
    "wrong counts": "rows of each expert",
    "half the gradient of probabilities": "gradient of the probabilities",
    "a row without gradient": "gradient of the hidden states",
}
OF_LAYERS = FOUND | {
    "wrong counts": "output",
    "rows overwritten before backward": "gradient of experts.",
    "another routing": "not the shape's routing",
}
# One that keeps the routing of its capture is right as long as the routing stays.
OF_GRAPHS = {
    "a graph that keeps its routing": "replayed with another routing: rank 1: the router's map is"
}
OF_EXPERTS = FOUND | {"wrong counts": "output", "a row without gradient": "gradient of the rows"}


def check_on_rank(
    context: RankContext, name: str, case: str, bug: str, max_recv_rows: Any = "worst"
) -> str | None:
    """Prepare a subject that has a bug on rank 1, run it as if it were timed, and check it."""
    workload = Workload(CASES[case], context.rank, FFN)
    prepared = prepared_on(context, name, workload, max_recv_rows)
    if context.rank == 1:
        put_into_subject(prepared, workload, bug)
    return problem_of(prepared)


def put_into_subject(prepared: Any, workload: Workload, bug: str) -> None:
    if bug == "rows overwritten before backward":
        overwrite_rows(prepared._dispatcher)
    elif bug == "another routing":
        router = prepared._layer.router
        router.given_logits = router.given_logits.flip(1)
    elif bug == "a graph that keeps its routing":
        routing = Workload(workload.case, workload.rank, FFN)
        replay = prepared.passes[BOTH]
        prepared.passes[BOTH] = lambda: (model.route(prepared._shared, routing), replay())
    elif hasattr(prepared, "_dispatcher"):
        put_into(prepared._dispatcher, bug)
    else:
        experts = prepared._experts
        prepared._experts = lambda *args: experts(*BUGS[bug](*args))


def overwrite_rows(dispatcher: Any) -> None:
    """As if the dispatcher's buffer were used again while the experts still need it."""
    after_dispatch, before_combine = dispatcher.dispatch_postprocess, dispatcher.combine_preprocess

    def dispatch_postprocess(*args: Any) -> Any:
        results = after_dispatch(*args)

        def overwrite(*args: Any) -> Any:
            results[0].data.mul_(0.5)  # behind autograd's back
            return before_combine(*args)

        dispatcher.combine_preprocess = overwrite
        return results

    dispatcher.dispatch_postprocess = dispatch_postprocess


def test_layers_share_weights_and_free_them(ctx: RankContext) -> None:
    """Two subjects of one run share weights, are timed in turns, and free the weights."""
    workload = Workload(CASES["fp32"], ctx.rank, FFN)
    both = [prepared_on(ctx, name, workload) for name in ("layer:alltoall", GROUPED)]
    kinds = [type(prepared._layer.experts).__name__ for prepared in both]
    assert kinds == ["SequentialMLP", "GroupedLocalExperts"]
    pairs = zip(*(prepared._layer.parameters() for prepared in both), strict=True)
    assert all(a is b for a, b in pairs)
    # Router, and in each of four experts fc1 (its output is gated: twice as wide) and fc2.
    num_weights = 8 * 32 + 4 * (2 * FFN * 32 + 32 * FFN)
    # Weights in fp32, and as much of gradients.
    assert [prepared.shared_bytes for prepared in both] == [0, 8 * num_weights]
    layer, received = both[0]._shared.module, model.received_rows(workload, ctx.rank)
    timer = Timer(ctx.group, "cpu")
    for clock in [prepared.clock(timer) for prepared in both] * 2:
        clock()  # what main_grads hold after each round is one pass's
        main_grads = {name: weight.main_grad for name, weight in layer.named_parameters()}
        expected = model.expert_gradients(layer, received)
        problem = model.results_problem(workload, ctx.rank, main_grads, expected, 1)
        assert problem is None, problem
    assert [prepared.problem() for prepared in both] == [None, None]
    del layer, main_grads
    for prepared in both:
        assert len(workload.shared) == 1
        prepared.close()
    gc.collect()
    assert len(workload.shared) == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "name", [*DISPATCHERS, *(f"layer:{name}" for name in DISPATCHERS), GROUPED, GRAPH, *EXPERTS]
)
def test_right_results_pass(two_ranks: RankPool, name: str, case: str) -> None:
    assert two_ranks.run(check_on_rank, name, case, "none") == [None, None]


@pytest.mark.parametrize(
    ("name", "bugs"),
    [
        ("alltoall", FOUND),
        ("ncclep:reference", FOUND),
        ("layer:alltoall", OF_LAYERS),
        ("layer:ncclep:reference", OF_LAYERS),
        (GROUPED, OF_LAYERS),
        (GRAPH, OF_GRAPHS),
        *((name, OF_EXPERTS) for name in EXPERTS),
    ],
)
def test_wrong_results_are_rejected(two_ranks: RankPool, name: str, bugs: dict[str, str]) -> None:
    for bug, found in bugs.items():
        problems = two_ranks.run(check_on_rank, name, "bf16", bug)
        assert found in str(problems), (bug, problems)
    if name == GROUPED:  # 20 tokens of 2 ranks with 3 experts each make 60 rows on average
        problems = two_ranks.run(check_on_rank, f"{name}:static", "bf16", "none", 64)
        assert "did not fit into 64 received rows and were dropped" in str(problems)


def test_blocks() -> None:
    place, lengths = blocks_of(torch.tensor([2, 0, 17]), grouped=True)
    assert lengths.tolist() == [32, 0, 16]
    assert place.tolist() == [32, 33, *range(17)]
    place, lengths = blocks_of(torch.tensor([2, 0, 17]), grouped=False)
    assert (lengths.tolist(), place.tolist()) == ([2, 0, 17], [*range(19)])
    place, lengths = blocks_of(torch.tensor([2, 0, 17]), grouped=False, in_fp8=True)
    assert (lengths.tolist(), place.tolist()) == ([16, 0, 32], [0, 1, *range(16, 33)])


def test_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    setting = Setting(0, 2, "cuda", 60, lambda: None)  # type: ignore[arg-type,return-value]
    work = Workload(CASES["fp32"], 0)
    with pytest.raises(UnavailableError, match=r"pip install 'megatron-ncclep\[train\]'"):
        make_subject("alltoall", setting, work)
    for ffn, message in ((None, "does not give ffn_hidden_size"), (FFN, r"megatron-ncclep\[te\]'")):
        work.ffn_hidden_size = ffn
        with pytest.raises(UnavailableError, match=message):
            model.shared_layer(setting, work)
