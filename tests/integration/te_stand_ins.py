"""What layers of Megatron's take from TransformerEngine only, in plain torch: as much of it as the
comparisons of dispatchers need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch


class Attention(torch.nn.Module):
    """Causal attention that takes packed sequences, and values of another size than keys."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, *qkv: torch.Tensor, packed_seq_params: Any = None, **_: Any) -> torch.Tensor:
        """Let every sequence look at itself.

        Args:
            qkv: queries, keys and values, [length, batch, heads, size], or where sequences are
                packed [num_tokens, heads, size].  What follows them is a mask.
            packed_seq_params: Megatron's PackedSeqParams, or None.

        Returns:
            [length, batch, heads * size] of the values, or [num_tokens, heads * size].
        """
        if packed_seq_params is None:
            return self._attend(*qkv[:3])
        starts = packed_seq_params.cu_seqlens_q.tolist()
        parts = [
            self._attend(*(t[start:end, None] for t in qkv[:3])) for start, end in pairwise(starts)
        ]
        return torch.cat(parts)[:, 0]

    def _attend(self, *qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class LatentProjection(torch.nn.Linear):
    """What TELinear is to an MoELayer: all ranks have the whole weight."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        assert options["parallel_mode"] == "duplicated"
        assert not options["skip_bias_add"]
        super().__init__(input_size, output_size, options["bias"], dtype=config.params_dtype)
        options["init_method"](self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return a second result too, which would be a bias that is not added here."""
        return super().forward(x), None


class GroupedLinear(torch.nn.Module):
    """What TransformerEngine's is to TEGroupedMLP with moe_use_grouped_tensor: blocks of 256 rows,
    and their numbers as a tensor.
    """

    def __init__(self, num: int, input_size: int, output_size: int, *, config: Any, **_: Any):
        super().__init__()
        size = (num, output_size, input_size)
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply every block by its expert's weight."""
        assert isinstance(counts, torch.Tensor)
        blocks = rows.split(counts.tolist())
        assert all(len(block) % 256 == 0 for block in blocks)
        return torch.cat([b @ w.t() for b, w in zip(blocks, self.weight, strict=True)]), None


class Padding:
    """What Fp8Padding and Fp8Unpadding are to it: zero rows between blocks, put in or taken out.

    Attributes:
        calls: of all of them.
    """

    calls = 0

    def __init__(self, num: int, align_size: int) -> None:
        self.align_size = align_size

    def __call__(self, rows: torch.Tensor, counts: list[int]) -> Any:
        """The rows with those that are missing, and their numbers; or those that were given."""
        Padding.calls += 1
        padded = [-(-count // self.align_size) * self.align_size for count in counts]
        if len(rows) == sum(padded):
            return torch.cat([b[:n] for b, n in zip(rows.split(padded), counts, strict=True)])
        missing = [n - count for n, count in zip(padded, counts, strict=True)]
        blocks = [
            torch.nn.functional.pad(block, (0, 0, 0, n))
            for block, n in zip(rows.split(counts), missing, strict=True)
        ]
        return torch.cat(blocks), padded


@contextmanager
def latent_projections() -> Iterator[None]:
    """Let Megatron build layers that dispatch in a latent size (moe_latent_size)."""
    from megatron.core.transformer.moe import moe_layer

    assert not moe_layer.HAVE_TE
    moe_layer.HAVE_TE, moe_layer.TELinear = True, LatentProjection
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = False, None
