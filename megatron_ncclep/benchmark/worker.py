"""What a rank runs: one shape, with the progress shown by rank 0."""

from __future__ import annotations

from megatron_ncclep.benchmark.job import Job
from megatron_ncclep.benchmark.progress import progress
from megatron_ncclep.benchmark.result import ShapeResult
from megatron_ncclep.benchmark.run import run_shape
from megatron_ncclep.benchmark.shapes import Shape
from megatron_ncclep.benchmark.train_result import TrainingResult
from megatron_ncclep.benchmark.train_run import run_training
from megatron_ncclep.benchmark.train_shapes import TrainingShape
from megatron_ncclep.testing.launcher import RankContext


def run_in_pool(
    context: RankContext, job: Job, shape: Shape | TrainingShape, notes: str | None
) -> ShapeResult | TrainingResult | None:
    """Measure one shape.  Collective; rank 0 returns the result.  See `run_shape`."""
    with progress(context.rank) as show:
        if isinstance(shape, TrainingShape):
            return run_training(context, job, shape, notes, show)
        return run_shape(context, job, shape, notes, show)
