"""Metrics for Megatron's TensorBoard and W&B writers, written with its own MoE metrics.

`HOOKS` in hooks.py lists which module each function changes.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from megatron_ncclep.integration.patching import replaces

_PARAMETERS = ["iteration", "writer", "wandb_writer", "pg_collection"]
PREFIX = "ncclep/"


def change_track(module: Any) -> None:
    """Until 0.17: `track_moe_metrics`, which every rank calls once per step."""
    if not hasattr(module, "get_moe_metrics_tracker"):  # it has moe_logging, see `change_report`
        replaces("track_moe_metrics", _PARAMETERS)(_with_ours)(module)


def _with_ours(original: Any) -> Any:
    signature = inspect.signature(original)

    def report(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        _write(given["iteration"], given.get("writer"), given.get("wandb_writer"))
        return result

    return report


# From 0.18 on: every rank calls it once per step.
change_report = replaces("MoEMetricsTracker.report", _PARAMETERS)(_with_ours)


def _write(iteration: int, writer: Any, wandb_writer: Any) -> None:
    """Write the metrics known so far; only one rank has writers, but all take part."""
    if "megatron_ncclep.metrics" not in sys.modules:  # no layer has our metrics
        return
    from megatron_ncclep import metrics

    for interval in metrics.after_step():
        values = {PREFIX + name: value for name, value in interval.scalars().items()}
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)
        if wandb_writer is not None:
            wandb_writer.log(values, iteration)
