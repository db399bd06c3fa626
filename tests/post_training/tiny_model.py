"""A Qwen3 model with experts, as Hugging Face's, small enough for a CPU, and sentences for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def make(folder: Path) -> None:
    """Write the model, a tokenizer of words and data.jsonl."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(125))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    with (folder / "data.jsonl").open("w") as file:
        for i in range(8):
            asked, answer = (" ".join(f"w{j}" for j in range(i + a, 2 * i + a + 3)) for a in (0, 9))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
