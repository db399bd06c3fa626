"""LigerCute in the benchmark: the check accepts right layers only, and what is missing is named.

LigerCute needs GPUs; `Played` computes the same layer with torch on two ranks.  It is not installed
here: the imports above all tests show that nothing needs it at start.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
import torch.nn.functional as F
from rank_pool import RankContext, RankPool
from stand_ins import prepared_on, problem_of

from benchmarks import liger_cute
from benchmarks.catalogue import LIGER_CUTE
from benchmarks.layer_model import results_problem
from megatron_ncclep.benchmark import UnavailableError
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.ranks import Timer
from megatron_ncclep.benchmark.shapes import Workload

HIDDEN, SIZE = 128, 256  # the least that LigerCute's backward takes
CASE = Case("bf16", (20, 20), 8, top_k=3, hidden=HIDDEN, dtype=torch.bfloat16)


class Played:
    """The modules of LigerCute on one rank, with a `fault` of the operator.

    `started`: the groups over which NVSHMEM was started; `configured`: what buffers were made for.
    """

    def __init__(self, fault: str = "none") -> None:
        self.fault = fault
        self.started: list[Any] = []
        self.configured: list[dict[str, int]] = []

    def modules(self) -> dict[str, ModuleType]:
        """What `sys.modules` has where LigerCute is installed."""
        calls = {
            "liger_kernel": {}, "liger_kernel.ops": {}, "liger_kernel.ops.cute": {},
            "liger_kernel.ops.cute.ops": {}, "liger_cute_kernels": {},
            "liger_kernel.ops.cute.ops.moe": {"moe_fused": self.moe_fused},
            "liger_cute_kernels.nvshmem": {
                "init_from_pg": self.started.append, "resolve_team": self.resolve_team,
            },
            "liger_cute_kernels.tvm_ffi": {
                "uniqueid_nbytes": lambda: 128, "pool_clear_all": self.configured.clear,
                "moe_configure_symmetric": lambda **sizes: self.configured.append(sizes),
            },
        }  # fmt: skip
        made = {name: ModuleType(name) for name in calls}
        for name, module in made.items():
            module.__spec__ = ModuleSpec(name, None)
            vars(module).update(calls[name])
        return made

    def resolve_team(self, group: Any) -> int:
        if not self.started:
            raise RuntimeError("cannot map torch process groups to NVSHMEM PEs")
        return 0

    def moe_fused(
        self, x: Any, chosen: Any, w: Any, *weights: torch.Tensor, num_experts: int, top_k: int
    ) -> torch.Tensor:
        """All ranks' tokens through this rank's experts, in fp32; differentiable."""
        (sizes,) = self.configured
        names = ("max_tokens", "hidden_dim", "max_num_experts", "max_top_k")
        assert (*x.shape, num_experts, top_k) == tuple(sizes[name] for name in names)
        assert chosen.dtype == torch.int32
        assert {t.dtype for t in (x, w, *weights)} == {torch.bfloat16}
        assert all(t.is_contiguous() for t in (x, chosen, w, *weights))
        group = self.started[0]
        xs, ws, every = (
            torch.cat(functional.all_gather(t.float(), group=group)) for t in (x, w, chosen)
        )
        gate, up, down = (weight.float() for weight in weights)
        if self.fault == "gate and up swapped":
            gate, up = up, gate
        if self.fault == "no gradient of the weights of assignments":
            ws = ws.detach() + 0 * ws
        if self.fault == "half of a gradient":
            up.register_hook(lambda grad: torch.cat([grad[:1], grad[1:2] / 2, grad[2:]]))
        if self.fault == "a gradient that is off by its roundings":
            # Of K rows, 3, and of parts: a tile of the expert's rows and one more for each rank.
            down.register_hook(lambda grad: grad * (1 + (CASE.top_k + 3 + 0.6) / 256))
        out = torch.zeros_like(xs)
        for local in range(len(gate)):
            token, k = (every == len(gate) * dist.get_rank(group) + local).nonzero(as_tuple=True)
            rows = F.silu(xs[token] @ gate[local].t()) * (xs[token] @ up[local].t())
            out = out.index_add(0, token, rows @ down[local].t() * ws[token, k][:, None])
        home = functional.all_reduce(out, group=group)
        return home[len(x) * dist.get_rank(group) :][: len(x)].to(x.dtype)


def check_on_rank(context: RankContext, fault: str) -> str | None:
    """Prepare the subject with a fault on rank 1, run it as if it were timed, and check it."""
    played = Played(fault if context.rank == 1 else "none")
    with mock.patch.dict(sys.modules, played.modules()):
        prepared = prepared_on(context, LIGER_CUTE, Workload(CASE, context.rank, SIZE))
    problem = problem_of(prepared)
    assert not played.configured  # its buffers are free
    return problem


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("none", None),
        ("a gradient that is off by its roundings", None),
        ("gate and up swapped", "output"),
        ("no gradient of the weights of assignments", "gradient of the probabilities"),
        ("half of a gradient", "gradient of experts."),
    ],
)
def test_right_results_pass_and_wrong_ones_do_not(
    two_ranks: RankPool, fault: str, found: str | None
) -> None:
    problems = two_ranks.run(check_on_rank, fault)
    assert problems == [None, None] if found is None else found in str(problems), problems


def test_nvshmem_starts_once_and_rounds_begin_at_zero(ctx: RankContext) -> None:
    """A second shape needs other buffers of the same NVSHMEM; weights go when a shape ends."""
    played, timer = Played(), Timer(ctx.group, "cpu")
    for hidden in (HIDDEN, 2 * HIDDEN):
        work = Workload(replace(CASE, hidden=hidden), ctx.rank, SIZE)
        with mock.patch.dict(sys.modules, played.modules()):
            prepared = prepared_on(ctx, LIGER_CUTE, work)
        assert [sizes["hidden_dim"] for sizes in played.configured] == [hidden]
        assert [sizes["num_pes"] for sizes in played.configured] == [ctx.num_ranks]

        clock = prepared.clock(timer)
        for _ in range(2):
            clock()
            _, gradients = prepared._expected(work)
            problem = results_problem(work, ctx.rank, prepared._gradients(), gradients(), 1)
            assert problem is None, problem
        packed = weakref.ref(prepared._experts)
        prepared.close()
        gc.collect()
        assert (len(work.shared), packed()) == (0, None)
    (group,) = played.started
    assert dist.get_world_size(group) == ctx.num_ranks


def test_memory_is_that_of_its_own_weights(ctx: RankContext) -> None:
    """The experts that an earlier subject allocated are not LigerCute's; the router is."""
    work = Workload(CASE, ctx.rank, SIZE)
    earlier = prepared_on(ctx, "layer:alltoall", work)
    with mock.patch.dict(sys.modules, Played().modules()):
        prepared = prepared_on(ctx, LIGER_CUTE, work)
    router = earlier._layer.router.weight
    assert prepared.shared_bytes == router.nbytes + router.main_grad.nbytes
    for subject in (prepared, earlier):
        subject.close()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package, or what its shared library needs."""
    with pytest.raises(UnavailableError, match="liger_kernel is not installed: build LigerCute"):
        liger_cute.imported()
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("liger_kernel", ""), ("liger_cute_kernels", "__path__ = []; no_such")):
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UnavailableError, match="NameError: name 'no_such'"):
        liger_cute.imported()


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        (replace(CASE, dtype=torch.float32), SIZE, r"bf16 only, and the shape has torch\.float32"),
        (replace(CASE, tokens=(20, 0)), SIZE, "a rank of the shape has none"),
        (replace(CASE, hidden=2880), 2880, r"a multiple of 128 and one of 256, not \(2880, 2880\)"),
        (CASE, 128, r"not \(128, 128\)"),
    ],
)
def test_shapes_that_it_cannot_compute_are_named(case: Case, size: int, message: str) -> None:
    """With GPT-OSS's sizes, the kernel's forward works and its backward has no tiles."""
    assert re.search(message, str(liger_cute.shape_problem(Workload(case, 0, size))))
    for hidden, ffn in ((2048, 768), (256, 128)):
        assert liger_cute.shape_problem(Workload(replace(CASE, hidden=hidden), 0, ffn)) is None
