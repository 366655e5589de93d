"""Tiny public models from transformers with random weights, as workloads: `tests/zoo.py:hf_gpt2`.

Dropout is 0, caches are off, and every batch of 8 splits over dp=4 and over two microbatches.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from autoshard.workload import Workload

VOCAB = 128
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def workload(model: nn.Module, dtype: str, **kwargs: Any) -> Workload:
    """The model in `dtype`, training; floating point arguments follow it."""
    to = getattr(torch, dtype)
    moved = {
        name: value.to(to) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in kwargs.items()
    }
    return Workload(model.to(to).train(), kwargs=moved)


def tokens(batch: int, sequence: int) -> Tensor:
    """Random token numbers other than the special ones."""
    return torch.randint(3, VOCAB, (batch, sequence))


def hf_gpt2(*, depth: int = 2, batch: int = 8, sequence: int = 16, dtype: str = "float32", seed: int = 0) -> Workload:
    """GPT-2: fused query, key and value; tied head."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=64,
        n_layer=depth,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        **TOKENS,
    )
    ids = tokens(batch, sequence)
    return workload(GPT2LMHeadModel(config), dtype, input_ids=ids, labels=tokens(batch, sequence))


def hf_llama(*, depth: int = 2, batch: int = 8, sequence: int = 16, dtype: str = "float32", seed: int = 0) -> Workload:
    """Llama: 4 query heads share 2 key-value heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        **TOKENS,
    )
    ids = tokens(batch, sequence)
    return workload(LlamaForCausalLM(config), dtype, input_ids=ids, labels=tokens(batch, sequence))


def hf_bert(*, depth: int = 2, batch: int = 8, sequence: int = 16, dtype: str = "float32", seed: int = 0) -> Workload:
    """BERT with a masked-language head; some labels are ignored (-100)."""
    torch.manual_seed(seed)
    config = BertConfig(vocab_size=VOCAB, num_hidden_layers=depth, max_position_embeddings=64, **ENCODER, **TOKENS)
    ids, labels = tokens(batch, sequence), tokens(batch, sequence)
    labels[torch.rand(batch, sequence) < 0.5] = -100
    mask = torch.ones(batch, sequence, dtype=torch.long)
    return workload(BertForMaskedLM(config), dtype, input_ids=ids, attention_mask=mask, labels=labels)


def hf_vit(*, depth: int = 2, batch: int = 8, size: int = 32, dtype: str = "float32", seed: int = 0) -> Workload:
    """ViT: 16 patches and a class token."""
    torch.manual_seed(seed)
    config = ViTConfig(num_hidden_layers=depth, image_size=size, patch_size=8, num_channels=3, num_labels=8, **ENCODER)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(8, (batch,))
    return workload(ViTForImageClassification(config), dtype, pixel_values=images, labels=labels)


def hf_t5(*, depth: int = 2, batch: int = 8, sequence: int = 16, dtype: str = "float32", seed: int = 0) -> Workload:
    """T5: encoder and decoder, a position bias that all layers of a side share, tied embeddings."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=depth,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    return workload(
        T5ForConditionalGeneration(config),
        dtype,
        input_ids=tokens(batch, sequence),
        attention_mask=torch.ones(batch, sequence, dtype=torch.long),
        labels=tokens(batch, sequence - 4),
    )


ALL = (hf_gpt2, hf_llama, hf_bert, hf_vit, hf_t5)
