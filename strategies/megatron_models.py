"""What a model of Megatron is, before any engine: its architecture, from which each rank builds its chunks.

An engine needs four things of it, each a method of `Architecture`:

    config = architecture.config(tensor_model_parallel_size=2, …)   # a TransformerConfig with the engine's fields
    chunk = architecture.build(config, pre_process=…, post_process=…, vp_stage=…)     # this rank's part of the model
    batch = architecture.batch(data)            # a micro-batch as the model takes it: a Batch
    losses = batch.run(chunk)                   # what the chunk gives; on the last stage: a loss for every token
    total, count = batch.loss(losses)           # their sum, and how many tokens they are of

Without labels, `batch.run` gives logits. Where Transformer Engine is installed its layers are used, else Megatron's
own with the norms of megatron_layers.py.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch.nn import functional as F

from .availability import has_package
from .megatron_batches import Batch, bert_batch, gpt_batch, t5_batch

KINDS = ("gpt", "bert", "t5")
ACTIVATIONS: dict[str, Any] = {
    "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu, "silu": F.silu,
}  # fmt: skip
_BATCHES = {"gpt": gpt_batch, "bert": bert_batch, "t5": t5_batch}
_ENGINE = ("_parallel", "pipeline_", "recompute_", "_dtype", "grad_", "overlap_", "batch_p2p")
_ABSENT = ("multi_latent_attention", "mtp_num_layers", "experimental_attention_variant")  # other models than these
_ALIASES = {"seq_length": "sequence_length", "max_sequence_length": "sequence_length"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model of Megatron, whatever the ranks: its kind, its TransformerConfig's fields, and what is around it.

    Args:
        kind: "gpt", "bert" or "t5".
        fields: those of Megatron's TransformerConfig, without those of parallelism; an activation is a function or
            one of "gelu", "gelu_tanh", "relu", "silu".
        vocab_size: tokens; `padded_vocab_size` is what is allocated.
        sequence_length: the longest sequence, of T5 on both sides.
        positions: "learned_absolute", "rope", "relative" (T5) or "none".
        rotary: options of rotary positions (`rotary_base`, `rotary_percent`, `rope_scaling`, …).
        tied: the output layer shares the embedding.
        vocab_multiple: the vocabulary of each rank is padded to a multiple of this; padding is never predicted.
        token_types: of BERT; 0 for none.
        binary_head: of BERT, for the next sentence.
        post_norm: of BERT: norms come after the residual sums, as BERT's authors had it.
        relative: of T5: (buckets, longest distance).
        output_scale: of T5: what hidden states are multiplied by before the output layer.
        embedding_dropout: by default `hidden_dropout`.
        encoder_layers: of T5; by default `num_layers`.
        hugging_face: the config that this was made from.
    """

    kind: str
    fields: Mapping[str, Any]
    vocab_size: int
    sequence_length: int
    positions: str = "learned_absolute"
    rotary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool = True
    vocab_multiple: int = 1
    token_types: int = 0
    binary_head: bool = False
    post_norm: bool = False
    relative: tuple[int, int] = (32, 128)
    output_scale: float = 1.0
    embedding_dropout: float | None = None
    encoder_layers: int | None = None
    hugging_face: Any = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Expected a kind of {', '.join(KINDS)}. Received: kind={self.kind!r}. Choose one.")
        if self.kind != "t5" and self.positions == "relative":
            raise ValueError("Expected positions of T5 alone to be relative. Received: kind="
                             f"{self.kind!r}, positions='relative'. Use 'rope' or 'learned_absolute'.")  # fmt: skip

    def config(self, **engine: Any) -> Any:
        """Returns Megatron's TransformerConfig of this model with an engine's fields.

        Raises:
            ValueError: a field is set here and by the engine, differently.
        """
        fields = dict(self.fields)
        for name, value in engine.items():
            if name in fields and fields[name] != value:
                raise ValueError(
                    f"Expected {name} once. Received: {name}={fields[name]!r} of the model and {value!r} of the engine."
                    " Leave one out."
                )
        activation = fields.get("activation_func")
        if isinstance(activation, str):
            fields["activation_func"] = _activation(activation)
        return core("transformer.transformer_config").TransformerConfig(**{**fields, **engine})

    def build(self, config: Any, *, pre_process: bool = True, post_process: bool = True, vp_stage: Any = None) -> Any:
        """Returns one chunk: a GPTModel, BertModel or T5Model with the layers of this rank's (virtual) stage."""
        chunks = import_module(".megatron_chunks", __package__)
        make = getattr(chunks, f"{self.kind}_chunk")
        return make(self, config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)

    def batch(self, data: Any) -> Batch:
        """Returns a micro-batch as the model takes it; see megatron_batches.py for what `data` may be."""
        return _BATCHES[self.kind](data, self)

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Returns the rows of the embedding, so that each rank has as many."""
        multiple = self.vocab_multiple * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_layers(self) -> int:
        """Layers of the decoder, or of BERT's encoder."""
        return int(self.fields["num_layers"])


def architecture(config: Any, kind: str = "gpt", **changes: Any) -> Architecture:
    """Returns the architecture that a config describes; `changes` replace fields of Architecture.

    `config` is an Architecture; a dict of TransformerConfig's fields and Architecture's own (`vocab_size`,
    `sequence_length`, …); a Hugging Face config, or a dict with its `model_type`; or a folder with a config.json.

    Raises:
        ValueError: a key is unknown (the message names the nearest), belongs to the engine, or, of a Hugging Face
            config, says what Megatron's model does not compute exactly.
    """
    if isinstance(config, Architecture):
        return dataclasses.replace(config, **changes)
    if isinstance(config, Mapping) and "model_type" not in config:
        return _plain({**config, **changes}, kind)
    families = import_module(".megatron_families", __package__)
    made: Architecture = families.from_hugging_face(families.hugging_face_config(config))
    return dataclasses.replace(made, **changes)


def core(module: str) -> Any:
    """Returns a module of megatron.core.

    Raises:
        ImportError: the package is not installed.
    """
    if not has_package("megatron.core"):
        raise ImportError(
            "Expected the package megatron-core. Received: no such package. "
            "Install it: pip install 'drivetrain[megatron]'."
        )
    return import_module(f"megatron.core.{module}")


def _plain(config: dict[str, Any], kind: str) -> Architecture:
    """The architecture of a dict whose keys are fields of TransformerConfig or of Architecture."""
    config = {_ALIASES.get(name, name): value for name, value in config.items()}
    own = {one.name for one in dataclasses.fields(Architecture)} - {"kind", "fields", "hugging_face"}
    known = {one.name for one in dataclasses.fields(core("transformer.transformer_config").TransformerConfig)}
    for name in config:
        if name not in own | known:
            near = difflib.get_close_matches(name, sorted(own | known), n=1)
            advice = f"Did you mean {near[0]!r}?" if near else "Leave it out."
            raise ValueError(f"Expected fields of Megatron's TransformerConfig. Received: {name!r}. {advice}")
        if name not in own and any(part in name for part in _ENGINE):
            raise ValueError(
                f"Expected fields of the model. Received: {name}={config[name]!r}, which the engine sets. Give it to "
                "MegatronStrategy or MegatronLMPlugin."
            )
        if name in _ABSENT and config[name]:
            raise ValueError(
                f"Expected a model of kind {kind!r}. Received: {name}={config[name]!r}. Build it with megatron-core, "
                "and give MegatronStrategy the function that does."
            )
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "sequence_length")
               if name not in config]  # fmt: skip
    if missing:
        raise ValueError(f"Expected a model's sizes. Received: no {', '.join(missing)}. Set them.")
    around = {name: config.pop(name) for name in own & set(config)}
    return Architecture(kind=kind, fields=config, **around)


def _activation(name: str) -> Any:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"Expected activation_func of {', '.join(ACTIVATIONS)}, or a function. Received: {name!r}. Choose one."
        )
    return ACTIVATIONS[name]
