"""The convergence protocol in bf16 and in FP8; docs/convergence.md derives the criterion.

    python tests/convergence/gpu_protocol.py run OUT [--fp8] [--seconds N] [--ranks N --steps N]

trains the arms below on one or two GPUs, one after the other, prints a table, and exits with 0 only
if every arm holds and both mistakes are rejected.  The same command continues with what OUT lacks.
With `--ranks 4 --steps 400` four ranks share the GPUs, and see as much text as one in 1600 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from imports import import_megatron_on_cpu  # noqa: E402
from rank_pool import RankContext, RankError, RankPool  # noqa: E402

from benchmarks.catalogue import known_variant  # noqa: E402
from benchmarks.layer_model import initialize  # noqa: E402
from benchmarks.shapes import TrainingShape  # noqa: E402
from benchmarks.training import curve_problem  # noqa: E402
from benchmarks.training_model import SubjectModel, load_text  # noqa: E402
from megatron_ncclep.benchmark.ranks import Ranks  # noqa: E402
from megatron_ncclep.logs import remarks_hidden  # noqa: E402
from megatron_ncclep.ranks import topology  # noqa: E402
from megatron_ncclep.training import corpus, data  # noqa: E402

SEEDS = (1, 2, 3)
# Student's t with two degrees of freedom, those of three pairs: 95 % of it is below.
T_95 = 2.920
# Two results differ by less than this many of their standard deviations in 95 of 100 cases.
REPEATABILITY = 1.96 * math.sqrt(2)
HOLDS, FAILS, NOT_SHOWN, NOT_RUN = "holds", "FAILS", "not shown", "NOT RUN"


class Arm(NamedTuple):
    """One way to train: a subject of benchmarks/, perhaps with a mistake, which must fail."""

    name: str
    subject: str
    mistake: str = ""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of weights and of the order of the text."""
        return SEEDS[:1] if self.mistake else SEEDS

    @property
    def is_control(self) -> bool:
        """Whether the others are compared with it."""
        return self.name == CONTROL.name


CONTROL = Arm("alltoall", "train:alltoall")
SWAPPED, ZEROED = "swapped weights", "zeroed rows"


def arms(name: str, subject: str, control: str = CONTROL.subject) -> tuple[Arm, ...]:
    """The control, and a subject without and with each mistake."""
    mistakes = [Arm(f"mistake: {each}", subject, each) for each in (SWAPPED, ZEROED)]
    return Arm(CONTROL.name, control), Arm(name, subject), *mistakes


SMALL = arms("reference", "train:ncclep:reference")
GRAPHED = "native, grouped experts, CUDA graphs"
FP8 = arms(GRAPHED, "train:ncclep:native:grouped:fp8:full_iteration", f"{CONTROL.subject}:fp8")
GPU = (
    *arms(GRAPHED, "train:ncclep:native:grouped:full_iteration"),
    Arm("native", "train:ncclep:native"),
    Arm("nccl_ep", "train:ncclep:nccl_ep"),  # takes two ranks
)
# The exact protocol's model, changed to one with which roundings part two trainings on a CPU too.
SMALL_CHANGES = {"num-layers": 1, "train-iters": 20, "bf16": True, "lr": 0.015, "min-lr": 0.0015}
# (arm, seed) -> what `train` returned.
Trained = dict[tuple[str, int], dict[str, Any]]


def in_order(arms: tuple[Arm, ...]) -> list[tuple[Arm, int]]:
    """All trainings; those of `arms()` come first: a short run shows that mistakes are rejected."""
    first, rest = arms[:4], arms[4:]
    return [(a, seed) for part in (first, rest) for seed in SEEDS for a in part if seed in a.seeds]


def plant(mistake: str, dispatcher: Any) -> None:
    """Put a mistake into a dispatcher, or none.

    `SWAPPED`: each of a token's experts gets the weight of another one of them.  `ZEROED`: every
    1000th row is lost on its way to the experts, and its gradient on the way back.
    """
    preprocess, postprocess = dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess

    def before(*args: Any) -> Any:
        hidden_states, weights = preprocess(*args)
        return hidden_states, weights.flip(1) if mistake == SWAPPED else weights

    def after(*args: Any) -> Any:
        rows, counts, weights = postprocess(*args)
        if mistake == ZEROED:
            kept = torch.arange(len(rows), device=rows.device) % 1000 != 500
            rows = rows * kept[:, None].to(rows.dtype)
        return rows, counts, weights

    if mistake:
        dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess = before, after


@remarks_hidden()
def train(
    context: RankContext, steps: int | None, arm: Arm, seed: int, out: Path
) -> dict[str, Any]:
    """Train an arm with one seed.  Collective.

    Args:
        context: this rank.
        steps: of the large model; None: the small one.
        arm, seed: what is trained.
        out: folder for the text, and for how the control starts.

    Returns:
        dict: `problem`: how the first MoE layer differs from the control's before the first step,
        "" if it does not; `validated`: losses after 50, 60, ... 100 % of the steps, in nats per
        token, and none if there is a problem; `entropy` of the text's letters.
    """
    model_file, changes = "model.yaml", SMALL_CHANGES
    if steps is not None:
        model_file, changes = "gpu_model.yaml", {"train-iters": steps}
    shape = TrainingShape(arm.name, str(HERE / model_file), {**changes, "seed": seed})
    settings = shape.settings(context.num_ranks)
    num_steps, count = settings["train-iters"], settings["eval-iters"]
    ranks = Ranks(context, 60.0, arm.name)
    try:
        ranks.deadline()
        initialize(ranks.setting)
        text = load_text(settings, ranks, out / "text", num_steps)
        # The same questions for all arms and seeds.
        _, dataset = data.build_datasets(out / "text", settings, 1, count, 0)
        where = ranks.rank, ranks.num_ranks, torch.device(ranks.setting.device)
        validation = [b for s in range(count) for b in data.batches(dataset, settings, s, *where)]
        subject = known_variant(arm.subject)
        model = SubjectModel(subject, settings, ranks.setting, text, "worst")
        for module in model.gpt.modules():
            if hasattr(module, "token_dispatcher"):
                plant(arm.mistake, module.token_dispatcher)
        scheduler = model.scheduler()
        start, start_path = model.first_steps(0, ranks.deadline), out / f"{seed}-{ranks.rank}.pt"
        if arm.is_control:
            torch.save(start, start_path)
        control = torch.load(start_path, weights_only=False)
        problem = curve_problem(start, control, settings["moe-router-topk"])
        problem = next(filter(None, ranks.gather(problem)), "")
        validated = []
        for step in range(1, 1 if problem else num_steps + 1):
            model.step()
            scheduler.step(increment=settings["global-batch-size"])
            ranks.deadline()
            if step * 10 % num_steps == 0 and step * 2 >= num_steps:
                validated.append(float(model.validate(validation).double().mean()))
        of_ranks = zip(*ranks.gather(validated), strict=True)
        found = {
            "validated": [statistics.fmean(each) for each in of_ranks],
            "problem": problem,
            "entropy": corpus.load(out / "text").unigram_entropy,
        }
        del scheduler  # it holds the optimizer
        model.close()
        ranks.close()
        return found
    finally:
        ranks.stop()


def judge(arm: Arm, trained: Trained) -> tuple[str, str]:
    """Say whether an arm holds, and why."""
    own = {seed: trained[arm.name, seed] for seed in arm.seeds if (arm.name, seed) in trained}
    for seed, training in own.items():
        if problem := training["problem"]:
            return FAILS, f"seed {seed}, before the first step: {problem}"
        if not all(map(math.isfinite, training["validated"])):
            return FAILS, f"seed {seed}: a loss is not finite"
        if arm.is_control and training["validated"][-1] >= training["entropy"]:
            return FAILS, f"seed {seed} learnt no more than the frequencies of letters"
    needed = [*((arm.name, seed) for seed in arm.seeds), *((CONTROL.name, seed) for seed in SEEDS)]
    if missing := [f"{name}, seed {seed}" for name, seed in needed if (name, seed) not in trained]:
        return NOT_RUN, "; ".join(dict.fromkeys(missing))
    learnt = {key: statistics.fmean(trained[key]["validated"]) for key in needed}
    margin = REPEATABILITY * statistics.stdev(learnt[CONTROL.name, seed] for seed in SEEDS)
    effects = [learnt[arm.name, seed] - learnt[CONTROL.name, seed] for seed in arm.seeds]
    effect, half_width = statistics.fmean(effects), math.inf
    if len(effects) == len(SEEDS):
        half_width = T_95 * statistics.stdev(effects) / math.sqrt(len(effects))
    reason = f"{effect:+.5f} ± {half_width:.5f} nats, ± {margin:.5f} allowed"
    if abs(effect) >= margin:
        return FAILS, reason
    return HOLDS if abs(effect) + half_width < margin else NOT_SHOWN, reason


def report(arms: tuple[Arm, ...], trained: Trained) -> tuple[bool, str]:
    """Judge all arms: whether the protocol holds, and the table that says so."""
    lines, holds = ["| arm | verdict | because |", "|---|---|---|"], True
    for arm in arms:
        status, reason = judge(arm, trained)
        holds &= status == (FAILS if arm.mistake else HOLDS)
        lines.append(f"| {arm.name} | {status} | {reason} |")
    return holds, "\n".join([*lines, "", f"The protocol {'holds' if holds else 'DOES NOT HOLD'}."])


def run(
    arms: tuple[Arm, ...], pool: RankPool, steps: int | None, seconds: float, out: Path
) -> Trained:
    """Train what OUT lacks of the arms, as far as the time goes; `steps` as in `train`."""
    end, log = time.monotonic() + seconds, out / "trained.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    lines = map(json.loads, log.read_text().splitlines() if log.is_file() else [])
    trained: Trained = {(line["arm"], line["seed"]): line for line in lines}
    for arm, seed in in_order(arms):
        left = end - time.monotonic()
        if (arm.name, seed) in trained or left < 1:
            continue
        print(f"{arm.name}, seed {seed}", flush=True)
        try:
            found = pool.run(train, steps, arm, seed, out, timeout=left)[0]
        except RankError as error:
            print(error, flush=True)  # the table says that it is missing
            continue
        trained[arm.name, seed] = {"arm": arm.name, "seed": seed, **found}
        with log.open("a") as file:
            file.write(json.dumps(trained[arm.name, seed]) + "\n")
    return trained


def main(argv: list[str]) -> int:
    """Run the command; the exit status is 0 if the protocol holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("run",))
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for what was trained")
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument(
        "--fp8", action="store_true", help="all linear layers in FP8, blockwise, of every arm"
    )
    parser.add_argument("--seconds", type=float, default=1e6, help="train for so long at most")
    parser.add_argument("--ranks", type=int, help="default: as many as GPUs, at most 2")
    parser.add_argument("--steps", type=int, default=1000, help="a multiple of 10 (default: 1000)")
    args = parser.parse_args(argv)
    # Otherwise TransformerEngine's attention differs from run to run; and multicast, which nothing
    # here needs, does not work on every machine.
    os.environ.update(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0", NCCL_NVLS_ENABLE="0")
    ranks = args.ranks or min(2, torch.cuda.device_count())
    if not (args.small or torch.cuda.is_available()):
        parser.error("no GPU here: --small trains a tiny model on a CPU")
    if args.small and (args.ranks or args.steps != parser.get_default("steps")):
        parser.error("--small has its own ranks and steps: leave out --ranks and --steps")
    if args.small and args.fp8:
        parser.error("--fp8 needs a GPU: leave out --small")
    if args.steps < 10 or args.steps % 10:
        parser.error(f"--steps {args.steps}: must be a multiple of 10")
    if ranks > torch.cuda.device_count():
        os.environ[topology.ENABLE] = "1"
    pool = RankPool(2, prepare=import_megatron_on_cpu) if args.small else RankPool(ranks, "nccl")
    arms = SMALL if args.small else FP8 if args.fp8 else GPU if ranks > 1 else GPU[:-1]
    with closing(pool):
        trained = run(arms, pool, None if args.small else args.steps, args.seconds, args.out)
    holds, table = report(arms, trained)
    print(table)
    if arms == GPU[:-1]:
        print("Left out: nccl_ep, which takes two ranks")
    return 0 if holds else 1


if __name__ == "__main__":
    import gpu_protocol  # ranks find `train` by the module's name

    sys.exit(gpu_protocol.main(sys.argv[1:]))
