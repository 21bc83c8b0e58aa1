"""The chunks of Megatron's models, and the layers that megatron-core lacks without Transformer Engine.

Imported when a model is built, as it needs the package.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.T5 import T5Model, t5_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer

from .availability import is_transformer_engine_available

_UNSUPPORTED = ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm")


class Norm:
    """Torch's LayerNorm or RMSNorm, by the config, whose gradients Megatron sums under sequence parallel."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        """Returns torch's module, its weights marked."""
        asked = [name for name in _UNSUPPORTED if getattr(config, name)]
        if asked:
            raise ValueError(
                f"Expected {asked[0]}=False without Transformer Engine. Received: {asked[0]}=True. Leave it out."
            )
        kind: Any = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        module = kind(hidden_size, eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module


class BiasedAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's attention, with a bias on the scores where there is one (T5's relative positions)."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Returns (tokens, samples, heads × channels) from query, key and value (tokens, samples, heads, channels)."""
        if attention_bias is None:
            plain: torch.Tensor = super().forward(
                query, key, value, attention_mask, attn_mask_type, None, packed_seq_params
            )
            return plain
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        scores = query @ key.transpose(2, 3) * self.softmax_scale + attention_bias
        shares = self.scale_mask_softmax(scores, attention_mask, None)
        if self.config.sequence_parallel:
            shares = self.attention_dropout(shares)
        else:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                shares = self.attention_dropout(shares)
        return (shares @ value).permute(2, 0, 1, 3).flatten(2).contiguous()


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """A layer whose residual sums are taken of what is normalized already, as BERT's are.

    `input_layernorm` is then the norm at the end of the layer before, or of the embeddings, and the block's final norm
    that at the end of the last layer.
    """

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, **options: Any) -> None:
        super().__init__(config, submodules, layer_number, **options)
        if self.recompute_mlp or self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm:
            raise ValueError(
                f"Expected recompute_modules=['core_attn'] of this BERT. Received: {config.recompute_modules}. Use "
                "that, or recompute_granularity='full'."
            )
        self.first_dropout = 0.0  # of embeddings, which comes after their norm

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **options: Any) -> tuple[Any, Any]:
        """Returns hidden states (tokens, samples, channels) before their norm, and no context."""
        hidden = self.input_layernorm(hidden_states)
        if self.layer_number == 1:
            hidden = torch.nn.functional.dropout(hidden, self.first_dropout, self.training)
        attended = self.self_attention(hidden, attention_mask, rotary_pos_emb=options.get("rotary_pos_emb"))
        add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        hidden = self.pre_mlp_layernorm(add(attended, hidden, self.hidden_dropout))
        add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
        return add(self.mlp(hidden), hidden, self.hidden_dropout), None


def gpt_chunk(architecture: Any, config: Any, *, pre_process: bool, post_process: bool, vp_stage: Any) -> Any:
    """Returns a GPTModel with this rank's layers."""
    engine = is_transformer_engine_available()
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    if not engine:
        _use_norms(spec.layer_specs)
        spec.layer_norm = Norm
    chunk = GPTModel(
        config, spec, architecture.padded_vocab_size(config.tensor_model_parallel_size),
        architecture.sequence_length, pre_process=pre_process, post_process=post_process,
        share_embeddings_and_output_weights=architecture.tied, position_embedding_type=architecture.positions,
        vp_stage=vp_stage, **architecture.rotary,
    )  # fmt: skip
    return _finished(chunk, architecture)


def bert_chunk(architecture: Any, config: Any, *, pre_process: bool, post_process: bool, vp_stage: Any) -> Any:
    """Returns a BertModel with this rank's layers.

    Raises:
        ValueError: sequence parallel, for which the norm of Megatron's BertLMHead needs Apex.
    """
    if config.sequence_parallel:
        raise ValueError(
            "Expected BERT without sequence parallel, which the norm of megatron-core's BertLMHead does not have. "
            "Received: sequence_parallel=True. Use tensor parallel alone."
        )
    if is_transformer_engine_available() and not architecture.post_norm:
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    else:
        spec = _copied(bert_layer_specs.bert_layer_local_spec)
        spec.module = PostNormLayer if architecture.post_norm else TransformerLayer
        _use_norms([spec])
    chunk = BertModel(
        config, architecture.token_types, spec, architecture.padded_vocab_size(config.tensor_model_parallel_size),
        architecture.sequence_length, pre_process=pre_process, post_process=post_process,
        share_embeddings_and_output_weights=architecture.tied, position_embedding_type=architecture.positions,
        add_binary_head=architecture.binary_head, vp_stage=vp_stage,
    )  # fmt: skip
    return _finished(chunk, architecture)


def t5_chunk(architecture: Any, config: Any, *, pre_process: bool, post_process: bool, vp_stage: Any) -> Any:
    """Returns a T5Model.

    Raises:
        ValueError: a pipeline, in which megatron-core's schedules have no place for a second stack of layers, or
            recomputation, which it does not do with relative positions.
    """
    if config.pipeline_model_parallel_size > 1:
        raise ValueError(
            "Expected T5 without a pipeline, which megatron-core's schedules no longer cut between encoder and "
            f"decoder. Received: pipeline_model_parallel_size={config.pipeline_model_parallel_size}. Use tensor and "
            "data parallel."
        )
    if config.recompute_granularity is not None and architecture.positions == "relative":
        raise ValueError(
            "Expected T5 without recomputation, through which megatron-core's relative positions are differentiated "
            f"once per layer. Received: recompute_granularity={config.recompute_granularity!r}. Leave it out."
        )
    layers = architecture.encoder_layers or architecture.num_layers
    encoder = copy.copy(config)
    encoder.num_layers = layers
    specs = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    for spec in specs:
        _use_norms([spec])
        spec.submodules.self_attention.submodules.core_attention = BiasedAttention
    blocks = [TransformerBlockSubmodules([spec] * count, layer_norm=Norm)
              for spec, count in zip(specs, (layers, get_num_layers_to_build(config)))]  # fmt: skip
    chunk = T5Model(
        config, encoder, *blocks, architecture.padded_vocab_size(config.tensor_model_parallel_size),
        architecture.sequence_length, pre_process=pre_process, post_process=post_process,
        share_embeddings_and_output_weights=architecture.tied, position_embedding_type=architecture.positions,
        relative_attention_num_buckets=architecture.relative[0],
        relative_attention_max_distance=architecture.relative[1],
    )  # fmt: skip
    if architecture.tied:  # Megatron's head then has a bias, which T5 has not
        chunk.output_layer.register_parameter("bias", None)
    scale = architecture.output_scale
    if scale != 1.0:
        chunk.lm_head.register_forward_pre_hook(
            lambda module, args, options: ((args[0] * scale, *args[1:]), options), with_kwargs=True
        )
    return _finished(chunk, architecture)


def _use_norms(layer_specs: list[Any]) -> None:
    """Puts Norm in the place of every norm of these layers."""
    for spec in layer_specs:
        parts, attention = spec.submodules, spec.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        if parts.pre_cross_attn_layernorm is not IdentityOp:
            parts.pre_cross_attn_layernorm = Norm
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = Norm


def _copied(spec: Any) -> Any:
    """A spec of the package's that can be changed without changing the package's."""
    spec = copy.copy(spec)
    spec.submodules = copy.copy(spec.submodules)
    spec.submodules.self_attention = copy.copy(spec.submodules.self_attention)
    spec.submodules.self_attention.submodules = copy.copy(spec.submodules.self_attention.submodules)
    return spec


def _finished(chunk: Any, architecture: Any) -> Any:
    """The chunk with its dropout of embeddings, and an output layer that never predicts padding."""
    embedding = getattr(chunk, "embedding", None)
    rate = architecture.embedding_dropout
    if embedding is not None and (rate is not None or architecture.post_norm):
        rate = chunk.config.hidden_dropout if rate is None else rate
        embedding.embedding_dropout.p = 0.0 if architecture.post_norm else rate
        for layer in chunk.encoder.layers if architecture.post_norm else ():
            layer.first_dropout = rate
    for module in () if is_transformer_engine_available() else chunk.modules():
        if isinstance(module, TopKRouter):
            module.gating = functools.partial(_route, module)
    if chunk.post_process and architecture.padded_vocab_size(chunk.config.tensor_model_parallel_size) > (
        architecture.vocab_size
    ):
        chunk.output_layer.register_forward_hook(_without_padding(architecture.vocab_size))
    return chunk


def _route(router: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Scores of experts, in the router's precision; megatron-core 0.16's own need Transformer Engine."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(router.config.moe_router_dtype, hidden.dtype)
    bias = None if router.bias is None else router.bias.to(dtype)
    return torch.nn.functional.linear(hidden.to(dtype), router.weight.to(dtype), bias)


def _without_padding(vocab_size: int) -> Any:
    """A hook of an output layer: logits of tokens that do not exist are too low to count."""

    def hook(layer: Any, args: Any, output: Any) -> Any:
        logits, bias = output
        width = logits.shape[-1]
        start = 0 if width > layer.output_size_per_partition else layer.tp_group.rank() * width
        first = max(vocab_size - start, 0)
        if first >= width:
            return output
        lowest = torch.finfo(logits.dtype).min
        kept = logits[..., :first]
        return torch.cat([kept, logits.new_full((*logits.shape[:-1], width - first), lowest)], dim=-1), bias

    return hook
