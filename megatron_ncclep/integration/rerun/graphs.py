"""A model without its CUDA graphs, for the time of one run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_graphs(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let all layers run what their graphs have captured; the graphs are kept.

    Graphs of whole iterations are outside of the model: the caller runs what they wrap.
    """
    from megatron.core.transformer import cuda_graphs

    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    # Megatron's own graphs (`local`) of a layer, or of one of its methods.
    managers = [(m, type(m)) for m in modules if isinstance(m, cuda_graphs.CudaGraphManager)]
    # TransformerEngine's.
    graphs = [(m, m.cuda_graphs) for m in modules if getattr(m, "cuda_graphs", None)]
    for manager, kind in managers:
        manager.__class__ = type(kind.__name__, (kind,), {"__call__": _run_without_graph})
    for module, _ in graphs:
        module.cuda_graphs = []
    try:
        yield
    finally:
        for manager, kind in managers:
            manager.__class__ = kind
        for module, own in graphs:
            module.cuda_graphs = own


def _run_without_graph(manager: Any, module: Any, args: Any, kwargs: Any, **_: Any) -> Any:
    """Replaces the `__call__` of a CudaGraphManager."""
    if manager.func is not None:
        return manager.func(*args, **kwargs)
    return torch.nn.Module.__call__(module, *args, **kwargs)
