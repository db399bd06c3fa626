"""When grouped experts quantise their weights: once a step, and whenever a change may be unseen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ncclep.integration.experts.fp8_weights import StepWeights

NO_GRAPH = {"cuda_graph_impl": "none", "disable_parameter_transpose_cache": False}


class Products:
    """In place of `Fp8Products`: "quantises" to a copy, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def quantize_weights(self, weights: Sequence[Tensor]) -> Any:
        self.count += 1
        return [weight.detach().clone() for weight in weights]


class Layer:
    """Two experts' weights, and the linears that hold them."""

    def __init__(self, flags: int = 2) -> None:
        self.fc1, self.fc2 = ([nn.Parameter(torch.randn(3, 4)) for _ in "ab"] for _ in "12")
        self.linears: list[Any] = [SimpleNamespace(is_first_microbatch=True) for _ in range(flags)]
        self.linears += [SimpleNamespace() for _ in range(2 - flags)]
        self.products, self.weights = Products(), StepWeights()
        self.config = SimpleNamespace(**NO_GRAPH)

    def run(self, is_training: bool = True) -> int:
        """A pass: how many matrices were quantised; what comes out is up to date."""
        before, state = self.products.count, (self.config, is_training)
        products: Any = self.products
        pair: Any = self.weights.of(self.fc1, self.fc2, self.linears, products, *state)
        for found, weights in zip(pair, (self.fc1, self.fc2), strict=True):
            assert all(map(torch.equal, found, weights))
        return self.products.count - before

    def begin_step(self) -> None:
        """As Megatron's schedules do: `set_is_first_microbatch`."""
        for linear in self.linears:
            linear.is_first_microbatch = True


def test_once_a_step() -> None:
    layer = Layer()
    assert [layer.run() for _ in range(3)] == [2, 0, 0]
    assert not any(linear.is_first_microbatch for linear in layer.linears)
    layer.begin_step()
    # As the distributed optimizer does: through its buffer, unseen in the parameter.
    for weight in (*layer.fc1, *layer.fc2):
        version = weight._version
        weight.data.add_(1)
        assert weight._version == version
    assert [layer.run() for _ in range(3)] == [2, 0, 0]


@pytest.mark.parametrize("change", ["in place", "other memory", "other parameter"])
def test_changes_that_show(change: str) -> None:
    layer = Layer()
    layer.run()
    weight = layer.fc2[1]
    with torch.no_grad():
        if change == "in place":
            weight.copy_(torch.ones(3, 4))  # as load_state_dict does
        elif change == "other memory":
            weight.data = torch.ones(3, 4)
        else:
            layer.fc2[1] = nn.Parameter(torch.ones(3, 4))
    assert [layer.run(), layer.run()] == [2, 0]


@pytest.mark.parametrize("case", ["evaluation", "no cache", "no flag", "inference"])
def test_where_no_one_tells(case: str) -> None:
    """Each pass quantises; flags stay, so that the next training step begins with it."""
    layer = Layer(flags=1 if case == "no flag" else 2)
    layer.config.disable_parameter_transpose_cache = case == "no cache"
    if case == "inference":
        with torch.inference_mode():
            layer.fc1[0] = nn.Parameter(torch.randn(3, 4))
    for _ in range(2):
        layer.fc2[0].data.add_(1)
        assert layer.run(is_training=case != "evaluation") == 2
    if case == "evaluation":  # between two steps: what was made before it is not taken again
        layer.run()
        layer.fc2[0].data.add_(1)
        assert layer.run(is_training=False) == 2
        assert layer.run() == 2
    else:
        assert layer.linears[0].is_first_microbatch


def test_another_recipe() -> None:
    layer = Layer()
    layer.run()
    layer.products = Products()
    assert [layer.run(), layer.run()] == [2, 0]


@pytest.mark.parametrize("of", ["layer", "iteration"])
def test_graphs(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a layer holds the quantisation; one of iterations holds that of its first
    micro-batch, and what was made in it is for it alone.
    """
    layer = Layer()
    layer.config.cuda_graph_impl = "full_iteration" if of == "iteration" else "transformer_engine"
    captures = [True]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    captures[0] = False
    assert layer.run() == 2  # warm-up
    captures[0] = True
    later = 0 if of == "iteration" else 2
    assert [layer.run() for _ in range(3)] == [2, later, later]  # without a new step, too
    with torch.no_grad():  # a graph of an evaluation, which Megatron does not begin a step for
        assert layer.run() == 2
    captures[0] = False
    assert [layer.run(), layer.run()] == [2, 0]


def test_copies_quantise_their_own() -> None:
    layer = Layer()
    layer.run()
    other = copy.deepcopy(layer.weights)
    assert other._made is None
