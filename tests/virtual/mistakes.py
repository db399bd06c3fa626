"""Mistakes in the order of memory accesses, planted in the kernels: does a GPU show them?

python tests/virtual/mistakes.py build FOLDER [NAME ...]     needs nvcc and setuptools, no GPU
python tests/virtual/mistakes.py run FOLDER [SECONDS]        needs one GPU

`build` makes an extension for each mistake, and one without any; only what a mistake changes is
compiled again.  `run` gives each of them SECONDS (default 20) of random rounds on four virtual
ranks, and prints what was noticed.  A mistake that this GPU forgives is not noticed: that says
something of the GPU, or of the rounds, and nothing of the mistake.  The exit status is 0 when the
extension without a mistake is right and the mistake that no GPU forgives (`control`) is noticed.

Between rounds, which take most of their time to compare, one plan is dispatched and combined again
and again with rows that are one more each time: what is read too early is the last turn's, or that
of two turns ago.

The emulation of tests/native notices three of them, by a model of what others see; here the memory
is real.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.ranks.pool import RankContext

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
RIGHT = "without"
NUM_RANKS, ITERATIONS = 4, 10
# Of what is done again and again.
TURNS, TOKENS, TOP_K, HIDDEN = 500, 1024, 8, 1024
SECONDS = 20.0
# A mistake may be a rank that waits for ever.
DEADLINE_S, START_S = 10.0, 240.0


@dataclass(frozen=True)
class Mistake:
    """A change of one place in csrc/.

    Attributes:
        name: of the folder with its extension.
        file: below csrc/.
        right, wrong: text that is there once, and what takes its place.
    """

    name: str
    file: str
    right: str
    wrong: str

    def source(self) -> str:
        text = (SOURCES / self.file).read_text()
        assert text.count(self.right) == 1, f"{self.name}: {self.file} has changed"
        return text.replace(self.right, self.wrong)


MISTAKES = [
    # Sums are made of parts that have not come: whatever the memory does.
    Mistake(
        "control",
        "native/wait.cuh",
        "return wait_until(me, phase, peer, epoch, [&] { return load_acquire(word) >= epoch; });",
        "return true;",
    ),
    Mistake(
        "staged-without-fence",
        "native/dispatch.cu",
        "__threadfence_system();  // for what all warps of the CTA wrote",
        "",
    ),
    Mistake(
        "phase-without-fence",
        "native/dispatch.cu",
        "fence_system();  // passes on what the other CTAs' fences have shown to this thread",
        "",
    ),
    Mistake(
        "wait-without-acquire",
        "native/wait.cuh",
        "return load_acquire(word) >= epoch;",
        "return load_relaxed(word) >= epoch;",
    ),
    Mistake("books-without-fence", "native/pairs.cuh", "    fence_system();\n", ""),
    Mistake("counts-without-fence", "native/pairs.cuh", "  if (completes) fence_system();\n", ""),
    Mistake("stores-without-release", "common/order.cuh", "st.release.sys", "st.relaxed.sys"),
]


# --- build ---------------------------------------------------------------------------------------


def build(folder: Path, names: list[str]) -> None:
    """Make the extensions; without names: all of them."""
    from virtual_pool import cuda_headers

    headers = cuda_headers()
    assert headers is not None, "a CUDA toolkit is needed: set CUDA_HOME"
    folder.mkdir(parents=True, exist_ok=True)
    objects = folder / "objects"
    command = [sys.executable, "setup.py", "build_ext", "--build-temp", objects]
    environment = {**os.environ, "CUDA_HOME": str(headers.parent), "NCCLEP_BUILD_EXTENSION": "1"}
    subprocess.run([*command, "--build-lib", folder / RIGHT], cwd=ROOT, env=environment, check=True)
    wanted = [mistake for mistake in MISTAKES if not names or mistake.name in names]
    # What setup.py says for kernels, of sources in another place.
    nvcc = [headers.parent / "bin" / "nvcc", "-c", "-O3", "-std=c++17"]
    nvcc += ["--compiler-options", "-fPIC,-fvisibility=hidden"]
    nvcc += ["-gencode", "arch=compute_90a,code=sm_90a"]
    jobs: list[list[object]] = []
    links: list[list[object]] = []
    for mistake in wanted:
        tree = folder / mistake.name / "csrc"
        shutil.copytree(SOURCES, tree, dirs_exist_ok=True)
        (tree / mistake.file).write_text(mistake.source())
        linked: list[object] = []
        changed = kernels_with(mistake.file)
        for there in sorted(objects.rglob("*.o")):
            source = there.relative_to(objects / "csrc").with_suffix("")
            if source.as_posix() in changed:
                here = folder / mistake.name / f"{source.stem}.o"
                jobs.append([*nvcc, "-I", tree, tree / source, "-o", here])
                linked.append(here)
            else:
                linked.append(there)
        libraries = [f"-L{headers.parent / lib}" for lib in ("lib64", "lib")]
        libraries += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        to = folder / mistake.name / "_C.so"
        links.append(["g++", "-shared", *linked, *libraries, "-o", to])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for commands in (jobs, links):
            list(pool.map(lambda words: subprocess.run(words, check=True), commands))
    print(
        f"built {', '.join(mistake.name for mistake in wanted)}: {len(jobs)} files compiled again"
    )


def kernels_with(changed: str) -> set[str]:
    """The kernels' sources, below csrc/, that are or include the file `changed`."""

    def includes(file: str) -> set[str]:
        found = re.findall(r'^#include "(.*)"', (SOURCES / file).read_text(), re.MULTILINE)
        return {file}.union(*(includes(other) for other in found))

    kernels = (path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu"))
    return {kernel for kernel in kernels if changed in includes(kernel)}


# --- run -----------------------------------------------------------------------------------------


def use_extension(path: Path) -> None:
    """Have this process use another `megatron_ncclep._C` than the package's own."""
    import megatron_ncclep

    spec = importlib.util.spec_from_file_location("megatron_ncclep._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["megatron_ncclep._C"] = module
    megatron_ncclep._C = module


def rounds_on_rank(ctx: RankContext, seconds: float) -> tuple[str, int]:
    """Random rounds until one is wrong or the time is over: what was wrong, and their number."""
    from random_round import ON_ONE_GPU, round_on_rank

    start, seed = time.monotonic(), 0
    while True:
        try:
            difference, _ = round_on_rank(ctx, "native", seed, ITERATIONS, ON_ONE_GPU, DEADLINE_S)
        except Exception as error:  # the other ranks would wait for this one
            tell(f"WRONG {type(error).__name__}: {error}")
        difference = difference or hammer(ctx, seed)
        seed += 1
        is_over = torch.tensor([bool(difference), time.monotonic() - start > seconds]).int()
        dist.all_reduce(is_over, dist.ReduceOp.MAX, group=ctx.group)
        if bool(is_over.any()):
            return difference, seed


def hammer(ctx: RankContext, seed: int) -> str:
    """Move the same rows, one more each time; say in how many turns they came wrong."""
    device, num_experts = ctx.device, 8 * ctx.num_ranks
    generator = torch.Generator(device).manual_seed(seed * ctx.num_ranks + ctx.rank)
    score = torch.rand(TOKENS, num_experts, generator=generator, device=device)
    config = EpConfig(engine="native", timeout_s=DEADLINE_S)
    with closing(create_engine(ctx.group, num_experts, config)) as engine:
        plan = engine.plan(score.topk(TOP_K).indices)
        # Whole numbers, so that sums are exact.
        x = torch.randint(0, 999, (TOKENS, HIDDEN), generator=generator, device=device).float()
        first = engine.dispatch(plan, x)[0]
        total = engine.combine(plan, first)[0]
        wrong = torch.zeros(2, dtype=torch.int64, device=device)
        for turn in range(1, TURNS + 1):
            rows = engine.dispatch(plan, x + turn)[0]
            out = engine.combine(plan, first + turn)[0]
            wrong[0] += (rows != first + turn).any()
            wrong[1] += (out != total + TOP_K * turn).any()
        in_dispatch, in_combine = wrong.tolist()
    if not in_dispatch + in_combine:
        return ""
    return f"of {TURNS} turns {in_dispatch} wrong in dispatch, {in_combine} in combine"


def run_one(extension: Path, seconds: float) -> None:
    """The process of one extension; its last line says what came of it."""
    from virtual_pool import compile_stand_in
    from virtual_ranks import Host

    use_extension(extension)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libvirtual_nccl.so"
        compile_stand_in(library)
        results = Host(NUM_RANKS, "cuda", library).run(rounds_on_rank, seconds)
    told = next((difference for difference, _ in results if difference), "")
    num_rounds = results[0][1]
    did = f"{num_rounds * ITERATIONS} batches, {num_rounds * TURNS} turns"
    tell(f"WRONG {told}" if told else f"RIGHT {did}")


def tell(verdict: str) -> NoReturn:
    """Print the last line and end, whatever threads and kernels still do."""
    print(" ".join(verdict.split()), flush=True)
    os._exit(0)


def run(folder: Path, seconds: float) -> int:
    from virtual_ranks import ENVIRONMENT

    noticed = {}
    for name in (RIGHT, *(mistake.name for mistake in MISTAKES)):
        found = sorted((folder / name).rglob("_C*.so"))
        if not found:
            print(f"{name:24} NOT BUILT", flush=True)
            continue
        command = [sys.executable, __file__, "one", str(found[0]), str(seconds)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **ENVIRONMENT, "NCCLEP_LOG": "warning"},
                text=True,
                stdout=subprocess.PIPE,
                timeout=seconds + START_S,
            )
            last = (done.stdout.splitlines() or [""])[-1]
            if not last.startswith(("RIGHT", "WRONG")):  # a fault of the GPU, say
                last = f"WRONG exit code {done.returncode}: {last}"
        except subprocess.TimeoutExpired:
            last = "WRONG it hangs"
        noticed[name] = last.startswith("WRONG")
        verdict = "NOTICED    " if noticed[name] else "not noticed"
        if name == RIGHT:
            verdict = "WRONG      " if noticed[name] else "right      "
        print(f"{name:24} {verdict} {last[6:300]}", flush=True)
    return 0 if noticed.get(RIGHT) is False and noticed.get("control") else 1


if __name__ == "__main__":
    sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "contract")]
    verb, target = sys.argv[1], Path(sys.argv[2]).resolve()
    if verb == "build":
        build(target, sys.argv[3:])
    elif verb == "run":
        sys.exit(run(target, float(sys.argv[3]) if sys.argv[3:] else SECONDS))
    else:
        run_one(target, float(sys.argv[3]))
