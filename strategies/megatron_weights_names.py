"""Which of Hugging Face's tensors each of Megatron's weights is made of, for every family.

An Entry names one weight of a whole model on one rank, with the numbers that its layer and its expert have in it, and
says how ranks of tensor parallel share it:

    copy         each has all of it
    rows         of the first dimension each has a part; `vocabulary` is padded first
    columns      of the second dimension
    fused        several tensors, of each of which every rank has a part of the rows, one below the other
    grouped      several tensors (query, key, value), interleaved by groups of heads, of which every rank has some
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor of Hugging Face's, or a part of one.

    Args:
        name: of the tensor.
        part: (which, of how many) equal parts of the rows.
        transposed: it is stored as (inputs, outputs).
        index: of an expert, along a first dimension of its own.
    """

    name: str
    part: tuple[int, int] = (0, 1)
    transposed: bool = False
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A weight of Megatron's: see this module.

    Args:
        name: Megatron's.
        kind: how ranks share it.
        refs: what it is made of, as the model in memory has it.
        groups: of heads.
        files: the same as folders have it, where that differs.
        again: it is a second copy, which is read and never written.
        expert: its number, of experts.
    """

    name: str
    kind: str
    refs: tuple[Ref, ...]
    groups: int = 1
    files: tuple[Ref, ...] | None = None
    again: bool = False
    expert: int | None = None


def entries(architecture: Any) -> list[Entry]:
    """Returns all weights of a model; without a Hugging Face config under Megatron's own names."""
    config = architecture.hugging_face
    return list(_FAMILIES["" if config is None else config.model_type](architecture))


def _llama(architecture: Any) -> Iterator[Entry]:
    yield Entry("embedding.word_embeddings.weight", "vocabulary", (Ref("model.embed_tokens.weight"),))
    yield from _head(architecture, "model.embed_tokens.weight", "lm_head.weight")
    yield Entry("decoder.final_layernorm.weight", "copy", (Ref("model.norm.weight"),))
    for number in range(architecture.num_layers):
        mine, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        yield Entry(f"{mine}.input_layernorm.weight", "copy", (Ref(f"{theirs}.input_layernorm.weight"),))
        yield Entry(f"{mine}.pre_mlp_layernorm.weight", "copy", (Ref(f"{theirs}.post_attention_layernorm.weight"),))
        attention = [f"{theirs}.self_attn.{one}_proj" for one in ("q", "k", "v", "o")]
        yield from _attention(architecture, f"{mine}.self_attention", attention)
        if architecture.fields.get("qk_layernorm"):
            for one in ("q", "k"):
                name = f"{mine}.self_attention.{one}_layernorm.weight"
                yield Entry(name, "copy", (Ref(f"{theirs}.self_attn.{one}_norm.weight"),))
        if architecture.fields.get("num_moe_experts"):
            yield from _mixtral_experts(architecture, mine, theirs)
        else:
            projections = [f"{theirs}.mlp.{one}_proj" for one in ("gate", "up", "down")]
            yield from _mlp(architecture, f"{mine}.mlp", projections[:2], projections[2])


def _mixtral_experts(architecture: Any, mine: str, theirs: str) -> Iterator[Entry]:
    gate = (Ref(f"{theirs}.block_sparse_moe.gate.weight"),)
    yield Entry(f"{mine}.mlp.router.weight", "copy", (Ref(f"{theirs}.mlp.gate.weight"),), files=gate)
    for number in range(architecture.fields["num_moe_experts"]):
        expert = f"{mine}.mlp.experts.local_experts.{number}"
        w1, w2, w3 = (Ref(f"{theirs}.block_sparse_moe.experts.{number}.w{one}.weight") for one in (1, 2, 3))
        both = tuple(Ref(f"{theirs}.mlp.experts.gate_up_proj", (one, 2), index=number) for one in (0, 1))
        yield Entry(f"{expert}.linear_fc1.weight", "fused", both, files=(w1, w3), expert=number)
        down = (Ref(f"{theirs}.mlp.experts.down_proj", index=number),)
        yield Entry(f"{expert}.linear_fc2.weight", "columns", down, files=(w2,), expert=number)


def _gpt2(architecture: Any) -> Iterator[Entry]:
    yield Entry("embedding.word_embeddings.weight", "vocabulary", (Ref("transformer.wte.weight"),))
    yield Entry("embedding.position_embeddings.weight", "copy", (Ref("transformer.wpe.weight"),))
    yield from _head(architecture, "transformer.wte.weight", "lm_head.weight")
    for number in range(architecture.num_layers):
        mine, theirs = f"decoder.layers.{number}", f"transformer.h.{number}"
        yield from _copied(f"{mine}.input_layernorm", f"{theirs}.ln_1")
        yield from _copied(f"{mine}.pre_mlp_layernorm", f"{theirs}.ln_2")
        for kind in ("weight", "bias"):
            turned = kind == "weight"
            parts = tuple(Ref(f"{theirs}.attn.c_attn.{kind}", (one, 3), turned) for one in range(3))
            heads = architecture.fields["num_attention_heads"]
            yield Entry(f"{mine}.self_attention.linear_qkv.{kind}", "grouped", parts, heads)
            yield Entry(f"{mine}.mlp.linear_fc1.{kind}", "rows", (Ref(f"{theirs}.mlp.c_fc.{kind}", (0, 1), turned),))
            shared = "columns" if turned else "copy"
            for name, other in (("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc2", "mlp.c_proj")):
                yield Entry(f"{mine}.{name}.{kind}", shared, (Ref(f"{theirs}.{other}.{kind}", (0, 1), turned),))
    yield from _copied("decoder.final_layernorm", "transformer.ln_f")


def _bert(architecture: Any) -> Iterator[Entry]:
    """BERT: the norms at the ends of its layers are Megatron's at the beginnings of the next."""
    yield from _bert_ends(architecture)
    post, layers = architecture.post_norm, architecture.num_layers
    if not post:
        yield from _copied("encoder.final_layernorm", "bert.encoder.ln")
    for number in range(layers):
        mine, theirs = f"encoder.layers.{number}", f"bert.encoder.layer.{number}"
        before = f"bert.encoder.layer.{number - 1}.output.LayerNorm" if number else "bert.embeddings.LayerNorm"
        yield from _copied(f"{mine}.input_layernorm", before if post else f"{theirs}.attention.ln")
        after = f"{theirs}.attention.output.LayerNorm" if post else f"{theirs}.ln"
        yield from _copied(f"{mine}.pre_mlp_layernorm", after)
        names = [f"{theirs}.attention.self.{one}" for one in ("query", "key", "value")]
        yield from _attention(architecture, f"{mine}.self_attention", [*names, f"{theirs}.attention.output.dense"])
        yield from _mlp(architecture, f"{mine}.mlp", [f"{theirs}.intermediate.dense"], f"{theirs}.output.dense")
    if post:
        yield from _copied("encoder.final_layernorm", f"bert.encoder.layer.{layers - 1}.output.LayerNorm")


def _bert_ends(architecture: Any) -> Iterator[Entry]:
    """Its embeddings and heads."""
    for one in ("position", *(["token_type"] if architecture.token_types else [])):
        mine = f"embedding.{one.replace('_', '')}_embeddings.weight"
        yield Entry(mine, "copy", (Ref(f"bert.embeddings.{one}_embeddings.weight"),))
    words = "bert.embeddings.word_embeddings.weight"
    yield Entry("embedding.word_embeddings.weight", "vocabulary", (Ref(words),))
    yield from _head(architecture, words, "cls.predictions.decoder.weight")
    yield Entry("output_layer.bias", "vocabulary", (Ref("cls.predictions.bias"),))
    yield from _copied("lm_head.dense", "cls.predictions.transform.dense")
    yield from _copied("lm_head.layer_norm", "cls.predictions.transform.LayerNorm")
    if architecture.binary_head:
        yield from _copied("binary_head", "cls.seq_relationship")
        yield from _copied("pooler.dense", "bert.pooler.dense")


def _t5(architecture: Any) -> Iterator[Entry]:
    yield Entry("embedding.word_embeddings.weight", "vocabulary", (Ref("shared.weight"),))
    yield from _head(architecture, "shared.weight", "lm_head.weight")
    layers = {"encoder": architecture.encoder_layers or architecture.num_layers, "decoder": architecture.num_layers}
    for side, count in layers.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Entry(f"{side}_relative_pos_emb.relative_attention_bias.weight", "copy", (Ref(bias),))
        yield Entry(f"{side}.final_layernorm.weight", "copy", (Ref(f"{side}.final_layer_norm.weight"),))
        for number in range(count):
            yield from _t5_layer(architecture, side, f"{side}.layers.{number}", f"{side}.block.{number}.layer")


def _t5_layer(architecture: Any, side: str, mine: str, theirs: str) -> Iterator[Entry]:
    last = 2 if side == "decoder" else 1
    yield Entry(f"{mine}.input_layernorm.weight", "copy", (Ref(f"{theirs}.0.layer_norm.weight"),))
    names = [f"{theirs}.0.SelfAttention.{one}" for one in ("q", "k", "v", "o")]
    yield from _attention(architecture, f"{mine}.self_attention", names)
    if side == "decoder":
        heads = architecture.fields["num_attention_heads"]
        query, key, value, output = (Ref(f"{theirs}.1.EncDecAttention.{one}.weight") for one in ("q", "k", "v", "o"))
        yield Entry(f"{mine}.pre_cross_attn_layernorm.weight", "copy", (Ref(f"{theirs}.1.layer_norm.weight"),))
        yield Entry(f"{mine}.cross_attention.linear_q.weight", "rows", (query,))
        yield Entry(f"{mine}.cross_attention.linear_kv.weight", "grouped", (key, value), heads)
        yield Entry(f"{mine}.cross_attention.linear_proj.weight", "columns", (output,))
    yield Entry(f"{mine}.pre_mlp_layernorm.weight", "copy", (Ref(f"{theirs}.{last}.layer_norm.weight"),))
    gated = architecture.fields["gated_linear_unit"]
    inner = [f"{theirs}.{last}.DenseReluDense.{one}" for one in (("wi_0", "wi_1") if gated else ("wi",))]
    yield from _mlp(architecture, f"{mine}.mlp", inner, f"{theirs}.{last}.DenseReluDense.wo")


def _head(architecture: Any, tied: str, own: str) -> Iterator[Entry]:
    """The output layer; where it shares the embedding the last stage of a pipeline has a copy of that."""
    ref = Ref(tied if architecture.tied else own)
    yield Entry("output_layer.weight", "vocabulary", (ref,), again=architecture.tied)


def _attention(architecture: Any, mine: str, theirs: list[str]) -> Iterator[Entry]:
    """Projections to query, key and value, and back."""
    fields = architecture.fields
    groups = fields.get("num_query_groups") or fields["num_attention_heads"]
    biased = fields.get("add_bias_linear", True)
    for kind in ("weight", *(["bias"] if biased or fields.get("add_qkv_bias") else [])):
        refs = tuple(Ref(f"{one}.{kind}") for one in theirs[:3])
        yield Entry(f"{mine}.linear_qkv.{kind}", "grouped", refs, groups)
    yield Entry(f"{mine}.linear_proj.weight", "columns", (Ref(f"{theirs[3]}.weight"),))
    if biased:
        yield Entry(f"{mine}.linear_proj.bias", "copy", (Ref(f"{theirs[3]}.bias"),))


def _mlp(architecture: Any, mine: str, inner: list[str], outer: str) -> Iterator[Entry]:
    biased = architecture.fields.get("add_bias_linear", True)
    for kind in ("weight", *(["bias"] if biased else [])):
        refs = tuple(Ref(f"{one}.{kind}") for one in inner)
        yield Entry(f"{mine}.linear_fc1.{kind}", "fused" if len(refs) > 1 else "rows", refs)
        yield Entry(f"{mine}.linear_fc2.{kind}", "columns" if kind == "weight" else "copy", (Ref(f"{outer}.{kind}"),))


def _copied(mine: str, theirs: str) -> Iterator[Entry]:
    for kind in ("weight", "bias"):
        yield Entry(f"{mine}.{kind}", "copy", (Ref(f"{theirs}.{kind}"),))


_FAMILIES: dict[str, Callable[[Any], Iterator[Entry]]] = {
    "llama": _llama, "mistral": _llama, "qwen2": _llama, "qwen3": _llama, "mixtral": _llama, "gpt2": _gpt2,
    "bert": _bert, "megatron-bert": _bert, "t5": _t5,
}  # fmt: skip
