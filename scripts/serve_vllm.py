"""Serve a small Qwen3-MoE with vLLM 0.24, and compare what its all-to-all backends answer.

    python scripts/serve_vllm.py --gpus own|shared [--hosts N] [--backends A,B] [--out FOLDER]

With each backend, 4 data-parallel ranks serve a checkpoint with random weights, in fp32, and get 64
prompts twice.  `own`: each rank has one of the visible GPUs.  `shared`: all are on the first one,
under MPS, which needs NCCL 2.30 or newer and says nothing about speed.  With several hosts, ranks
appear on them, and kernels of `ncclep` put to the others over the test network (docs/network.md).

This Python's environment needs vLLM and this package, both installed with their entry points.  An
NCCL other than torch's is named in LD_PRELOAD, as the path of a libnccl.so.2.

FOLDER gets the model, vLLM's caches, a log of each rank, answers.json and summary.txt.  The exit
status is 1 if a server did not serve, or if `ncclep` did not use its kernels or this network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import gpu

sys.path[:0] = [str(gpu.ROOT / "tests" / part) for part in ("network", "native")]
import loop  # noqa: E402

RANKS, PROMPTS, LONGEST, TOKENS = 4, 64, 900, 32  # a prompt has up to LONGEST tokens
HIDDEN, INNER, EXPERTS, LAYERS, VOCAB = 1024, 512, 32, 4, 8192
# For a backend to start, to answer all prompts once, to end; for both and MPS to end.
HEALTHY_S, SEND_S, TERM_S, KILL_S, END_S = 240.0, 70.0, 6.0, 5.0, 60.0
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "float32",
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "use_sliding_window": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
VARIABLES = {
    "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4",
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCLEP_FIRST_TIMEOUT_S": "100", "NCCLEP_TIMEOUT_S": "30", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_COLOR": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
Answer = dict[str, list[Any]]  # `tokens` and their `logprobs`


def make_model(folder: Path) -> None:
    """Write the checkpoint, unless it is there: weights of a size at which experts matter."""
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").is_file():
        return
    of_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (16 * 64, HIDDEN), "self_attn.k_proj": (4 * 64, HIDDEN),
        "self_attn.v_proj": (4 * 64, HIDDEN), "self_attn.o_proj": (HIDDEN, 16 * 64),
        "self_attn.q_norm": (64,), "self_attn.k_norm": (64,), "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,), "mlp.gate": (EXPERTS, HIDDEN),
    }  # fmt: skip
    of_expert = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for expert in range(EXPERTS):
        of_layer |= {f"mlp.experts.{expert}.{name}_proj": of_expert[name] for name in of_expert}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes |= {"model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    generator, tensors = torch.Generator().manual_seed(1234), {}
    for name, shape in shapes.items():
        values = torch.ones(shape)
        if len(shape) == 2:
            values.normal_(std=0.3 if "embed" in name else shape[1] ** -0.5, generator=generator)
        tensors[f"{name}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(MODEL, indent=1))  # last: now it is complete


def prompts() -> list[list[int]]:
    """Token ids, the same ones each time."""
    drawn = random.Random(7)
    lengths = [1, LONGEST, *(drawn.randint(1, LONGEST) for _ in range(PROMPTS - 2))]
    return [[drawn.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


def environment(rank: int, hosts: int, out: Path, common: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank; `common` are those of all, with one GPU or one for each rank."""
    gpus = common["CUDA_VISIBLE_DEVICES"].split(",")
    caches = {"VLLM_CACHE_ROOT": str(out / "cache"), "TRITON_CACHE_DIR": str(out / "triton")}
    found = {**common, **VARIABLES, **caches, "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]}
    if len(gpus) < RANKS:
        found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    found["NCCL_HOSTID"] = f"host{rank * hosts // RANKS}"
    if rank == 0:
        found |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
        found["NCCL_DEBUG_FILE"] = str(out / "nccl.%p.log")
    for path in common.get("LD_PRELOAD", "").split(":"):
        if "libnccl.so" in path:
            found["VLLM_NCCL_SO_PATH"] = path
    return found


def options(backend: str, rank: int, model: Path, http: int, rpc: int) -> list[str]:
    """The options of a rank's `vllm serve`; rank 0 takes all requests."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    of_all = f"""--served-model-name small --skip-tokenizer-init --dtype float32
        --data-parallel-size {RANKS} --data-parallel-size-local 1 --data-parallel-address 127.0.0.1
        --data-parallel-rpc-port {rpc} --enable-expert-parallel --all2all-backend {backend}
        --attention-backend TRITON_ATTN --moe-backend triton --max-model-len 1024
        --max-num-batched-tokens 2048 --max-num-seqs 64 --gpu-memory-utilization 0.1
        --kv-cache-memory-bytes {1 << 30} --no-enable-prefix-caching --generation-config vllm
        --seed 0"""
    own = f"--headless --data-parallel-start-rank {rank}"
    if not rank:
        own = f"--host 127.0.0.1 --port {http} --api-server-count 1 --uvicorn-log-level warning"
    compilation = ["--compilation-config", json.dumps(graphs | sizes)]
    return [str(model), *of_all.split(), *compilation, *own.split()]


def serve(backend: str, out: Path, variables: list[dict[str, str]], until: float) -> list[Any]:
    """Start a server for each rank, send all prompts twice, stop; the answers of both times."""
    ports, servers = (gpu.free_port(), gpu.free_port()), []
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    start = partial(subprocess.Popen, cwd=out, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        for rank, env in enumerate(variables):
            whole = command + options(backend, rank, out / "model", *ports)
            with (out / f"{backend}-{rank}.log").open("w") as log:
                servers.append(start(whole, env=env, stdout=log, stderr=log))
        url = f"http://127.0.0.1:{ports[0]}"
        wait_healthy(url, servers, min(time.monotonic() + HEALTHY_S, until))
        return [send_all(url, until) for _ in range(2)]
    finally:
        stop(servers)


def wait_healthy(url: str, servers: Sequence[subprocess.Popen[Any]], until: float) -> None:
    """Wait until rank 0 takes requests; raise RuntimeError if a server ends or time is up."""
    while time.monotonic() < until:
        if any(ended := [each.poll() is not None for each in servers]):
            raise RuntimeError(f"the server of rank {ended.index(True)} has ended")
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=3):
            return
        time.sleep(0.5)
    raise RuntimeError("not healthy in time")


def send_all(url: str, until: float) -> list[Answer]:
    """Send all prompts at once: prompt i to rank i % RANKS, so that batches are alike."""
    limit_s = max(1.0, min(SEND_S, until - time.monotonic()))
    asked = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 1}
    asked["detokenize"] = False

    def send(number: int, prompt: list[int]) -> Answer:
        request = urllib.request.Request(
            f"{url}/inference/v1/generate",
            json.dumps({"model": "small", "token_ids": prompt, "sampling_params": asked}).encode(),
            {"Content-Type": "application/json", "X-data-parallel-rank": str(number % RANKS)},
        )
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            (choice,) = json.load(answer)["choices"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        if not len(choice["token_ids"]) == len(logprobs) == TOKENS:
            raise RuntimeError(f"not {TOKENS} tokens with logprobs: {choice}")
        return {"tokens": choice["token_ids"], "logprobs": logprobs}

    with ThreadPoolExecutor(PROMPTS) as pool:
        return list(pool.map(send, range(PROMPTS), prompts()))


def stop(servers: Sequence[subprocess.Popen[Any]]) -> None:
    """Ask the servers' process groups to end, then kill what is left of them."""
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for each in servers:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, number)
        until = time.monotonic() + wait_s
        while time.monotonic() < until and any(each.poll() is None for each in servers):
            time.sleep(0.1)


def compare(one: Sequence[Answer], other: Sequence[Answer]) -> str:
    """A row of `table`, for two answers to each prompt."""
    same = parted = first = 0
    differences: list[float] = []
    for a, b in zip(one, other, strict=True):
        agree = [x == y for x, y in zip(a["tokens"], b["tokens"], strict=True)]
        length = [*agree, False].index(False)
        same, parted, first = same + all(agree), parted + length, first + agree[0]
        differences += [abs(a["logprobs"][n] - b["logprobs"][n]) for n in range(length)]
    differences = sorted(differences) or [float("nan")]
    middle, p99 = statistics.median(differences), differences[int(0.99 * (len(differences) - 1))]
    return (
        f"{same:2} of {len(one)} | {parted:4} of {len(one) * TOKENS} | {first:2} | "
        f"{middle:.5f} | {p99:.4f} | {differences[-1]:.4f}"
    )


def table(answers: Mapping[str, Sequence[Sequence[Answer]]]) -> list[str]:
    """Lines that compare each backend's first and second answers with all others."""
    runs = {f"{name} {n}": of for name, both in answers.items() for n, of in enumerate(both, 1)}
    rows = [f"{a} and {b}: {compare(runs[a], runs[b])}" for a, b in combinations(runs, 2)]
    return ["the same | tokens until they part | first tokens | logprobs: median, 99 %, max", *rows]


def proof(out: Path, words: str) -> str:
    """The first line of the logs of `ncclep` with these words."""
    logs = [log.read_text(errors="replace") for log in sorted(out.glob("ncclep-?.log"))]
    found = [line for line in "\n".join(logs).splitlines() if words in line]
    return found[0] if found else f"FAILED: no log has {words!r}"


def main() -> int:
    """Serve with each backend, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add, backends = parser.add_argument, "ncclep,allgather_reducescatter"
    add("--gpus", choices=("own", "shared"), required=True, help="one for each rank, or for all")
    add("--hosts", type=int, choices=(1, 2, 4), default=1, help="that ranks appear on (default: 1)")
    add("--backends", default=backends, metavar="A,B", help=f"default: {backends}")
    add("--out", type=Path, default=Path("runs/vllm"), metavar="FOLDER", help="default: runs/vllm")
    add("--limit-s", type=float, default=540, help="of everything (default: 540)")
    args = parser.parse_args()
    until = time.monotonic() + args.limit_s - END_S
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins").names
    if not importlib.util.find_spec("vllm") or "ncclep" not in plugins:
        parser.error("vLLM or this package, with its entry points, is not installed: install both")
    gpus, needed = gpu.visible_gpus(), 1 if args.gpus == "shared" else RANKS
    if len(gpus) < needed:
        parser.error(f"--gpus {args.gpus} needs {needed}, and {len(gpus)} are visible")
    out, answers, ends = args.out.resolve(), {}, []
    make_model(out / "model")
    common = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus[:needed])}
    if args.hosts > 1:
        common["NCCL_RMA_PLUGIN"] = str(loop.build())
    with gpu.mps(args.gpus == "shared", common) as common:
        variables = [environment(rank, args.hosts, out, common) for rank in range(RANKS)]
        for backend in args.backends.split(","):
            end, begin = "served", time.monotonic()
            try:
                answers[backend] = serve(backend, out, variables, until)
            except Exception as error:  # the next one may serve
                end = f"FAILED: {type(error).__name__}: {error}"
            ends.append(f"{backend}: {end}, {time.monotonic() - begin:.0f} s")
            print(ends[-1], flush=True)
    if "ncclep" in answers:
        ends.append(proof(out, "NVLink domains" if args.hosts > 1 else "engine 'native'"))
    (out / "answers.json").write_text(json.dumps(answers))
    text = [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), gpu.described()]
    text += [f"vllm: {importlib.metadata.version('vllm')}", f"GPUs: {args.gpus}"]
    text += [f"hosts: {args.hosts}", "", *table(answers), "", *ends]
    (out / gpu.SUMMARY).write_text("\n".join(text) + "\n")
    print(*text, sep="\n")
    return 1 if any("FAILED" in end for end in ends) else 0


if __name__ == "__main__":
    sys.exit(main())
