"""megatron_ncclep.cpu: what Megatron-Core asks of a GPU works on a CPU, once it was asked for."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankContext
from timeouts import patient

from megatron_ncclep import cpu
from megatron_ncclep.cpu import torch_calls
from megatron_ncclep.cpu.torch_calls import replace
from megatron_ncclep.errors import IntegrationError, UnsupportedError

pytestmark = pytest.mark.each_release


def test_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    stream = torch.cuda.Stream
    with pytest.raises(UnsupportedError, match=r"sees 3 GPU.*--cpu.*CUDA_VISIBLE_DEVICES"):
        cpu.enable()
    assert torch.cuda.Stream is stream
    assert not cpu.enabled()


def test_missing_place_is_named() -> None:
    with pytest.raises(IntegrationError, match=r"torch\.cuda\.no_such_thing does not exist"):
        replace(torch.cuda, no_such_thing=None)


@pytest.mark.ranks(3)
def test_collectives_of_uneven_lengths(ctx: RankContext) -> None:
    cpu.enable()
    lengths = [3, 0, 2]
    own = torch.full((lengths[ctx.rank], 2), float(ctx.rank + 1))
    gathered = [torch.full((n, 2), -1.0) for n in lengths]
    dist.all_gather(gathered, own, group=ctx.group)
    for rank, part in enumerate(gathered):
        assert torch.equal(part, torch.full((lengths[rank], 2), float(rank + 1)))

    # Row i for rank r is worth 10 r + i on every rank, times the sender's rank + 1.
    parts = [(10.0 * r + torch.arange(n)) * (ctx.rank + 1) for r, n in enumerate(lengths)]
    received = torch.empty(lengths[ctx.rank])
    dist.reduce_scatter(received, parts, group=ctx.group)
    senders = 1 + 2 + 3
    expected = (10.0 * ctx.rank + torch.arange(lengths[ctx.rank])) * senders
    assert torch.equal(received, expected)

    with pytest.raises(UnsupportedError, match=r"all_gather.*async_op"):
        dist.all_gather(gathered, own, group=ctx.group, async_op=True)


def gloo_threads() -> int:
    """How many threads of this process move bytes for gloo."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def test_groups_share_one_thread(ctx: RankContext) -> None:
    """Groups of a size come and go, and are in use at the same time; each has its own deadline."""
    cpu.enable()
    first = dist.new_group()
    dist.barrier()  # a rank that leaves while another still connects would fail that one
    dist.destroy_process_group(first)
    before = gloo_threads()
    deadlines = [timedelta(seconds=patient(1) + 60 * n) for n in range(5)]
    groups = [dist.new_group(timeout=deadline) for deadline in deadlines]
    assert gloo_threads() == before  # torch gives each group one of its own
    sums = [torch.full((1000,), float(10**n)) for n in range(5)]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(sums, groups, strict=True)
    ]
    for n, (work, total) in enumerate(zip(works, sums, strict=True)):
        work.wait()
        assert bool((total == ctx.num_ranks * 10**n).all())
    dist.barrier()
    if ctx.rank == 0:
        with pytest.raises(RuntimeError, match=f"{1000 * patient(1):.0f}ms"):  # no rank sends
            dist.recv(torch.zeros(1), src=1, group=groups[0])
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


class LaterOptions:
    __slots__ = ("_devices", "_threads", "_timeout", "enable_reconfigure")


@pytest.mark.parametrize(
    ("further", "named", "options"),
    [
        ((), {}, {}),
        ((9,), {}, {"_timeout": 9}),
        ((), {"timeout": 9, "enable_reconfigure": True},
         {"_timeout": 9, "enable_reconfigure": True}),
        ((), {"timeout": 9, "mood": "good"}, None),
        ((9, True), {}, None),
    ],
)  # fmt: skip
def test_further_arguments_reach_gloo(
    further: tuple[Any, ...], named: dict[str, Any], options: dict[str, Any] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From torch 2.14 on torch passes `enable_reconfigure`, and every CPU command failed.

    Where `options` is None, arguments are not known, and reach gloo as torch wants it.
    """

    class Group:
        """The gloo group of a torch that passes it more than this package knows."""

        _Options = LaterOptions

        def __init__(self, store: str, rank: int, size: int, *further: Any, **named: Any) -> None:
            self.passed = (further, named)
            self.options = LaterOptions()
            self.options._devices, self.options._threads = [object()], 2
            if further and isinstance(further[0], LaterOptions):
                self.options = further[0]

    monkeypatch.setattr(dist, "ProcessGroupGloo", Group)
    torch_calls._share_gloo_device()
    first, second = (Group("store", 0, 1, *further, **named) for _ in range(2))
    assert first.passed == (further, named)
    if options is None:
        assert second.passed == (further, named)
        return
    assert second.passed == ((second.options,), {})
    assert second.options._devices == first.options._devices
    assert {name: getattr(second.options, name) for name in options} == options


def test_tracker_forks_the_cpus_generator(ctx: RankContext) -> None:
    cpu.enable()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("own", 2)
    before = torch.get_rng_state()
    with tracker.fork("own"):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before), "the outer generator was moved"
    with tracker.fork("own"):
        assert not torch.equal(torch.rand(3), inside), "the inner generator was not"
    torch.manual_seed(2)
    assert torch.equal(torch.rand(3), inside)


def test_cuda_graphs_are_refused(ctx: RankContext) -> None:
    """Graphs need a generator for a random state; ours is a tensor, on which Megatron failed."""
    cpu.enable()
    from megatron.core.tensor_parallel import random

    # What the tracker of random states asks for; 0.16.1's own constructor needs a torch with CUDA.
    with pytest.raises(UnsupportedError, match=r"--cuda-graph-impl.*leave them out"):
        random._get_cuda_rng_state(graph_safe=True)


def test_norm_knows_of_sequence_parallelism(ctx: RankContext) -> None:
    cpu.enable()
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    for parallel in (True, False):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=parallel,
        )
        norm = WrappedTorchNorm(config=config, hidden_size=8)
        assert [p.sequence_parallel for p in norm.parameters()] == [parallel, parallel]
        assert config.sequence_parallel is parallel
