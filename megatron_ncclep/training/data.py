"""A prepared corpus -> batches, through Megatron-Core's GPTDataset."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_ncclep.training.corpus import INDEXED_SPLIT, Corpus

Batch = dict[str, torch.Tensor]


class CorpusTokenizer:
    """What GPTDataset asks of a tokenizer when the corpus is already made of tokens.

    Attributes:
        vocab_size: number of tokens.
        eod, eos: the token that ends a document.
        pad: -1, an id that no text contains, so that no token of the corpus is masked.
        unique_identifiers: goes into the name of GPTDataset's cached indices.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.vocab_size = corpus.vocab_size
        self.eod = self.eos = corpus.end_token
        self.pad = -1
        self.unique_identifiers = OrderedDict(
            {"class": type(self).__name__, "fingerprint": corpus.fingerprint}
        )


def build_datasets(
    corpus: Corpus, seq_length: int, num_train: int, num_valid: int, seed: int, cache: Path
) -> tuple[Any, Any]:
    """Build the training and the validation GPTDataset.  Collective; rank 0 writes `cache`.

    Args:
        num_train, num_valid: samples of each; text is repeated in new order when it runs out.
        seed: of the order of the samples.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    if corpus.valid is None:
        where: dict[str, Any] = {"blend": ([corpus.train], None), "split": INDEXED_SPLIT}
    else:
        where = {"blend_per_split": [([corpus.train], None), ([corpus.valid], None), None]}
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        path_to_cache=str(cache),
        tokenizer=CorpusTokenizer(corpus),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        # The attention makes its own causal mask.
        create_attention_mask=False,
        **where,
    )
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [num_train, num_valid, 0], lambda: True, config
    )
    train, valid, _ = builder.build()
    return train, valid


def batches(
    dataset: Any,
    first_sample: int,
    micro_batch_size: int,
    num_microbatches: int,
    rank: int,
    num_ranks: int,
    device: torch.device,
) -> Iterator[Batch]:
    """The micro-batches of one step for one data-parallel rank.

    The samples of a step do not depend on the number of ranks: micro-batch m of rank r starts at
    `first_sample + (m * num_ranks + r) * micro_batch_size`.

    Yields:
        dict: tokens, labels, position_ids int64 and loss_mask fp32, each [micro_batch, seq_length].
    """
    for microbatch in range(num_microbatches):
        begin = first_sample + (microbatch * num_ranks + rank) * micro_batch_size
        samples = [dataset[begin + offset] for offset in range(micro_batch_size)]
        yield {
            name: torch.stack([sample[name] for sample in samples]).to(device)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
