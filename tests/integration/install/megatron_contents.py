"""What Megatron consists of in a process with some dispatcher, as JSON.

    python megatron_contents.py DISPATCHER MODULE...

imports these modules, parses a command line where this release has a parser, makes a config, and
prints each name in a module or class of Megatron's, with what it stands for.
"""

import dataclasses
import importlib
import inspect
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks_of_steps


def code_of(value: Any) -> str:
    """Where a function or class comes from; of anything else, its type."""
    if inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    value = getattr(value, "__func__", getattr(value, "fget", value))
    code = getattr(value, "__code__", None)
    return type(value).__name__ if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def contents() -> dict[str, str]:
    found = {
        "the excepthook": code_of(sys.excepthook),
        "hooks of optimizers": str(len(hooks_of_steps)),
        "finders of imports": str(len(sys.meta_path)),
    }
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "megatron":
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = code_of(value)
            if not inspect.isclass(value) or value.__module__ != name:
                continue
            for part, inner in vars(value).items():
                found[f"{name}.{key}.{part}"] = code_of(inner)
            if dataclasses.is_dataclass(value):
                for field in dataclasses.fields(value):
                    found[f"{name}.{key}, field {field.name}"] = repr(field.type)
    return found


def main(dispatcher: str, *modules: str) -> None:
    import megatron.core
    from megatron.core.transformer.transformer_config import TransformerConfig

    root = Path(megatron.core.__file__).parents[1]
    for name in modules:
        # `megatron` is a namespace, in which another release's folders may be found too.
        if (root / name.split(".")[1]).exists() and find_spec(name) is not None:
            importlib.import_module(name)
    if "megatron.training.arguments" in sys.modules:
        from megatron.training.arguments import parse_args

        sys.argv = ["train", "--moe-token-dispatcher-type", "alltoall"]
        assert parse_args().moe_token_dispatcher_type == "alltoall"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )
    config.moe_token_dispatcher_type = dispatcher
    print(json.dumps(contents()))


if __name__ == "__main__":
    main(*sys.argv[1:])
