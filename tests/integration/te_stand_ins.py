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
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        # Context-parallel ranks have parts of a sequence, one after the other.
        group = parallel_state.get_context_parallel_group()
        keys = (gather_from_sequence_parallel_region(t, group=group) for t in qkv[1:])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (qkv[0], *keys))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(group.rank() * q.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask.to(q.device), scale=self.scale, enable_gqa=True
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
