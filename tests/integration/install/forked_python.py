"""Programs as a fresh Python would run them, in forks of one that has imported torch already.

Four of the five seconds that Megatron-Core takes to be imported are torch's compilers.  What
`import torch` does itself needs a process of its own.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import textwrap
import warnings

from fork_server import ForkServer
from timeouts import patient


def prepare() -> None:
    """Import what Megatron-Core imports first, and nothing of Megatron-Core."""
    for name in ("torch._dynamo", "torch._inductor.pattern_matcher", "torch.utils.cpp_extension"):
        importlib.import_module(name)
    assert "megatron" not in sys.modules


def server() -> ForkServer:
    """What runs the programs."""
    return ForkServer("forked_python:prepare", NCCLEP_AUTOLOAD="0")


def run_forked(server: ForkServer, program: str, *words: str, **environment: str) -> str:
    """Run a program, or the text of one; return what it prints."""
    environment = {"NCCLEP_AUTOLOAD": "1", **environment}
    job = [program, *words]
    (ended,) = server.run("forked_python:be_program", job, 1, patient(240), **environment)
    assert ended.exit_code == 0, ended.output
    return ended.output


def be_program(program: str, *words: str) -> None:
    """Be one, after what the end of `import torch` calls."""
    from megatron_ncclep.autoload import autoload

    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv = [program, *words]
    warnings.resetwarnings()  # the server ignores them
    autoload()
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        exec(textwrap.dedent(program), {"__name__": "__main__"})
