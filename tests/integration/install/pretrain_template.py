"""A small pretrain_gpt.py, made the way Megatron-LM's own is for each release, without its extras.

It knows nothing of megatron_ncclep nor of CPUs: test_launch.py copies it to a folder of its own and
runs it through `ncclep run`.  Pipeline parallelism is left out.
"""

from functools import partial

import megatron.core
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from packaging.version import Version


def model_provider(pre_process=True, post_process=True, config=None, pg_collection=None):
    """Build the model; from 0.19 on Megatron builds it from the configuration instead."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=pg_collection,
    )


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    """Build the three mock datasets: sequences that count upwards."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


def loss_func(loss_mask, output_tensor):
    """Return the summed loss, the number of tokens, and both for the log."""
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator, model):
    """Run the model on the next batch."""
    batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    output_tensor = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output_tensor, partial(loss_func, batch["loss_mask"])


def main():
    """Call `pretrain` as this release wants it."""
    train_valid_test_datasets_provider.is_distributed = True
    common = (ModelType.encoder_or_decoder, forward_step)
    release = Version(megatron.core.__version__)
    if release < Version("0.18"):
        pretrain(train_valid_test_datasets_provider, model_provider, *common)
    else:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        args = parse_and_validate_args()
        if release < Version("0.19"):
            config = pretrain_cfg_container_from_args(args)
            pretrain(config, train_valid_test_datasets_provider, model_provider, *common)
        else:
            from megatron.training.argument_utils import gpt_config_from_args

            config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
            pretrain(config, train_valid_test_datasets_provider, *common)
    print_rank_0(f"trained with {get_args().moe_token_dispatcher_type}")


if __name__ == "__main__":
    main()
