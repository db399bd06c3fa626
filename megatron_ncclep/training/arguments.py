"""Every key of configs/model/*.yaml: the Megatron-LM argument, its type, and where it goes.

This table is the only place that maps a Megatron-LM argument to Megatron-Core.  The shipped files
are also turned into Megatron-LM command lines (`ncclep render`), so a key must be an argument of
Megatron-LM's parser; here only those that a model, its optimizer and its schedule need are known.

Left out on purpose: the vocabulary (it comes with the data) and everything parallel (it comes with
the machines).  Fusions that Megatron-LM switches on unless told otherwise (`no-...-fusion`) are off
in Megatron-Core unless told otherwise; they change speed, not results.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.errors import InputError

# Who takes the value.  TRANSFORMER: TransformerConfig.  LATENT: MLATransformerConfig only.
# GPT: GPTModel.  OPTIMIZER: OptimizerConfig.  RUN: settings.py and the loop.
TRANSFORMER, LATENT, GPT, OPTIMIZER, RUN = "transformer", "latent", "gpt", "optimizer", "run"

MOST = 2**31 - 1  # of an int
REQUIRED = object()  # the default of an argument that every file must give


@dataclass(frozen=True)
class Argument:
    """One key.

    Attributes:
        owner: which of Megatron's objects takes it.
        type: bool, int, float or str; an int is accepted where a float is due.
        field: its name there, if that is not the key with underscores.
        default: what a file without the key means; None: the owner's own default.
        choices: the values that can be built here (None: left to the owner to check).
        least: of an int; the most is `MOST`.
    """

    owner: str
    type: type
    field: str | None = None
    default: Any = None
    choices: tuple[Any, ...] | None = None
    least: int = 1


ARGUMENTS: dict[str, Argument] = {
    # sizes
    "num-layers": Argument(TRANSFORMER, int, default=REQUIRED),
    "hidden-size": Argument(TRANSFORMER, int, default=REQUIRED),
    "ffn-hidden-size": Argument(TRANSFORMER, int),
    "num-attention-heads": Argument(TRANSFORMER, int, default=REQUIRED),
    "group-query-attention": Argument(RUN, bool, default=False),
    "num-query-groups": Argument(TRANSFORMER, int),
    "kv-channels": Argument(TRANSFORMER, int),
    "qk-layernorm": Argument(TRANSFORMER, bool),
    "multi-latent-attention": Argument(RUN, bool, default=False),
    "q-lora-rank": Argument(LATENT, int),
    "kv-lora-rank": Argument(LATENT, int),
    "qk-head-dim": Argument(LATENT, int),
    "qk-pos-emb-head-dim": Argument(LATENT, int),
    "v-head-dim": Argument(LATENT, int),
    "rotary-scaling-factor": Argument(LATENT, float),
    "mscale": Argument(LATENT, float),
    "mscale-all-dim": Argument(LATENT, float),
    "normalization": Argument(TRANSFORMER, str, choices=("LayerNorm", "RMSNorm")),
    "norm-epsilon": Argument(TRANSFORMER, float, "layernorm_epsilon"),
    "swiglu": Argument(RUN, bool, default=False),
    "disable-bias-linear": Argument(RUN, bool, default=False),
    "hidden-dropout": Argument(TRANSFORMER, float),
    "attention-dropout": Argument(TRANSFORMER, float),
    "init-method-std": Argument(TRANSFORMER, float),
    # mixture of experts
    "num-experts": Argument(TRANSFORMER, int, "num_moe_experts", default=REQUIRED),
    "moe-ffn-hidden-size": Argument(TRANSFORMER, int),
    "moe-layer-freq": Argument(RUN, str, default="1"),
    "moe-router-topk": Argument(TRANSFORMER, int),
    "moe-router-pre-softmax": Argument(TRANSFORMER, bool),
    "moe-router-score-function": Argument(TRANSFORMER, str),
    "moe-router-num-groups": Argument(TRANSFORMER, int),
    "moe-router-group-topk": Argument(TRANSFORMER, int),
    "moe-router-topk-scaling-factor": Argument(TRANSFORMER, float),
    "moe-router-enable-expert-bias": Argument(TRANSFORMER, bool),
    "moe-router-bias-update-rate": Argument(TRANSFORMER, float),
    "moe-router-load-balancing-type": Argument(TRANSFORMER, str),
    "moe-router-dtype": Argument(TRANSFORMER, str),
    "moe-aux-loss-coeff": Argument(TRANSFORMER, float),
    "moe-z-loss-coeff": Argument(TRANSFORMER, float),
    "moe-shared-expert-intermediate-size": Argument(TRANSFORMER, int),
    "moe-grouped-gemm": Argument(TRANSFORMER, bool),
    # embedding and output
    "seq-length": Argument(RUN, int, default=REQUIRED),
    "max-position-embeddings": Argument(RUN, int, default=REQUIRED),
    "position-embedding-type": Argument(
        GPT, str, default="learned_absolute", choices=("learned_absolute", "rope", "none")
    ),
    "rotary-base": Argument(RUN, int, default=10000),
    "rotary-percent": Argument(RUN, float, default=1.0),
    "untie-embeddings-and-output-weights": Argument(RUN, bool, default=False),
    # which modules
    "transformer-impl": Argument(
        RUN, str, default="transformer_engine", choices=("local", "transformer_engine")
    ),
    "no-persist-layer-norm": Argument(RUN, bool, default=False),
    "bf16": Argument(RUN, bool, default=False),
    # training
    "micro-batch-size": Argument(RUN, int, default=REQUIRED),
    "global-batch-size": Argument(RUN, int, default=REQUIRED),
    "train-iters": Argument(RUN, int, default=REQUIRED),
    "eval-iters": Argument(RUN, int, default=8),
    "seed": Argument(RUN, int, default=1234, least=0),
    "lr": Argument(OPTIMIZER, float, default=REQUIRED),
    "min-lr": Argument(OPTIMIZER, float, default=0.0),
    "weight-decay": Argument(OPTIMIZER, float, default=0.01),
    "adam-beta1": Argument(OPTIMIZER, float, default=0.9),
    "adam-beta2": Argument(OPTIMIZER, float, default=0.999),
    "adam-eps": Argument(OPTIMIZER, float, default=1e-8),
    "clip-grad": Argument(OPTIMIZER, float, default=1.0),
    "lr-decay-style": Argument(
        RUN, str, default="linear", choices=("constant", "linear", "cosine")
    ),
    "lr-warmup-fraction": Argument(RUN, float, default=0.0),
}


def check(source: str, given: dict[str, Any]) -> dict[str, Any]:
    """Check `given` (argument name -> value) and fill in the defaults that the table has.

    Args:
        source: what the messages call the origin of the values, such as a file's name.

    Raises:
        InputError: an unknown key, a missing one, or a value of the wrong type.
    """
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in ARGUMENTS:
            raise InputError(
                f"{source}: unknown key {key!r}; megatron_ncclep/training/arguments.py lists the "
                "Megatron-LM arguments that `ncclep train` knows"
            )
        values[key] = _typed(source, key, value)
    for key, argument in ARGUMENTS.items():
        if key in values or argument.default is None:
            continue
        if argument.default is REQUIRED:
            raise InputError(f"{source}: {key!r} is missing; every model needs it")
        values[key] = argument.default
    return values


def _typed(source: str, key: str, value: Any) -> Any:
    argument = ARGUMENTS[key]
    if key == "moe-layer-freq":
        value = str(value)
    if argument.type is float and type(value) is int and abs(value) <= MOST:
        value = float(value)
    if type(value) is not argument.type:
        raise InputError(
            f"{source}: {key}: {value!r} is {type(value).__name__}, must be "
            f"{argument.type.__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{source}: {key}: {value!r} must be a finite number")
    is_flag = argument.type is bool
    if isinstance(value, int) and not is_flag and not argument.least <= value <= MOST:
        raise InputError(f"{source}: {key} {value}: must be from {argument.least} to {MOST}")
    if argument.choices is not None and value not in argument.choices:
        raise InputError(f"{source}: {key}: {value!r} must be one of {argument.choices}")
    return value


def layer_pattern(text: str, num_layers: int) -> list[int]:
    """Which layers have experts, from the value of `moe-layer-freq`.

    Args:
        text: `N` (every N-th layer, beginning with the first, as in Megatron-Core), or a sum of
            repeated lists as Megatron-LM takes it: `([0]*3+[1]*58)` for three dense layers first.

    Returns:
        list[int]: `num_layers` entries, 1 for a layer with experts and 0 for a dense one.

    Raises:
        InputError: another form, or a list whose length is not `num_layers`.
    """
    if re.fullmatch(r"[1-9]\d*", text):
        return [int(layer % int(text) == 0) for layer in range(num_layers)]
    term = r"\[[01]\]\*\d+"
    if not re.fullmatch(rf"\(?{term}(\+{term})*\)?", text):
        raise InputError(
            f"moe-layer-freq: {text!r} must be a number or a sum of lists like ([0]*3+[1]*58)"
        )
    pattern: list[int] = []
    for value, count in re.findall(r"\[([01])\]\*(\d+)", text):
        pattern += [int(value)] * int(count)
    if len(pattern) != num_layers:
        raise InputError(
            f"moe-layer-freq: {text!r} names {len(pattern)} layers, num-layers is {num_layers}"
        )
    return pattern
