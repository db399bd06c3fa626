"""A small script that needs only megatron.core: one MoE layer over all ranks learns a function.

Usage: core_template.py DISPATCHER...: trains with each of them, from the same start.  Like
pretrain_template.py it knows nothing of megatron_ncclep; every release has what it uses.  Rank 0
prints the loss of each step with all its digits.
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


def main():
    """Train with every dispatcher of the command line."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    for dispatcher in sys.argv[1:]:
        train(dispatcher)
    dist.destroy_process_group()


def train(dispatcher):
    """Train for ten steps."""
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=1,
        num_moe_experts=8,
        moe_router_topk=4,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        use_cpu_initialization=True,
        init_method_std=0.2,
    )
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False).submodules.mlp
    # A ModuleSpec in old versions, a functools.partial of MoELayer in new ones.
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    torch.manual_seed(1)
    layer = MoELayer(config, submodules=submodules, layer_number=1)
    # Not Adam: a wrong scale of gradients must change the losses.
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0)
    torch.manual_seed(2 + dist.get_rank())
    x = torch.randn(12, 2, 16, device="cuda")
    for step in range(10):
        loss = (layer(x)[0] - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in layer.named_parameters():
            if "experts" not in name:  # an expert has the gradients of all ranks' tokens already
                dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            loss = total.item() / dist.get_world_size()
            print(f"{dispatcher} {type(layer.token_dispatcher).__name__} step {step} loss {loss!r}")


if __name__ == "__main__":
    main()
