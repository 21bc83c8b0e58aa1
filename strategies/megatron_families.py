"""Hugging Face's configs as Megatron's architectures: exactly, or not at all.

Each family says which keys it reads and which values of the others mean nothing to the numbers; any other key of a
config that is not what its class has by default is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from .availability import has_package
from .megatron_models import Architecture

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
                "relu": "relu", "silu": "silu", "swish": "silu"}  # fmt: skip
_NEUTRAL = frozenset((
    "architectures", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "cls_token_id",
    "decoder_start_token_id", "dtype", "eos_token_id", "id2label", "label2id", "max_window_layers", "model_type",
    "n_ctx", "output_attentions", "output_hidden_states", "output_past", "pad_token_id", "pretraining_tp",
    "problem_type", "reorder_and_upcast_attn", "return_dict", "sep_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
    "initializer_factor", "layer_types", "num_hidden_layers", "is_encoder_decoder", "gradient_checkpointing",
))  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hugging_face_config(config: Any) -> Any:
    """Returns a config of transformers: itself, or of a dict with `model_type`, a folder, or a model.

    Raises:
        ImportError: transformers is not installed.
        ValueError: it is none of these.
    """
    if hasattr(config, "model_type"):
        return config
    if hasattr(config, "config"):
        return hugging_face_config(config.config)
    if not has_package("transformers"):
        raise ImportError("Expected the package transformers. Received: no such package. Install it: pip install "
                          "transformers.")  # fmt: skip
    auto = import_module("transformers").AutoConfig
    if isinstance(config, Mapping):
        return auto.for_model(**config)
    if isinstance(config, (str, Path)) and (Path(config) / "config.json").is_file():
        return auto.from_pretrained(str(config), local_files_only=True)
    raise ValueError(
        "Expected a config of transformers, a dict with model_type, or a folder with config.json. Received: "
        f"{config!r}. Pass one of these, or a dict of TransformerConfig's fields."
    )


def from_hugging_face(config: Any) -> Architecture:
    """Returns the architecture that computes what the model of this config does.

    Raises:
        ValueError: the family is unknown, or a key says what Megatron's model does not compute.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise ValueError(
            f"Expected a config of {', '.join(sorted(FAMILIES))}. Received: model_type={family!r}. Describe the model "
            "by TransformerConfig's fields, or give MegatronStrategy the function that builds it."
        )
    make, keys = FAMILIES[family]
    defaults = type(config)().to_dict()
    for name, value in config.to_dict().items():
        if name not in keys | _NEUTRAL and value != defaults.get(name):
            raise _inexact(name, value, f"Leave it at {defaults.get(name)!r}.")
    return make(config)


def _llama(config: Any) -> Architecture:
    """Llama and those that differ from it in biases, norms of queries and keys, windows or experts."""
    biases = {"attention_bias": bool(getattr(config, "attention_bias", False)),
              "mlp_bias": bool(getattr(config, "mlp_bias", False))}  # fmt: skip
    if len(set(biases.values())) > 1 and config.model_type != "qwen3":
        name = "attention_bias" if biases["attention_bias"] else "mlp_bias"
        raise _inexact(name, True, "Megatron has biases in all linear layers or in none.")
    if config.model_type == "qwen3" and biases["attention_bias"]:
        raise _inexact("attention_bias", True, "Megatron has biases in all linear layers or in none.")
    heads = config.num_attention_heads
    fields = {
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size, "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "normalization": "RMSNorm", "layernorm_epsilon": config.rms_norm_eps, "gated_linear_unit": True,
        "activation_func": _activation("hidden_act", config.hidden_act), "add_bias_linear": biases["attention_bias"],
        "add_qkv_bias": config.model_type == "qwen2", "qk_layernorm": config.model_type == "qwen3",
        "hidden_dropout": 0.0, "attention_dropout": float(config.attention_dropout or 0.0),
        "init_method_std": config.initializer_range, **_window(config), **_experts(config),
    }  # fmt: skip
    return Architecture(
        kind="gpt", fields=fields, vocab_size=config.vocab_size, sequence_length=config.max_position_embeddings,
        positions="rope", rotary=_rotary(config), tied=config.tie_word_embeddings, hugging_face=config,
    )  # fmt: skip


def _gpt2(config: Any) -> Architecture:
    """GPT-2."""
    fields = {
        "num_layers": config.n_layer, "hidden_size": config.n_embd, "num_attention_heads": config.n_head,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd, "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": _activation("activation_function", config.activation_function),
        "hidden_dropout": config.resid_pdrop, "attention_dropout": config.attn_pdrop,
        "init_method_std": config.initializer_range,
    }  # fmt: skip
    return Architecture(
        kind="gpt", fields=fields, vocab_size=config.vocab_size, sequence_length=config.n_positions,
        tied=config.tie_word_embeddings, embedding_dropout=config.embd_pdrop, hugging_face=config,
    )  # fmt: skip


def _bert(config: Any) -> Architecture:
    """BERT with its head of masked words, and that of next sentences where its class has one."""
    fields = {
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
        "layernorm_epsilon": config.layer_norm_eps, "activation_func": _activation("hidden_act", config.hidden_act),
        "hidden_dropout": config.hidden_dropout_prob, "attention_dropout": config.attention_probs_dropout_prob,
        "init_method_std": config.initializer_range,
    }  # fmt: skip
    if config.hidden_act != "gelu":
        raise _inexact("hidden_act", config.hidden_act, "The head of Megatron's BERT has 'gelu'.")
    return Architecture(
        kind="bert", fields=fields, vocab_size=config.vocab_size, sequence_length=config.max_position_embeddings,
        tied=config.tie_word_embeddings, token_types=config.type_vocab_size, post_norm=config.model_type == "bert",
        binary_head=any("ForPreTraining" in name for name in config.architectures or ()), hugging_face=config,
    )  # fmt: skip


def _t5(config: Any) -> Architecture:
    """T5, whose dropout inside of feed-forward layers Megatron's has not."""
    if config.dropout_rate:
        raise _inexact("dropout_rate", config.dropout_rate, "Megatron's T5 drops at other places. Set it to 0.")
    fields = {
        "num_layers": config.num_decoder_layers, "hidden_size": config.d_model, "ffn_hidden_size": config.d_ff,
        "num_attention_heads": config.num_heads, "kv_channels": config.d_kv, "softmax_scale": 1.0,
        "normalization": "RMSNorm", "layernorm_epsilon": config.layer_norm_epsilon, "add_bias_linear": False,
        "activation_func": _activation("feed_forward_proj", config.dense_act_fn),
        "gated_linear_unit": config.is_gated_act, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return Architecture(
        kind="t5", fields=fields, vocab_size=config.vocab_size, sequence_length=getattr(config, "n_positions", 512),
        positions="relative", tied=config.tie_word_embeddings, encoder_layers=config.num_layers,
        relative=(config.relative_attention_num_buckets, config.relative_attention_max_distance),
        output_scale=config.d_model**-0.5 if config.scale_decoder_outputs else 1.0, hugging_face=config,
    )  # fmt: skip


def _window(config: Any) -> dict[str, Any]:
    """A sliding window of all layers, which counts the token itself."""
    kinds = set(getattr(config, "layer_types", None) or ())
    width = getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"} or (len(kinds) > 1 and width is not None):
        raise _inexact("layer_types", config.layer_types, "Give all layers one kind of attention.")
    if width is None or kinds == {"full_attention"} or width >= config.max_position_embeddings:
        return {}
    return {"window_size": (width - 1, 0)}


def _experts(config: Any) -> dict[str, Any]:
    """Mixtral's experts, whose router takes the softmax of the chosen ones' scores."""
    if config.model_type != "mixtral":
        return {}
    for name in ("output_router_logits", "router_jitter_noise"):
        if getattr(config, name):
            raise _inexact(name, getattr(config, name), "Leave it out; Megatron's own losses of routers are fields.")
    return {
        "num_moe_experts": config.num_local_experts, "moe_router_topk": config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }  # fmt: skip


def _rotary(config: Any) -> dict[str, Any]:
    said = dict(config.rope_parameters or {})
    base, kind = said.get("rope_theta", 10000.0), said.get("rope_type", "default")
    if said.get("partial_rotary_factor", 1.0) != 1.0:
        return {"rotary_base": base, "rotary_percent": said["partial_rotary_factor"]}
    if kind == "default":
        return {"rotary_base": base}
    if kind == "linear":
        return {"rotary_base": base, "seq_len_interpolation_factor": said["factor"]}
    if kind == "llama3" and all(said.get(name) == value for name, value in _LLAMA3.items()):
        return {"rotary_base": base, "rope_scaling": True, "rope_scaling_factor": said["factor"]}
    raise _inexact("rope_parameters", said, f"Megatron has 'default', 'linear', and 'llama3' with {_LLAMA3}.")


def _activation(name: str, value: str) -> str:
    if value not in _ACTIVATIONS:
        raise _inexact(name, value, f"Megatron has {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[value]


def _inexact(name: str, value: Any, advice: str) -> ValueError:
    return ValueError(f"Expected a config that Megatron's model computes exactly. Received: {name}={value!r}. {advice}")


def _keys(*names: str) -> frozenset[str]:
    return frozenset((*names, "vocab_size", "tie_word_embeddings", "initializer_range"))


_LLAMA_KEYS = _keys(
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias", "attention_dropout", "mlp_bias",
    "head_dim",
)  # fmt: skip
_WINDOW_KEYS = _LLAMA_KEYS | {"sliding_window", "use_sliding_window"}
_BERT_KEYS = _keys(
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size", "layer_norm_eps",
)  # fmt: skip
FAMILIES: dict[str, tuple[Callable[[Any], Architecture], frozenset[str]]] = {
    "llama": (_llama, _LLAMA_KEYS),
    "mistral": (_llama, _WINDOW_KEYS),
    "qwen2": (_llama, _WINDOW_KEYS),
    "qwen3": (_llama, _WINDOW_KEYS),
    "mixtral": (_llama, _WINDOW_KEYS | {"num_local_experts", "num_experts_per_tok", "output_router_logits",
                                        "router_jitter_noise", "router_aux_loss_coef"}),
    "gpt2": (_gpt2, _keys("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "activation_function", "resid_pdrop",
                          "embd_pdrop", "attn_pdrop", "layer_norm_epsilon")),
    "bert": (_bert, _BERT_KEYS),
    "megatron-bert": (_bert, _BERT_KEYS),
    "t5": (_t5, _keys("d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "dropout_rate",
                      "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
                      "feed_forward_proj", "dense_act_fn", "is_gated_act", "scale_decoder_outputs", "n_positions")),
}  # fmt: skip
