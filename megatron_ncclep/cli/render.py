"""Compose a model, a dispatcher and a cluster file into the command that runs them.

    ncclep render --model tiny --dispatcher ncclep --cluster local-cpu \\
        --script Megatron-LM/pretrain_gpt.py -- --mock-data --train-iters 10

Arguments after `--` are for Megatron-LM and take precedence over the files.  No file takes
precedence over another: it is an error if two of them set an argument differently.

A cluster file has up to five sections, each a mapping, in the order of the command:

    env        environment variables
    srun       options of srun; without this section the command starts with torchrun
    torchrun   options of torchrun; without it, but with srun, each task is a rank
    run        options of `ncclep run`
    megatron   arguments of Megatron-LM, as in a model file

In env, srun and torchrun, `${NAME}` and `$((...))` are left for the shell that runs the command.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from megatron_ncclep.cli import config_files
from megatron_ncclep.errors import InputError

SECTIONS = ("env", "srun", "torchrun", "run", "megatron")
EXPERT_PARALLEL = "expert-model-parallel-size"
_SHELL_EXPRESSION = re.compile(r"\$\{\w+\}|\$\(\([\w +*/%-]+\)\)")

# One argument with its values, each word quoted for the shell; the output keeps it on one line.
Words = list[str]


def quote(text: str) -> str:
    """Quote `text` for a shell, but let it expand `${NAME}` and `$((...))`."""
    if not _SHELL_EXPRESSION.search(text):
        return shlex.quote(text)
    literal = [re.sub(r'([$`"\\])', r"\\\1", part) for part in _SHELL_EXPRESSION.split(text)]
    expressions = [*_SHELL_EXPRESSION.findall(text), ""]
    return '"' + "".join(a + b for a, b in zip(literal, expressions, strict=True)) + '"'


def arguments(mapping: Mapping[str, object], *, shell: bool = False) -> list[Words]:
    """Turn names and values into command-line arguments.

    A flag that is false is left out; a list becomes several words.

    Args:
        mapping: argument names without their dashes, and their values.
        shell: let the shell expand `${NAME}` and `$((...))` in the values.
    """
    lines = []
    for name, value in mapping.items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        write = quote if shell else shlex.quote
        lines.append([f"--{name}", *(write(str(item)) for item in values)])
    return lines


def read_cluster(name_or_path: str) -> dict[str, dict[str, object]]:
    """Read a cluster file; sections that it leaves out are empty.

    Raises:
        InputError: no such file, or an unknown or malformed section.
    """
    content = config_files.load("cluster", name_or_path)
    cluster: dict[str, dict[str, object]] = {}
    for section in SECTIONS:
        value = content.pop(section, {})
        if not isinstance(value, dict):
            raise InputError(f"cluster {name_or_path}: {section} must be a mapping, is {value!r}")
        where = f"cluster {name_or_path}: {section}"
        config_files.check_arguments(where, value, variables=section == "env")
        cluster[section] = value
    if content:
        raise InputError(
            f"cluster {name_or_path}: unknown section {next(iter(content))!r}: "
            f"the sections are {', '.join(SECTIONS)}"
        )
    return cluster


def merge(
    sources: Mapping[str, Mapping[str, object]], overridden: Sequence[str]
) -> dict[str, object]:
    """Merge the Megatron arguments of several files.

    Args:
        sources: the arguments of each file, by the file's name in errors.
        overridden: names that the command line sets; they are left out of the result.

    Raises:
        InputError: two files set one name differently.
    """
    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    for source, mapping in sources.items():
        for name, value in mapping.items():
            if name in overridden:
                continue
            # Types are compared too, because True == 1 but a flag is not a number.
            if name in merged and repr(merged[name]) != repr(value):
                raise InputError(
                    f"{origin[name]} says {name}: {merged[name]}, {source} says {name}: {value}; "
                    f"set --{name} on the command line after -- to decide"
                )
            merged.setdefault(name, value)
            origin.setdefault(name, source)
    return merged


def _check_expert_parallel(
    merged: Mapping[str, object], torchrun: Mapping[str, object], given: Sequence[str]
) -> None:
    """Refuse an expert-parallel size that the processes of a single node cannot form."""
    size, num_processes = merged.get(EXPERT_PARALLEL), torchrun.get("nproc-per-node")
    single_node = bool(torchrun.get("standalone"))
    if EXPERT_PARALLEL in given or not (isinstance(size, int) and isinstance(num_processes, int)):
        return
    if single_node and num_processes % size:
        experts = merged.get("num-experts", num_processes)
        possible = math.gcd(num_processes, experts) if isinstance(experts, int) else 1
        raise InputError(
            f"{num_processes} processes cannot form groups of {EXPERT_PARALLEL} {size}, which the "
            f"cluster file says: add -- --{EXPERT_PARALLEL} {possible}"
        )


def command_lines(
    model: str,
    dispatcher: str,
    cluster: str,
    script: str = "pretrain_gpt.py",
    extra: Sequence[str] = (),
    nproc: int | None = None,
) -> list[Words]:
    """Compose the command, one list of quoted words for each line of the readable form.

    Args:
        model: name or path of a model file.
        dispatcher: name or path of a dispatcher file.
        cluster: name or path of a cluster file.
        script: the Megatron-LM script to run.
        extra: Megatron-LM arguments that take precedence over the files.
        nproc: processes on each node, instead of the cluster file's number.

    Raises:
        InputError: a file is missing or malformed, or two files contradict each other.
    """
    sections = read_cluster(cluster)
    torchrun = dict(sections["torchrun"])
    tasks_are_ranks = bool(sections["srun"]) and not torchrun
    if nproc is not None:
        if nproc < 1:
            raise InputError(f"--nproc {nproc}: must be at least 1")
        if tasks_are_ranks:
            raise InputError(
                f"--nproc {nproc}: with the cluster {cluster} srun starts the ranks: leave --nproc "
                "out, and ask sbatch for that many GPUs (--gpus-per-node)"
            )
        torchrun["nproc-per-node"] = nproc
    given = [word[2:].partition("=")[0] for word in extra if word.startswith("--")]
    sources = {
        f"model {model}": config_files.load("model", model),
        f"dispatcher {dispatcher}": config_files.load("dispatcher", dispatcher),
        f"cluster {cluster}": sections["megatron"],
    }
    merged = merge(sources, given)
    _check_expert_parallel(merged, torchrun, given)

    lines: list[Words] = [[f"{name}={quote(str(v))}"] for name, v in sections["env"].items()]
    if sections["srun"]:
        lines += [["srun"], *arguments(sections["srun"], shell=True)]
    if tasks_are_ranks:
        lines.append(["python"])
    else:
        lines += [["torchrun"], *arguments(torchrun, shell=True)]
    run = [word for words in arguments(sections["run"]) for word in words]
    lines.append(["-m", "megatron_ncclep", "run", *run, shlex.quote(script)])
    lines += arguments(merged)
    lines += [[shlex.quote(word) for word in words] for words in _by_argument(extra)]
    return lines


def _by_argument(words: Sequence[str]) -> list[Words]:
    """Split words before each one that starts an argument."""
    groups: list[Words] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def format_command(lines: Sequence[Words], *, one_line: bool = False) -> str:
    """Join the lines of `command_lines` into text that a shell reads as one command."""
    return (" " if one_line else " \\\n    ").join(" ".join(words) for words in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ncclep render`."""
    for kind in config_files.KINDS:
        parser.add_argument(
            f"--{kind}",
            required=True,
            metavar="NAME",
            help=f"one of {', '.join(config_files.names(kind))}; or the path of a .yaml file",
        )
    parser.add_argument(
        "--script", default="pretrain_gpt.py", help="Megatron-LM script (default: %(default)s)"
    )
    parser.add_argument(
        "--nproc", type=int, help="processes on each node (default: the cluster file's number)"
    )
    parser.add_argument("--one-line", action="store_true", help="print the command on one line")
    parser.add_argument("extra", nargs="*", metavar="-- ARGUMENT", help="Megatron-LM arguments")
    parser.set_defaults(hint=": write Megatron-LM's arguments after --")


def main(args: argparse.Namespace) -> int:
    """Print the composed command."""
    lines = command_lines(
        args.model, args.dispatcher, args.cluster, args.script, args.extra, args.nproc
    )
    print(format_command(lines, one_line=args.one_line))
    return 0
