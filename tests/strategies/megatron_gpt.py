"""A tiny GPT of megatron-core and its data, for tests of the Megatron engine."""

from __future__ import annotations

import zlib
from typing import Any

import torch

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE = 4, 16, 4, 32, 8


class Norm(torch.nn.LayerNorm):
    """A layer norm that marks its weights for sequence parallel, whose gradients Megatron then sums."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def config(**options: Any) -> Any:
    """Returns a TransformerConfig without fused kernels."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**{
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "use_cpu_initialization": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
        "persist_layer_norm": False, "attention_softmax_in_fp32": True, **options,
    })  # fmt: skip


def gpt(config: Any, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Returns a GPTModel, or the chunk of it that this rank has."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    spec = TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=Norm)
    return GPTModel(
        config, spec, VOCABULARY, SEQUENCE, pre_process=pre_process, post_process=post_process,
        share_embeddings_and_output_weights=False, vp_stage=vp_stage,
    )  # fmt: skip


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    """Returns `count` samples of SEQUENCE + 1 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count, SEQUENCE + 1), generator=generator)


def inputs(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model's forward is called with, for a batch of tokens."""
    length = batch.shape[1] - 1
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    positions = torch.arange(length).expand(len(batch), -1)
    return {"input_ids": batch[:, :-1], "position_ids": positions, "attention_mask": mask, "labels": batch[:, 1:]}


def loss(output: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return output.float().mean()


def fill(*chunks: Any) -> None:
    """Gives weights values that depend on their name and their place in the whole model alone."""
    for chunk in chunks:
        for part in _parts(chunk.sharded_state_dict()):
            generator = torch.Generator().manual_seed(zlib.crc32(part.key.encode()))
            whole = torch.randn(part.global_shape, generator=generator) * 0.1
            begin = part.prepend_axis_num
            places = [slice(start, start + size) for start, size in zip(part.global_offset[begin:], part.local_shape)]
            with torch.no_grad():
                part.data.copy_(whole[(*part.global_offset[:begin], *places)])


def _parts(state: Any) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    return [value for value in nested_values(state) if isinstance(value, ShardedTensor)]


class Batch:
    """A micro-batch of tokens for the tiny GPT."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.inputs = inputs(batch)
        self.mask = (batch[:, 1:] != 0).float()  # token 0 is never to be predicted: samples count differently

    def run(self, chunk: Any) -> Any:
        return chunk(**self.inputs)

    def loss(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (output.float() * self.mask).sum(), self.mask.sum()


class Tiny:
    """The tiny GPT as an engine builds it, with weights that depend on their place alone."""

    num_layers = LAYERS

    def config(self, **engine: Any) -> Any:
        return config(**engine)

    def build(self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        chunk = gpt(config, pre_process, post_process, vp_stage)
        fill(chunk)
        return chunk

    def batch(self, data: torch.Tensor) -> Batch:
        return Batch(data)
