"""Many random batches over engines that stay alive, exactly; on GPUs in sizes of a model."""

from __future__ import annotations

import torch
from draws import SAME_EXAMPLES, Round, Sizes, rounds
from hypothesis import Phase, given, settings
from hypothesis import seed as seeded
from random_round import round_on_rank
from run_case import caps_of

from megatron_ncclep.ranks.pool import RankPool

ON_CPU = Sizes(tokens=60, experts=32, hidden=(8, 64), elements=2**16)
ON_GPUS = Sizes(tokens=3000, experts=128, hidden=(128, 4096), elements=2**26)
# Every rank makes all ranks' tensors, and all of them on one GPU.
ON_ONE_GPU = Sizes(tokens=1500, experts=64, hidden=(128, 2048), elements=2**21)
STEPS = 10  # of a round, each with a batch


def test_random_batches_are_the_oracles(
    pool: RankPool,
    engine_name: str,
    backend: str,
    rank_counts: list[int],
    iterations: int,
    seed: int,
) -> None:
    """On a CPU a failing round is shrunk; on GPUs each try may cost a deadline."""
    caps = caps_of(engine_name)
    numbers = [n for n in rank_counts if n >= caps.min_ranks]
    on_gpus = ON_GPUS if numbers[-1] <= torch.cuda.device_count() else ON_ONE_GPU
    sizes = ON_CPU if backend == "gloo" else on_gpus
    num_dropped = 0

    @seeded(seed)
    @settings(
        SAME_EXAMPLES,
        derandomize=False,
        max_examples=max(1, iterations // STEPS),
        phases=[Phase.generate, *[Phase.shrink] * (backend == "gloo")],
        print_blob=False,
    )
    @given(drawn=rounds(caps, sizes, numbers, min(iterations, STEPS)))
    def check(drawn: Round) -> None:
        nonlocal num_dropped
        results = pool.run(round_on_rank, engine_name, drawn, sizes, ranks=drawn.num_ranks)
        num_dropped += sum(dropped for _, dropped in results)
        differences = [difference for difference, _ in results if difference]
        again = f"run it again with --seed {seed} --iterations {iterations} --ranks "
        again += " --ranks ".join(map(str, rank_counts))
        assert not differences, "\n".join([again, *differences])

    check()
    assert num_dropped or iterations < 60 or "max_recv_rows" not in caps.options
