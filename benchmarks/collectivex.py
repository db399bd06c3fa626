"""An adapter for CollectiveX, a public benchmark of expert-parallel libraries: its `EPBackend`.

CollectiveX is experimental/CollectiveX in github.com/SemiAnalysisAI/InferenceX; this is for commit
843c625.  Its own driver, inputs, oracle and clock measure an engine of this package:

    PYTHONPATH=CollectiveX/bench torchrun --nproc-per-node 4 -m benchmarks.collectivex \\
        --phase prefill --out runs/collectivex.json

Copied to bench/ep_megatron_ncclep.py and named in run_ep.py, it is one backend among the others.
The engine and its options are those of NCCLEP_* variables.

In mode "normal" a dispatch is a plan and its dispatch, because dispatch there includes the layout.
An engine delivers one row for each assignment, more than a receive layout of "token-rank" asks for:
for the oracle a token's rows on a rank, which must be equal, count as one.  Mode "low-latency" has
one row for each token and rank.  Both add up rows without weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ep_harness
import routing
import torch
import torch.distributed as dist
from ep_backend import EPBackend

import megatron_ncclep
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.errors import InputError

LOW_LATENCY = "low-latency"
BFLOAT16 = "bf16"


class NcclEpBackend(EPBackend):
    """See `EPBackend`.  Making one is collective, as most of its methods are."""

    name = "megatron-ncclep"
    maturity = "candidate"  # vLLM selects it only where this package is installed
    SUPPORTED_MODES = ("normal", LOW_LATENCY)
    SUPPORTED_PRECISIONS = (BFLOAT16,)
    receive_layout = "token-rank"
    combine_weight_semantics = "unweighted-rank-sum"

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: Any) -> None:
        super().__init__(args, rank, world_size, local_rank, device)
        world = dist.group.WORLD
        assert world is not None  # run_ep.py makes it first
        self._engine = megatron_ncclep.create_engine(world, args.experts)
        self._first_expert = rank * (args.experts // world_size)
        # An object of low-latency mode alternates between dispatch and combine.
        self.requires_fresh_pair = self.mode == LOW_LATENCY
        self.kernel_generation = f"{self._engine.caps.name}-{self.mode}"
        self.library_version = megatron_ncclep.__version__

    def buffer_cap(self, args: Any) -> int | None:
        """See the base class."""
        caps = self._engine.caps
        return caps.low_latency_tokens if self.mode == LOW_LATENCY else caps.max_tokens

    def create_buffer(self, spec: Any) -> None:
        """See the base class; only low-latency mode has a size."""
        if self.mode == LOW_LATENCY:
            self._pair = create_low_latency(
                self._engine, max_tokens=spec.max_tokens_per_rank, hidden=self.args.hidden,
                top_k=self.args.topk, dtype=torch.bfloat16,
            )  # fmt: skip

    def dispatch(self, problem: Any) -> Any:
        """See the base class."""
        x, topk_idx, weights = problem.dispatch_x, problem.topk_idx, problem.topk_weights
        if self.mode == LOW_LATENCY:
            received = self._pair.dispatch(x, topk_idx, weights)
            return SimpleNamespace(received=received, rows=received.rows)
        plan = self._engine.plan(topk_idx)
        rows, row_weights = self._engine.dispatch(plan, x, weights)
        return SimpleNamespace(plan=plan, rows=rows, weights=row_weights)

    def stage(self, problem: Any, handle: Any) -> None:
        """See the base class; the rows are combined as they came."""
        handle.combine_input = handle.rows

    def combine(self, problem: Any, handle: Any) -> torch.Tensor:
        """See the base class."""
        if self.mode == LOW_LATENCY:
            return self._pair.combine(handle.combine_input)
        return self._engine.combine(handle.plan, handle.combine_input)[0]

    def recv_tokens(self, handle: Any) -> int:
        """See the base class."""
        if self.mode == LOW_LATENCY:
            return int(handle.received.counts.sum())
        return len(self._by_token(handle)[2])

    def inspect_dispatch(self, problem: Any, handle: Any) -> Any:
        """See the base class: payload [n, H], and expert_ids and weights [n, K], of n tokens.

        Sets `handle.places`: where among `handle.rows` each token has one.

        Raises:
            ValueError: a token's rows differ.
        """
        if self.mode == LOW_LATENCY:
            got = handle.received
            max_tokens = got.rows.shape[1]
            here = torch.arange(max_tokens, device=got.rows.device) < got.counts[:, None]
            handle.places = here.nonzero(as_tuple=True)
            local, weights = got.topk_idx[here].long(), got.weights[here]
            payload = got.rows[here]
        else:
            place, token, local, weights = self._by_token(handle)
            handle.places = place.new_empty(len(local))
            handle.places[token] = place  # any of a token's rows
            payload = handle.rows[handle.places]
            if not torch.equal(payload[token], handle.rows[place]):
                raise ValueError("rows of one token differ")
        is_valid = local >= 0
        return SimpleNamespace(
            payload=payload,
            expert_ids=torch.where(is_valid, local + self._first_expert, local),
            weights=weights.masked_fill(~is_valid, 0),
            local_expert_counts=torch.bincount(
                local[is_valid], minlength=self._engine.num_local_experts
            ),
        )

    def _by_token(self, handle: Any) -> tuple[torch.Tensor, ...]:
        """Which rows of a plan belong to each of n tokens.

        Returns:
            the places of rows that are not padding, [N]; their tokens, [N]; and local experts (-1:
            none) and weights, [n, K].
        """
        plan = handle.plan
        # Blocks of experts begin with their rows, and may end with padding.
        routed, padded = plan.routed_per_expert, plan.tokens_per_expert
        expert = torch.arange(len(padded), device=padded.device).repeat_interleave(padded)
        number = torch.arange(len(expert), device=padded.device)
        place = number[number - (padded.cumsum(0) - padded)[expert] < routed[expert]]
        source = routing.decode_source_ids(handle.rows[place], self.args.seed)
        tokens, of_row = source.unique(return_inverse=True)
        order = of_row.argsort(stable=True)
        count = of_row.bincount(minlength=len(tokens))
        begin = count.cumsum(0) - count
        at = (of_row[order], number[: len(order)] - begin[of_row[order]])
        local = torch.full((len(tokens), self.args.topk), -1, device=place.device)
        local[at] = expert[place[order]]
        weights = torch.zeros(local.shape, device=place.device)
        weights[at] = handle.weights[place[order]]
        return place, of_row, local, weights

    def combine_transformed(
        self, problem: Any, handle: Any, transformed: torch.Tensor
    ) -> torch.Tensor:
        """See the base class: a token's result goes to one of its rows, zeros to the others."""
        handle.combine_input = torch.zeros_like(handle.rows)
        handle.combine_input[handle.places] = transformed.to(handle.rows.dtype)
        return self.combine(problem, handle)

    def finalize(self, rc: int) -> int:
        """See the base class.  Raises what the device has found."""
        megatron_ncclep.check()
        megatron_ncclep.close()
        closed: int = super().finalize(rc)
        return closed


def arguments(
    bench: Path, mode: str, phase: str, runner: str, out: str, num_ranks: int
) -> list[str]:
    """What run_ep.py takes, for one host, with the sizes and timing of CollectiveX's sweep.json.

    Args:
        bench: the folder of run_ep.py.
        runner: name of the machine, for the result.
    """
    sweep = json.loads((bench.parent / "configs" / "sweep.json").read_text())
    workload, timing = sweep["workload"], sweep["timing"]
    case: dict[str, Any] = {
        "backend": NcclEpBackend.name, "workload": workload["name"], "mode": mode, "phase": phase,
        "ep": num_ranks, "routing": sweep["routing"], "precision": BFLOAT16,
    }  # fmt: skip
    given = {
        "backend": "nccl-ep",  # for which `main` puts ours
        "mode": mode, "phase": phase, "precision": BFLOAT16, "routing": sweep["routing"],
        "tokens-ladder": " ".join(map(str, workload["token_ladders"][phase])),
        "hidden": workload["hidden"], "topk": workload["topk"],
        "experts": workload["routed_experts"], "seed": workload["seed"],
        "case-id": ep_harness.case_id(runner, case), "suite": sweep["suite"],
        "workload-name": workload["name"], "version": sweep["version"],
        "warmup": timing["warmup_iters_per_trial"], "iters": timing["iters_per_trial"],
        "trials": timing["trials_per_point"], "chain-iters": timing["chain_iters_per_trial"],
        "chain-trials": timing["chain_trials_per_point"], "chain-drop": timing["chain_drop"],
        "runner": runner, "topology-class": f"{runner}-{num_ranks}", "transport": "nvlink",
        "scope": "scale-up", "scale-up-transport": "nvlink", "scale-out-transport": "",
        "gpus-per-node": num_ranks, "scale-up-domain": num_ranks, "out": out,
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank of torchrun's: let CollectiveX's run_ep.py measure this backend.

    Raises:
        InputError: the ranks are on several hosts, whose links only CollectiveX's launchers know.
    """
    import run_ep

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=NcclEpBackend.SUPPORTED_MODES, default="normal")
    parser.add_argument("--phase", choices=("decode", "prefill"), required=True)
    parser.add_argument("--runner", default="local", help="the machine's name")
    parser.add_argument("--out", required=True, help="file of the result")
    args, more = parser.parse_known_args(argv)  # more: of run_ep.py's, which win
    num_ranks = int(os.environ["WORLD_SIZE"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) != num_ranks:
        raise InputError("ranks on several hosts: use CollectiveX's launchers and sweep.json")
    bench = Path(run_ep.__file__).parent
    words = arguments(bench, args.mode, args.phase, args.runner, args.out, num_ranks)
    sys.argv = [run_ep.__file__, *words, *more]
    sys.modules["ep_nccl"] = SimpleNamespace(NCCLEPBackend=NcclEpBackend)  # type: ignore[assignment]
    status: int = run_ep.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
