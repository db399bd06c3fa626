"""Rows that did not fit are an error of the calls that lacked them, not of others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from on_ranks import gathered
from rank_pool import RankContext
from test_reruns import RERUN, STAGES, WHOLE, collapse, is_moe, replayed
from timeouts import patient
from trainer import Model, ModelCase

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import RowsDroppedError
from megatron_ncclep.integration.rerun.training_ranks import TrainingRanks, groups_of

pytestmark = pytest.mark.each_release

RAISE = replace(RERUN, on_overflow="raise")
# Two replicas, of which only one drops.
REPLICAS = replace(WHOLE, ep=2)


class WithoutExperts(Model):
    """A model whose first stage may have none."""

    def _change(self, chunk: Any) -> None:
        if any(is_moe(layer) for layer in chunk.decoder.layers):
            super()._change(chunk)


def model_of(ctx: RankContext, case: ModelCase, options: EpConfig) -> Model:
    return WithoutExperts(ctx, "ncclep", replace(case, options={"ncclep": options}))


@contextmanager
def collapsed(model: Model) -> Iterator[None]:
    """Let the first replica's tokens all go to the same experts."""
    chunks = model.chunks if model.replica < model.case.ep else []
    with ExitStack() as hooks:
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers if is_moe(layer)):
            hooks.enter_context(layer.mlp.router.register_forward_pre_hook(collapse))
        yield


@pytest.mark.supports(
    "--ncclep-on-overflow=raise", compared="the errors of all ranks, in evaluations too"
)
@pytest.mark.parametrize("case", [WHOLE, REPLICAS, STAGES], ids=["whole", "replicas", "stages"])
def test_an_evaluation_with_dropped_rows_is_an_error(ctx: RankContext, case: ModelCase) -> None:
    """Its loss was reported, and the next training step was blamed.  No loss is returned on any
    rank, also where the dropped rows were another stage's or another replica's.  A step before it
    whose optimizer did not run, after an overflow of gradients for example, is blamed itself.
    """
    model = model_of(ctx, case, RAISE)
    model.gradients(0)
    megatron_ncclep.check()
    expected = model.evaluate(0)
    with collapsed(model), pytest.raises(RowsDroppedError) as caught:
        model.evaluate(0)
    text = str(caught.value)
    assert "a rank needed " in text
    assert " in this evaluation. on_overflow is 'raise', so its loss is not returned: set" in text
    assert gathered(ctx, text) == [text] * ctx.num_ranks
    assert torch.equal(model.evaluate(0), expected)
    megatron_ncclep.check()  # the next training step is not blamed
    with collapsed(model):
        model.gradients(0)
    with pytest.raises(RowsDroppedError, match=r"had \d+ before this evaluation\. "):
        model.evaluate(0)
    assert torch.equal(model.evaluate(0), expected)
    steps: Any = model.wrapped[0]._ncclep_reruns  # type: ignore[attr-defined]
    assert copy.deepcopy(steps) is None  # a copy of the model makes its own


class Half(torch.nn.Module):
    """A model on two ranks of four, with process groups of its own."""

    def __init__(self, options: EpConfig) -> None:
        super().__init__()
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "ep"])
        groups.dp = groups.dp_cp = groups.ep
        self.pg_collection, self.model_type = groups, None
        self.config = make_config("ncclep", torch.float32, 2, ncclep=options)
        self.layer = build_layer(self.config)

    def set_input_tensor(self, tensor: Any) -> None:
        pass

    def evaluate(self, hidden: torch.Tensor) -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(batches: Iterator[torch.Tensor], model: Half) -> Any:
            return model.layer(next(batches))[0], lambda out: (out.sum(), {"loss": out.sum()})

        with torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=step, data_iterator=iter([hidden]), model=self,
                num_microbatches=1, seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=True,
            )  # fmt: skip


@pytest.mark.parametrize("options", [RAISE, RERUN], ids=["raise", "rerun"])
def test_models_on_other_ranks_do_not_wait(ctx: RankContext, options: EpConfig) -> None:
    """Two models on ranks of their own, which evaluate at different times, waited for each other
    until the deadline.
    """
    initialize(ep=2)
    model = Half(replace(options, timeout_s=patient(5), first_timeout_s=patient(5)))
    random = torch.randn(SEQUENCE, BATCH, HIDDEN)
    assert model.evaluate(random)
    if ctx.rank < 2:
        for _ in range(2):
            assert model.evaluate(random)
        if options is RAISE:
            with pytest.raises(RowsDroppedError, match="in this evaluation"):
                model.evaluate(torch.zeros(4 * SEQUENCE, BATCH, HIDDEN))
    model.layer.token_dispatcher.engines.close()


def test_all_ranks_of_a_grid_learn_the_largest(ctx: RankContext) -> None:
    """Of two stages of two replicas, whose groups are reduced one after the other."""
    initialize(ep=2, pp=2)
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_group()
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks = TrainingRanks([stages, replicas], RAISE)
    for largest in range(4):
        number = torch.tensor(10 * (ctx.rank == largest))
        assert ranks.largest([number, -ctx.rank], "a test") == [10, 0]
    assert gathered(ctx, ranks.is_first) == [True, False, False, False]
    alone = parallel_state.get_tensor_model_parallel_group()
    own = SimpleNamespace(tp=alone, pp=stages, dp_cp=replicas)
    wrapped = SimpleNamespace(module=SimpleNamespace(pg_collection=own))
    world = [torch.distributed.group.WORLD]
    assert groups_of(wrapped, None) == groups_of(SimpleNamespace(), None) == world
    # A schedule's caller says which of them it means, and need not name all.
    assert groups_of(wrapped, SimpleNamespace(tp=alone, pp=alone)) == [replicas]
    assert groups_of(wrapped, SimpleNamespace(pp=alone, dp_cp=alone)) == [alone]


@pytest.mark.parametrize("other", [RAISE, RERUN], ids=["raise", "rerun"])
def test_another_models_shortage_stays_its_own(ctx: RankContext, other: EpConfig) -> None:
    """A step of one model took the report of another one in the same group: it was run again for
    nothing, and the other one's error never came.
    """
    model = model_of(ctx, replace(WHOLE, sequence=48), RERUN)
    layer = build_layer(make_config("ncclep", torch.float32, 4, ncclep=other))
    with replayed():
        layer(torch.zeros(4 * SEQUENCE, BATCH, HIDDEN))  # all to the same experts
    model.gradients(0)
    model.evaluate(0)
    steps: Any = model.wrapped[0]._ncclep_reruns  # type: ignore[attr-defined]
    assert (steps.num_steps, steps.num_reruns) == (2, 0)
    with pytest.raises(RowsDroppedError):
        megatron_ncclep.check()
    layer.token_dispatcher.engines.close()


def test_a_teacher_in_a_students_step_drops_nothing(ctx: RankContext) -> None:
    """It is not run again itself, so its passes are not attempts.  A layer that is called on its
    own has room for all rows, too; what a graph drops is an error.  A copy of a model cleared the
    gradients of the model that it was a copy of.
    """
    student = model_of(ctx, WHOLE, replace(RERUN, max_recv_rows="4x"))
    teacher = build_layer(make_config("ncclep", torch.float32, 4, ncclep=RERUN))
    passes: list[torch.Tensor] = []
    hidden = torch.zeros(4 * SEQUENCE, BATCH, HIDDEN)
    student.chunks[0].register_forward_pre_hook(lambda *_: passes.append(teacher(hidden)[0]))
    student.gradients(0)
    assert len(passes) == student.case.micro_batches
    assert teacher.token_dispatcher.num_dropped == 0
    steps: Any = student.wrapped[0]._ncclep_reruns  # type: ignore[attr-defined]
    assert steps.num_reruns == 0
    megatron_ncclep.check()
    with replayed():
        teacher(hidden)
    with pytest.raises(RowsDroppedError, match="can be run again, and a CUDA graph of the layer"):
        megatron_ncclep.check()
    teacher.token_dispatcher.engines.close()

    chunk: Any = student.wrapped[0]
    assert chunk._ncclep_has_gradients
    other = copy.copy(chunk)
    for name in ("zero_grad_buffer", "_ncclep_reruns"):
        setattr(other, name, copy.deepcopy(getattr(chunk, name), {id(chunk): other}))
    assert other._ncclep_reruns is None
    other.zero_grad_buffer()
    assert (chunk._ncclep_has_gradients, other._ncclep_has_gradients) == (True, False)
