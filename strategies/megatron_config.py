"""What a run says to megatron-core: the engine's fields of TransformerConfig, and its DDP around a model's chunks."""

from __future__ import annotations

import dataclasses
import difflib
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from .megatron_plugin import MegatronLMPlugin

_MODEL = ("attention_dropout", "hidden_dropout", "attention_softmax_in_fp32")
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step")


class Fields:
    """`other_megatron_args` by the class of megatron-core that has them: `model`, `optimizer` and `ddp`.

    Raises:
        ValueError: no class has a field of that name; the message names the nearest.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.model: dict[str, Any] = {}
        self.optimizer: dict[str, Any] = {}
        self.ddp: dict[str, Any] = {}
        if not given:
            return
        known = {part: _names(*where) for part, where in _CLASSES.items()}
        for name, value in given.items():
            if name in _OVERLAPS and value:
                raise ValueError(
                    f"Expected gradients that are reduced when a window ends, as only then their scale is known. "
                    f"Received: {name}={value!r}. Leave it out."
                )
            parts = [part for part, names in known.items() if name in names]
            if not parts:
                near = difflib.get_close_matches(name, sorted(set().union(*known.values())), n=1)
                advice = f"Did you mean {near[0]!r}?" if near else "Leave it out."
                raise ValueError(f"Expected arguments of megatron-core. Received: {name!r}. {advice}")
            for part in parts:
                getattr(self, part)[name] = value


_CLASSES = {
    "model": ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    "optimizer": ("megatron.core.optimizer", "OptimizerConfig"),
    "ddp": ("megatron.core.distributed", "DistributedDataParallelConfig"),
}


def _names(module: str, kind: str) -> set[str]:
    return {one.name for one in dataclasses.fields(getattr(import_module(module), kind))}


def engine_fields(architecture: Any, plugin: MegatronLMPlugin, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Returns the architecture as the options want it, and the fields of TransformerConfig that they say.

    Raises:
        ValueError: the layers do not go into the stages.
    """
    stages = plugin.pp_degree or 1
    fields: dict[str, Any] = {name: size for name, size in plugin.degrees.items() if size > 1}
    fields |= {name: getattr(plugin, name) for name in _MODEL if getattr(plugin, name) is not None}
    if plugin.expert_tensor_parallel_size is not None:
        fields["expert_tensor_parallel_size"] = plugin.expert_tensor_parallel_size
    if plugin.sequence_parallelism:
        fields["sequence_parallel"] = True
    if dtype != torch.float32:
        fields |= {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    if stages > 1:
        fields["pipeline_dtype"] = dtype
    if plugin.decoder_last_pipeline_num_layers is not None:
        fields["num_layers_in_last_pipeline_stage"] = plugin.decoder_last_pipeline_num_layers
    if plugin.attention_backend is not None:
        backends = import_module("megatron.core.transformer.enums").AttnBackend
        fields["attention_backend"] = backends[plugin.attention_backend]
    virtual = _virtual(architecture, plugin)
    if virtual is not None:
        # With batched messages two stages would take each other's for their own, and gradients be wrong in silence.
        fields |= {"virtual_pipeline_model_parallel_size": virtual, "overlap_p2p_comm": True, "batch_p2p_comm": False}
    return _with_positions(architecture, plugin), {**fields, **_recomputation(plugin)}


def _virtual(architecture: Any, plugin: MegatronLMPlugin) -> int | None:
    per_stage, stages = plugin.num_layers_per_virtual_pipeline_stage, plugin.pp_degree or 1
    if per_stage is None:
        return None
    layers = architecture.num_layers
    virtual, rest = divmod(layers, per_stage * stages)
    if rest or not virtual:
        raise ValueError(
            f"Expected layers for equal virtual stages. Received: {layers} layers, pp_degree={stages}, "
            f"num_layers_per_virtual_pipeline_stage={per_stage}. Choose numbers whose product divides the layers."
        )
    return virtual if virtual > 1 else None


def _recomputation(plugin: MegatronLMPlugin) -> dict[str, Any]:
    granularity = plugin.recompute_granularity or ("selective" if plugin.recompute_activations else None)
    if granularity is None:
        return {}
    found: dict[str, Any] = {"recompute_granularity": granularity}
    if plugin.recompute_method is not None:
        found |= {"recompute_method": plugin.recompute_method, "recompute_num_layers": plugin.recompute_num_layers or 1}
    return found


def _with_positions(architecture: Any, plugin: MegatronLMPlugin) -> Any:
    if not plugin.use_rotary_position_embeddings or getattr(architecture, "positions", None) == "rope":
        return architecture
    if not dataclasses.is_dataclass(architecture):
        raise ValueError(
            "Expected an architecture whose positions can be chosen with use_rotary_position_embeddings. Received: "
            f"{type(architecture).__name__}. Choose them there."
        )
    return dataclasses.replace(architecture, positions="rope")  # type: ignore[type-var]


def data_parallel(
    chunks: list[Any], config: Any, plugin: MegatronLMPlugin, fields: Fields, *, trains: bool
) -> list[torch.nn.Module]:
    """Returns chunks as they are called: in 16 bits where the run is, and in Megatron's DDP where they are trained."""
    if config.bf16 or config.fp16:
        half = import_module("megatron.core.transformer.module").Float16Module
        chunks = [half(config, chunk) for chunk in chunks]
    if not trains:
        return chunks
    distributed = import_module("megatron.core.distributed")
    options = {
        "use_distributed_optimizer": plugin.use_distributed_optimizer,
        "grad_reduce_in_fp32": config.bf16 or config.fp16, **fields.ddp,
    }  # fmt: skip
    settings = distributed.DistributedDataParallelConfig(**options)
    _make_alike(chunks)  # before there are buffers, so that it does not add to the most that is needed
    return [
        distributed.DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def _make_alike(chunks: list[Any]) -> None:
    """Gives replicas the weights of the first of them."""
    state = import_module("megatron.core.parallel_state")
    whole = state.get_data_parallel_group(with_context_parallel=True), state.get_expert_data_parallel_group()
    for chunk in chunks:
        for parameter in chunk.parameters():
            group = whole[0] if getattr(parameter, "allreduce", True) else whole[1]
            if dist.get_world_size(group) > 1:
                dist.broadcast(parameter.detach(), dist.get_global_rank(group, 0), group=group)
