"""A2SGD: data-parallel workers exchange two numbers in place of their gradients.

The method of "O(1) Communication for Distributed SGD through Two-Level Gradient Averaging", arXiv
2006.07405.  It changes the result of a training: docs/gradient-averaging.md says when not to use
it.  integration/gradient_averaging.py puts it into Megatron's DistributedDataParallel.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_ncclep.errors import InputError, UnsupportedError


def two_means(gradients: torch.Tensor) -> torch.Tensor:
    """The mean of the non-negative gradients and the mean magnitude of the negative ones.

    Args:
        gradients: any shape, a floating dtype.

    Returns:
        torch.Tensor: fp32 [2], summed in fp32; 0 for a side without gradients.  A gradient that is
        not finite makes at least one of them not finite.
    """
    count = (gradients >= 0).sum()
    counts = torch.stack([count, gradients.numel() - count]).clamp_(min=1)
    sums = [
        gradients.clamp(min=0).sum(dtype=torch.float32),
        -gradients.clamp(max=0).sum(dtype=torch.float32),
    ]
    return torch.stack(sums) / counts


class PendingAverage:
    """Means on their way to all workers; `wait` puts them into the gradients.

    Args:
        buckets: the gradients behind each pair of means; `wait` changes them in place.
        process_group: the workers.
        scales: factors for the buckets' results.
    """

    def __init__(
        self,
        buckets: Sequence[torch.Tensor],
        process_group: dist.ProcessGroup | None,
        scales: Sequence[float],
    ) -> None:
        self._buckets, self._scales = buckets, scales
        self._local = torch.stack([two_means(bucket) for bucket in buckets])
        self._mean = self._local / dist.get_world_size(process_group)
        self._work = dist.all_reduce(self._mean, group=process_group, async_op=True)

    def wait(self) -> None:
        """Wait for the other workers' means, and put them into the gradients.

        Each gradient g becomes e + enc(g) with the global means, where e = g - enc(g) locally: g
        plus the difference between the global and the local mean of its sign.  That rounds once,
        where subtracting and adding would round twice.
        """
        if self._work is not None:
            self._work.wait()
        for bucket, change, scale in zip(
            self._buckets, self._mean - self._local, self._scales, strict=True
        ):
            # In fp32 even if the gradients are not: one rounding.
            bucket.add_(torch.where(bucket >= 0, change[0], -change[1]))
            if scale != 1.0:
                bucket.mul_(scale)


def average_weights(
    parameters: Iterable[torch.nn.Parameter], process_group: dist.ProcessGroup | None = None
) -> None:
    """Average weights over the workers, in place.  Collective.

    Where a parameter has an fp32 original (Megatron's `main_param`), that one is averaged and the
    parameter becomes its rounded copy; else the optimizer's next step would undo it.
    """
    for parameter in parameters:
        original = getattr(parameter, "main_param", None)
        weights = parameter.data if original is None else original.data
        weights.div_(dist.get_world_size(process_group))
        dist.all_reduce(weights, group=process_group)
        if original is not None:
            parameter.data.copy_(weights)


class TwoLevelAveraging:
    """Two-level gradient averaging for torch's DistributedDataParallel.

    Call `averaging.register(model)` once, and `averaging.after_step()` after each step of the
    optimizer.  Each of the model's buckets has its own means; the paper takes them over all
    gradients: for that, give DistributedDataParallel a `bucket_cap_mb` that holds the whole model.

    Args:
        resync_interval: steps between two averages of the weights; 0: never.

    Raises:
        InputError: `resync_interval` is negative or not a whole number.
    """

    def __init__(self, resync_interval: int = 0) -> None:
        if not isinstance(resync_interval, int) or resync_interval < 0:
            raise InputError(
                f"resync_interval {resync_interval!r}: must be a whole number of steps from 0 "
                "(never) on"
            )
        self.resync_interval = resync_interval
        self.steps = 0
        self._model: torch.nn.parallel.DistributedDataParallel | None = None

    def register(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Make `model` average its gradients this way.  Not collective; before the first step.

        Raises:
            UnsupportedError: `model` is not one, but FSDP for example, which divides the gradients
                among the workers; or its weight gradients bypass autograd.
        """
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise UnsupportedError(
                f"two-level averaging needs torch's DistributedDataParallel, not "
                f"{type(model).__name__}: only there does each worker have all gradients"
            )
        fused = [n for n, p in model.named_parameters() if hasattr(p, "main_grad")]
        if fused:
            raise UnsupportedError(
                f"{fused[0]} has a main_grad, as with gradient_accumulation_fusion: its gradient "
                "does not reach the hook: turn the fusion off"
            )
        model.register_comm_hook(self, _hook)
        self._model = model

    def after_step(self) -> None:
        """Count a step of the optimizer; average the weights if it is time, which is collective."""
        if self._model is None:
            raise InputError("after_step() before register(model): register the model first")
        self.steps += 1
        if self.resync_interval and self.steps % self.resync_interval == 0:
            average_weights(self._model.parameters(), self._model.process_group)


# DDP compares the annotations themselves, so this module must not turn them into strings.
def _hook(
    state: TwoLevelAveraging,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    assert state._model is not None
    pending = PendingAverage([bucket.buffer()], state._model.process_group, [1.0])
    # Not in a callback: gloo makes it in a thread of its own, which may still need the interpreter
    # when the program ends, and then aborts it.
    pending.wait()
    ended: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    ended.set_result(bucket.buffer())
    return ended
