"""A prepared corpus -> batches, through Megatron-Core's GPTDataset."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from megatron_ncclep.training import corpus
from megatron_ncclep.training.settings import Settings

Batch = dict[str, torch.Tensor]


class CorpusTokenizer:
    """The parts of a tokenizer that GPTDataset needs when the corpus already holds tokens.

    Attributes:
        vocab_size: number of tokens.
        eod, eos: the token that ends a document.
        pad: -1, an id that no text contains, so that no token of the corpus is masked.
        unique_identifiers: goes into the name of GPTDataset's cached indices.
    """

    def __init__(self, prepared: corpus.Corpus) -> None:
        self.vocab_size = prepared.vocab_size
        self.eod = self.eos = prepared.end_token
        self.pad = -1
        self.unique_identifiers = OrderedDict(
            {"class": type(self).__name__, "fingerprint": prepared.fingerprint}
        )


def build_datasets(
    folder: Path, settings: Settings, train_steps: int, valid_steps: int, seed: int
) -> tuple[Any, Any]:
    """Build the training and the validation GPTDataset.  Collective; rank 0 writes a cache.

    Args:
        folder: folder of the prepared corpus.
        settings: settings of the batches.
        train_steps, valid_steps: steps for which each has samples; if the text runs out, it is
            repeated in a new order.
        seed: seed of the order of the samples.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    prepared, batch = corpus.load(folder), settings["global-batch-size"]
    config = GPTDatasetConfig(
        blend=([prepared.prefix], None),
        split=corpus.SPLIT,
        random_seed=seed,
        sequence_length=settings["seq-length"],
        path_to_cache=str(folder / "cache"),
        tokenizer=CorpusTokenizer(prepared),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        # The attention makes its own causal mask.
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [batch * train_steps, batch * valid_steps, 0], lambda: True, config
    )
    train, valid, _ = builder.build()
    return train, valid


def batches(
    dataset: Any, settings: Settings, step: int, rank: int, num_ranks: int, device: torch.device
) -> list[Batch]:
    """The micro-batches of step `step` (from 0) for one data-parallel rank.

    The samples of a step do not depend on the number of ranks: with B = `global-batch-size` and
    b = `micro-batch-size`, micro-batch m of rank r starts at sample step * B + (m * num_ranks + r)
    * b.

    Returns:
        list[dict]: for each micro-batch, tokens, labels and position_ids in int64 and loss_mask in
        fp32, each [b, seq_length], on `device`.
    """
    batch, size = settings["global-batch-size"], settings["micro-batch-size"]
    found = []
    for begin in range(step * batch + rank * size, (step + 1) * batch, num_ranks * size):
        samples = [dataset[begin + offset] for offset in range(size)]
        found.append(
            {
                name: torch.stack([sample[name] for sample in samples]).to(device)
                for name in ("tokens", "labels", "loss_mask", "position_ids")
            }
        )
    return found
