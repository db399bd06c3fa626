"""Megatron-LM's parser over the models of configs/model, in a process of its own.

    python parsed_models.py MODEL... >found.json

Each as `ncclep render` composes it for eight GPUs, with the dispatcher ncclep.  All that a script
does with its arguments before it builds a model is done: parsed, checked, made a TransformerConfig,
and samples and a tokenizer asked for.
"""

import argparse
import json
import os
import shlex
import sys

from megatron_ncclep import autoload, cpu
from megatron_ncclep.cli import render

# RoPE's fused kernel is TransformerEngine's, which is not here.
NO_ENGINE = ["--no-rope-fusion"]
HERE = [*shlex.split("--mock-data --tokenizer-type NullTokenizer --vocab-size 63"), *NO_ENGINE]
FACTS = (
    "num_layers", "hidden_size", "num_attention_heads", "num_moe_experts", "moe_router_topk",
    "moe_ffn_hidden_size", "ffn_hidden_size", "moe_token_dispatcher_type", "moe_layer_freq",
)  # fmt: skip


def prepare() -> None:
    """Import what parses, hooked and ready for a CPU."""
    autoload.hook_imports()
    cpu.enable()
    cpu.enable_training_scripts()


def check(num_ranks: int, *words: str) -> dict[str, object]:
    """What the config says that Megatron makes of a script's arguments on rank 0."""
    from megatron.training import arguments, global_vars, training

    os.environ.update(RANK="0", WORLD_SIZE=str(num_ranks), LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    global_vars.set_args(args)
    training.get_train_valid_test_num_samples()
    if args.tokenizer_type == "HuggingFaceTokenizer":  # comes from elsewhere
        assert args.tokenizer_model, "--tokenizer-model is missing"
    else:
        global_vars.rebuild_tokenizer(args)
    return {name: getattr(config, name) for name in FACTS}


def facts(model: str) -> dict[str, object]:
    lines = render.command_lines(model, "ncclep", "local-gpu", extra=HERE)
    words = shlex.split(render.format_command(lines, one_line=True))
    return check(8, *words[words.index("pretrain_gpt.py") + 1 :])


def main() -> None:
    """Print the facts of each model, and the options that the parser knows."""
    models, out = sys.argv[1:], os.dup(1)
    os.dup2(2, 1)  # Megatron prints all arguments
    prepare()
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser())
    options = {option: a.nargs for option, a in parser._option_string_actions.items()}
    found = {"options": options, "models": {model: facts(model) for model in models}}
    with os.fdopen(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
