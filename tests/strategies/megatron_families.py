"""Tiny models of transformers, one of each family that Megatron's models compute, for tests of the Megatron engine."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

VOCABULARY = 33  # odd: two ranks pad it
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
          "num_attention_heads": 4, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_LLAMA = {**_SIZES, "num_key_value_heads": 2}
_BERT = {**_SIZES, "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 24, "num_heads": 4, "dropout_rate": 0.0,
       "decoder_start_token_id": 0, "eos_token_id": 2}  # fmt: skip
_SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
# Name -> class of the model, class of the config, and its arguments.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "llama with biases, tied": ("LlamaForCausalLM", "LlamaConfig",
                                {**_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                                 "head_dim": 8}),
    "llama 3": ("LlamaForCausalLM", "LlamaConfig",
                {**_LLAMA, "max_position_embeddings": 65536, "rope_parameters": _SCALED}),
    "mistral with a window": ("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0,
              "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "bert": ("BertForPreTraining", "BertConfig", {**_BERT, "architectures": ["BertForPreTraining"]}),
    "bert without a second head": ("BertForMaskedLM", "BertConfig", _BERT),
    "megatron-bert": ("MegatronBertForPreTraining", "MegatronBertConfig",
                      {**_BERT, "architectures": ["MegatronBertForPreTraining"]}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "d_kv": 4, "num_layers": 2, "num_decoder_layers": 4}),
    "t5 v1.1": ("T5ForConditionalGeneration", "T5Config",
                {**_T5, "d_kv": 8, "num_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip


def model(name: str) -> Any:
    """Returns a family's model with random weights, biases and norms, in evaluation mode."""
    transformers: Any = import_module("transformers")
    kind, config, options = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def batch(name: str, count: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    """Returns inputs of a family's model."""
    generator = torch.Generator().manual_seed(2)
    found = {"input_ids": torch.randint(3, VOCABULARY, (count, length), generator=generator)}
    if "bert" in name:
        found["token_type_ids"] = torch.randint(0, 2, (count, length), generator=generator)
    if "t5" in name:
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (count, length - 2), generator=generator)
    return found


def logits(name: str, made: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns what transformers computes: logits of tokens, and of next sentences where there are any."""
    with torch.no_grad():
        found = made(**inputs)
    if hasattr(found, "logits"):
        return [found.logits]
    return [found.prediction_logits, found.seq_relationship_logits]
