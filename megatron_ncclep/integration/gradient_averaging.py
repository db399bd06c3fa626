"""Two-level averaging in Megatron's DistributedDataParallel, for the option gradient_averaging.

`HOOKS` in hooks.py lists which module each function changes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from megatron_ncclep.config import A2SGD, EpConfig
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.gradient_averaging import PendingAverage, average_weights
from megatron_ncclep.integration.options.field import NAME, resolve_options
from megatron_ncclep.integration.patching import replaces

_WITH = "gradient_averaging='a2sgd'"


@replaces("DistributedDataParallel.__init__", ["config", "ddp_config", "module"])
def change_ddp(original: Any) -> Any:
    """Let DistributedDataParallel exchange two means for each bucket where the config asks so."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        options = _asked_for(arguments["config"])
        if options is None:
            original(self, *args, **kwargs)
            return
        _check(arguments["config"], arguments["ddp_config"])
        original(self, *args, **kwargs)
        _Averaging(self, options.resync_interval)

    return init


def refuse_in(class_name: str) -> Any:
    """A change that makes a class refuse the option because it divides gradients among ranks."""

    def change(module: Any) -> None:
        # From 0.20 on a function that makes an object of one of two classes.
        is_class = isinstance(getattr(module, class_name, None), type)
        for version in ("",) if is_class else ("V1", "V2"):
            replaces(f"{class_name}{version}.__init__", ["config"])(refusing)(module)

    def refusing(original: Any) -> Any:
        signature = inspect.signature(original)

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if _asked_for(signature.bind(self, *args, **kwargs).arguments["config"]) is not None:
                raise UnsupportedError(
                    f"{_WITH} does not support FSDP ({class_name}), with which no rank has all "
                    "gradients: use Megatron's DistributedDataParallel, or leave the option out"
                )
            original(self, *args, **kwargs)

        return init

    return change


def _asked_for(config: Any) -> EpConfig | None:
    """The options of a config that asks for two-level averaging, or None."""
    options = resolve_options(config)
    if options.gradient_averaging != A2SGD:
        return None
    kind = getattr(config, "moe_token_dispatcher_type", None)
    if kind != NAME:
        raise UnsupportedError(
            f"{_WITH} was given, but the dispatcher is {kind!r}, which would ignore it: leave it "
            f"out, or set moe_token_dispatcher_type={NAME!r}"
        )
    return options


def _check(config: Any, ddp_config: Any) -> None:
    """Refuse options with which two-level averaging would be wrong, or was not tested.

    Raises:
        UnsupportedError: names the option, its value, the reason and the remedy.
    """
    sliced = "parameters that all its ranks hold would drift apart, each with different means"
    refused = (
        (
            ddp_config,
            "use_distributed_optimizer",
            (None, False),
            "with it no rank has all gradients",
        ),
        (config, "tensor_model_parallel_size", (None, 1), sliced),
        (config, "expert_tensor_parallel_size", (None, 1), sliced),
        (config, "pipeline_model_parallel_size", (None, 1), "each stage would have its own means"),
        (config, "cuda_graph_impl", (None, "none"), "it was not tested in CUDA graphs"),
    )
    for owner, name, allowed, reason in refused:
        value = getattr(owner, name, None)
        if value not in allowed:
            raise UnsupportedError(
                f"{_WITH} does not support {name}={value!r}: {reason}; set it to {allowed[1]!r}, "
                "or leave gradient_averaging out"
            )


class _Averaging:
    """The state of one DistributedDataParallel, whose methods it replaces."""

    def __init__(self, ddp: Any, resync_interval: int) -> None:
        self.ddp, self.resync_interval = ddp, resync_interval
        self.steps, self.is_new = 0, False
        for group in self._groups():
            for bucket in group.buckets:
                if getattr(bucket, "params_with_extra_main_grads", None):
                    raise UnsupportedError(
                        f"{_WITH} does not support gradients that are accumulated and sent in "
                        "different dtypes: use the same dtype for both"
                    )
                padded = bucket.grad_data.numel() - sum(p.numel() for p in bucket.params)
                if padded:
                    raise UnsupportedError(
                        f"{_WITH} does not support padded gradient buckets, as a distributed or "
                        f"layer-wise optimizer has them: {padded} entries would count as gradients"
                    )
            group.start_grad_sync = functools.partial(self._start, group)
        self._zero = ddp.zero_grad_buffer
        ddp.zero_grad_buffer = self._begin_step

    def _groups(self) -> list[Any]:
        return [*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups]

    def _start(self, group: Any, force_all_reduce: bool | None = False) -> None:
        """Replaces a bucket group's `start_grad_sync`.  Collective over its ranks."""
        if getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None:
            return
        assert group.grad_reduce_handle is None, "its last exchange has not been waited for"
        options = group.ddp_config
        if options.check_for_nan_in_grad or options.check_for_large_grads:
            group.check_grads(options.check_for_nan_in_grad, options.check_for_large_grads)
        # Megatron scales, then adds up; with average_in_collective the mean is scaled.
        ranks = 1 if options.average_in_collective else group.data_parallel_group.size()
        with torch.no_grad():
            pending = PendingAverage(
                [bucket.grad_data for bucket in group.buckets],
                group.data_parallel_group,
                [bucket.gradient_scaling_factor * ranks for bucket in group.buckets],
            )
        if options.overlap_grad_reduce:
            group.grad_reduce_handle = pending
        else:
            pending.wait()
        self.is_new = True

    def _begin_step(self) -> None:
        """Average the weights every `resync_interval` steps, before the next forward pass."""
        if self.is_new:
            self.is_new = False
            self.steps += 1
            if self.resync_interval and self.steps % self.resync_interval == 0:
                for group in self._groups():
                    for bucket in group.buckets:
                        average_weights(bucket.params_list, group.data_parallel_group)
        self._zero()
