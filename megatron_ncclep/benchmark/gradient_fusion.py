"""Weight gradients that linear layers add to the fp32 `main_grad` themselves, as in training.

With `gradient_accumulation_fusion` TransformerEngine's layers do that.  Megatron-Core's own ones,
of which a model of TransformerEngine's has one, the output layer, call one function of Apex'
extension `fused_weight_gradient_mlp_cuda`, and refuse the option without it.  Apex has to be
compiled, so it is missing on many machines.  Measured without the option, all of a model's
gradients would be written, read and added once more than in training; hence this stand-in, the same
for all subjects.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

APEX, STAND_IN = "Apex", "ncclep bench"


@torch.no_grad()
def wgrad_gemm_accum_fp32(
    rows: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add grad_output^T @ rows to `main_grad`.

    On a GPU one call of cuBLAS, with sums in fp32.  Where torch has none for these dtypes, which
    is before 2.8 and on a CPU, the product is rounded to the rows' dtype and added.

    Args:
        rows: input of the layer, [num_rows, in_features], bf16 or fp16.
        grad_output: [num_rows, out_features], of the same dtype.
        main_grad: fp32 [out_features, in_features].
    """
    if rows.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(main_grad, grad_output.t(), rows, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.add_(grad_output.t() @ rows)


def provide() -> str:
    """Have Megatron-Core's linear layers take the option, in this process from now on.

    Returns:
        whose function they call: `APEX` or `STAND_IN`.
    """
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32
        )
        layers._grad_accum_fusion_available = True
    function = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    return STAND_IN if function is wgrad_gemm_accum_fp32 else APEX
