"""Train a small GPT of Megatron-Core with the dispatcher `ncclep`.

    torchrun --nproc-per-node 2 examples/train_megatron.py

Each of the ranks is a data-parallel replica with half of the experts.  The text is numbers that
count up, in steps of 1 to 4.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_ncclep
from megatron_ncclep import cpu

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 8, 40

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:
    cpu.enable()  # Megatron-Core assumes a GPU
dist.init_process_group("nccl" if on_gpu else "gloo")
parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
model_parallel_cuda_manual_seed(1)

megatron_ncclep.install()  # not needed where the package was installed with pip
config = TransformerConfig(
    moe_token_dispatcher_type="ncclep",  # all that a model needs
    num_moe_experts=8,
    moe_router_topk=2,
    expert_model_parallel_size=dist.get_world_size(),
    num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128,
    add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
    use_cpu_initialization=not on_gpu,
    finalize_model_grads_func=finalize_model_grads,
)  # fmt: skip
gpt = GPTModel(config, get_gpt_layer_local_spec(8, moe_grouped_gemm=False), VOCABULARY, LENGTH)
model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt.to("cuda"))
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3), [model])
forward_backward = get_forward_backward_func()
torch.manual_seed(100 + dist.get_rank())  # different text on each replica


def forward_step(batches, model):
    """Megatron's forward_step_func: the losses of one micro-batch, and how to average them."""
    text = next(batches)
    positions = torch.arange(LENGTH, device=text.device).expand(BATCH, -1)
    losses = model(text[:, :-1], positions, None, labels=text[:, 1:])
    return losses, lambda losses: (losses.mean(), losses.detach().mean())


for step in range(1, STEPS + 1):
    start, stride = torch.randint(VOCABULARY, (BATCH, 1)), torch.randint(1, 5, (BATCH, 1))
    text = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    model.zero_grad_buffer()
    optimizer.zero_grad()
    (loss,) = forward_backward(
        forward_step_func=forward_step, data_iterator=iter([text.to("cuda")]), model=[model],
        num_microbatches=1, seq_length=LENGTH, micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
    optimizer.step()
    if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step:2}  loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
