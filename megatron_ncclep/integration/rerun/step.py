"""Steps that are run again, exact and without CUDA graphs, when rows did not fit.

With on_overflow="raise", evaluations in which rows did not fit are errors (evaluation.py).

Every training loop calls Megatron's schedules once per step, through the function that
`get_forward_backward_func` returns, or through the FullCudaGraphWrapper around it.  Both are
wrapped here.  `HOOKS` in hooks.py lists which module each function changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from megatron_ncclep.config import AUTO, DROP, RERUN, EpConfig
from megatron_ncclep.engines.overflow import can_drop, needed_and_had
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.options.field import NAME, resolve_options
from megatron_ncclep.integration.patching import replaces
from megatron_ncclep.integration.rerun.batches import Batches
from megatron_ncclep.integration.rerun.evaluation import CheckedEvaluations
from megatron_ncclep.integration.rerun.graphs import without_graphs
from megatron_ncclep.integration.rerun.limit import (
    MOST_LOAD,
    FollowedLimit,
    drop_iteration_graphs,
    holds_iteration_graph,
)
from megatron_ncclep.integration.rerun.state import Snapshot
from megatron_ncclep.integration.rerun.training_ranks import StepsOfModel, of_model
from megatron_ncclep.logs import get_logger

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_ARGUMENTS = ["data_iterator", "model", "forward_only"]
# Where a model keeps its `Reruns` or `CheckedEvaluations`; False: it needs neither.
_ATTRIBUTE = "_ncclep_reruns"
# On each part of a model: whether Megatron's buffers hold gradients of a step before.
_HAS_GRADIENTS = "_ncclep_has_gradients"
# More than any word of an overflow report: a rank could not run the step again.
_REFUSED = 1 << 62


def change_schedules(module: Any) -> None:
    """Let Megatron's schedules run a step again."""
    for name in _SCHEDULES:
        replaces(name, _ARGUMENTS)(_with_reruns)(module)


@replaces("FullCudaGraphWrapper.__call__", ["self"])
def change_full_iteration(original: Any) -> Any:
    """Let a step that is a CUDA graph be run again by the schedule that it holds."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = _steps_of(kwargs)
        if steps is None:
            return original(self, *args, **kwargs)
        if isinstance(steps, Reruns):
            steps.warmup_steps = self.cuda_graph_warmup_steps
        return steps.run(partial(original, self), self.forward_backward_func, kwargs)

    return call


def _with_reruns(schedule: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        steps = _steps_of(kwargs)
        if steps is None:
            return schedule(*args, **kwargs)
        return steps.run(schedule, schedule, kwargs)

    return run


def _steps_of(arguments: dict[str, Any]) -> Reruns | CheckedEvaluations | None:
    """What runs the steps of the model in a schedule's arguments; None: the schedule alone.

    Raises:
        InputError: the model's options are invalid.
    """
    model = arguments.get("model")
    chunks = model if isinstance(model, list) else [model]
    config = of_model(chunks[0], "config")
    if getattr(config, "moe_token_dispatcher_type", None) != NAME:
        return None
    steps: Any = vars(chunks[0]).get(_ATTRIBUTE)
    if steps is None:
        options, steps = resolve_options(config), False
        if options.on_overflow != DROP and can_drop(options):
            kind = Reruns if options.on_overflow == RERUN else CheckedEvaluations
            steps = kind(chunks, options, arguments.get("pg_collection"))
        setattr(chunks[0], _ATTRIBUTE, steps)
    return steps or None


class Reruns(StepsOfModel):
    """Runs the steps of one model, and again those in which rows did not fit.

    The model, on each rank its first part, holds this object.  All ranks of the model take part in
    every step, also those whose layers have no experts.

    Attributes:
        num_steps, num_reruns: so far, evaluation included.
        limit: follows the load, if the options ask for that.
        warmup_steps: before Megatron captures the graph of an iteration.
    """

    def __init__(self, chunks: list[Any], options: EpConfig, collection: Any = None) -> None:
        """See `StepsOfModel`."""
        super().__init__(chunks, options, collection)
        self._chunks = chunks
        for chunk in chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                # A copy of the model gets a method of its own.
                call = partial(_zero_grad_buffer, vars(chunk).get("zero_grad_buffer"))
                chunk.zero_grad_buffer = MethodType(call, chunk)
        self.limit = FollowedLimit() if options.max_recv_rows == AUTO else None
        self.num_steps = self.num_reruns = self.warmup_steps = 0

    def run(
        self, first: Callable[..., Any], again: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Run one step; its results.  Collective over all ranks of the model.

        Args:
            first: runs the step, in CUDA graphs where the model has any.
            again: runs it without a graph of the whole iteration.
            arguments: keywords of both.

        Raises:
            UnsupportedError: on all ranks, when the step could not be run again.
            PeerError: a rank did not come in time.
        """
        if self._is_running:  # the schedule inside of a FullCudaGraphWrapper
            return first(**arguments)
        _check(self._chunks, arguments)
        self._is_running = True
        try:
            return self._run(first, again, arguments)
        finally:
            self._is_running = False
            if not arguments.get("forward_only"):
                for chunk in self._chunks:
                    setattr(chunk, _HAS_GRADIENTS, True)

    def _run(self, first: Any, again: Any, arguments: dict[str, Any]) -> Any:
        batches, before = Batches(arguments.get("data_iterator")), Snapshot(self._state)
        with self._state.attempted():
            results = first(**{**arguments, "data_iterator": batches.first()})
            number = arguments["num_microbatches"]
            lacked, *loads = self._seen_by_all(batches.problem(_readers(self._chunks), number))
        self.num_steps += 1
        if not lacked:
            self._follow(False, *loads)
            return results
        self.num_reruns += 1
        self._log(lacked)
        del results
        if not arguments.get("forward_only"):
            self._zero_gradients()
        before.restore()
        with without_graphs(self._chunks):
            results = again(**{**arguments, "data_iterator": batches.again()})
        if self.limit is not None:  # what came after a dropped row was wrong, and so were its loads
            self._follow(True, *self._seen_by_all(None)[1:])
        return results

    def _seen_by_all(self, problem: str | None) -> tuple[int, int, int]:
        """What any rank has seen in a step.  Collective over the model's ranks.

        Returns:
            the largest word of an `OverflowReport`, 0 if all rows fit; the largest load, and the
            largest one for which each rank may have room, in thousandths of a balanced one.
        """
        lacked: Any = self._ranks.largest_word(self._state.overflow_reports())
        load, most_load = self._state.take_loads() or (0, MOST_LOAD)
        lacked, load, most_load = self._ranks.largest(
            [lacked if problem is None else _REFUSED, load, -most_load],
            "the decision whether to run a step again",
        )
        if lacked == _REFUSED:
            raise UnsupportedError(
                f"on_overflow={RERUN!r}: a step cannot be run again, because "
                f"{problem or 'another rank cannot (its output has the reason)'}; or set "
                "max_recv_rows='worst', with which no step has to be run again"
            )
        return lacked, load, -most_load

    def _follow(self, is_rerun: bool, load: int, most_load: int) -> None:
        """Let the limit follow the load, if it does.  Collective when it changes."""
        if self.limit is None:
            return
        holds_graph = holds_iteration_graph()
        text = self.limit.after_step(load, is_rerun, most_load, holds_graph)
        if text is None:
            return
        if self._ranks.is_first:
            get_logger().info(text)
        if holds_graph:
            drop_iteration_graphs(self.warmup_steps)
        for engines in self._state.engines:
            engines.follow(self.limit.factor)

    def _zero_gradients(self) -> None:
        """Clear all gradients as a training loop does before a step."""
        for chunk in self._chunks:
            buckets = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
            # Of loops that finish the reductions after the schedule.
            if any(bucket.grad_reduce_handle is not None for bucket in buckets):
                chunk.finish_grad_sync()
            chunk.zero_grad_buffer()

    def _log(self, lacked: int) -> None:
        """Log the first rerun, the second, the fourth and so on, on one rank."""
        if self._ranks.is_first and self.num_reruns & (self.num_reruns - 1) == 0:
            needed, had = needed_and_had(lacked)
            get_logger().warning(
                "step run again, in exact mode and without CUDA graphs: a rank needed %d rows and "
                "had %d (max_recv_rows=%s). That makes %d of %d steps; a larger max_recv_rows "
                "makes them rarer",
                needed,
                had,
                self._options.max_recv_rows,
                self.num_reruns,
                self.num_steps,
            )


def _zero_grad_buffer(own: Callable[[], None] | None, chunk: Any) -> None:
    """DDP's method, or this chunk's `own`; also notes that no gradients of steps are left."""
    setattr(chunk, _HAS_GRADIENTS, False)
    type(chunk).zero_grad_buffer(chunk) if own is None else own()


def _check(chunks: list[Any], arguments: dict[str, Any]) -> None:
    """Refuse models whose steps cannot be run again, or were not tested.

    Raises:
        UnsupportedError: names the reason and the remedy.
    """
    from megatron.core.distributed import DistributedDataParallel

    problem, trains = None, not arguments.get("forward_only")
    ddp_config = getattr(chunks[0], "ddp_config", None)
    if type(arguments.get("pg_collection")).__name__ == "MultiModuleProcessGroupCollection":
        problem = "modules with process groups of their own (MultiModuleProcessGroupCollection)"
    elif getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        problem = (
            "reuse_grad_buf_for_mxfp8_param_ag=True, with which zeroing gradients clears weights"
        )
    elif trains and not all(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        problem = (
            f"a model in {type(chunks[0]).__name__}: only Megatron's DistributedDataParallel was "
            "tested"
        )
    elif trains and any(vars(chunk).get(_HAS_GRADIENTS) for chunk in chunks):
        problem = (
            "gradients of several calls of the schedule that add up: earlier ones would be cleared "
            "with those of a step that is run again; call zero_grad_buffer() before each call, and "
            "give one call all micro-batches"
        )
    if problem is not None:
        raise UnsupportedError(
            f"on_overflow={RERUN!r} does not support {problem}; leave max_recv_rows and "
            "on_overflow out, or set max_recv_rows='worst'"
        )


def _readers(chunks: list[Any]) -> list[bool]:
    """For each part of the model, whether this rank has to get data for it.

    That is so for the first and the last part of a pipeline, on the first tensor-parallel rank,
    which sends the data to the others.
    """
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_rank():
        return [False] * len(chunks)
    ends = ("pre_process", "post_process")
    return [any(of_model(chunk, end, True) for end in ends) for chunk in chunks]
