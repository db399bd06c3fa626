"""Many random batches over engines that stay alive, exactly; on GPUs in sizes of a model."""

from __future__ import annotations

import random
from collections import Counter

import torch
from random_round import ON_CPU, ON_GPUS, ON_ONE_GPU, ROUTINGS, round_on_rank, rounds
from run_case import caps_of

from megatron_ncclep.ranks.pool import RankError, RankPool

# So many iterations see every kind of draw.
SEE_EVERYTHING = 60


def test_random_batches_are_the_oracles(
    pool: RankPool,
    engine_name: str,
    backend: str,
    rank_counts: list[int],
    iterations: int,
    seed: int,
) -> None:
    caps = caps_of(engine_name)
    numbers = [n for n in rank_counts if n >= caps.min_ranks]
    on_gpus = ON_GPUS if numbers[-1] <= torch.cuda.device_count() else ON_ONE_GPU
    sizes = ON_CPU if backend == "gloo" else on_gpus
    features: Counter[str] = Counter()
    for round_seed, count in rounds(seed, iterations):
        ranks = random.Random(round_seed).choice(numbers)
        again = f"run it again with --seed {round_seed} --iterations {count} --ranks "
        again += " --ranks ".join(map(str, rank_counts))
        try:
            results = pool.run(round_on_rank, engine_name, round_seed, count, sizes, ranks=ranks)
        except RankError as error:
            raise AssertionError(f"{again}\n{error}") from error
        differences = [difference for difference, _ in results if difference]
        assert not differences, "\n".join([again, *differences])
        features += results[0][1]
    if iterations >= SEE_EVERYTHING:
        wanted = {*ROUTINGS, "a rank without tokens", "with weights", "without weights"}
        wanted |= {"dispatch", "combine"}
        if "max_recv_rows" in caps.options:
            wanted |= {"static", "overflow"}
        assert not wanted - set(+features), f"{iterations} iterations, seed {seed}: {features}"
