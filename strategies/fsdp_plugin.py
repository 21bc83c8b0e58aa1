"""The options of FSDP, versions 1 and 2, under Accelerate's names, from arguments and from what a launch says.

A launch says FSDP_…: each variable stands for the field of its name (FSDP_OFFLOAD_PARAMS for `cpu_offload`,
FSDP_TRANSFORMER_CLS_TO_WRAP for `transformer_cls_names_to_wrap`).
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from . import environment, wrapping

if TYPE_CHECKING:
    from .base import Strategy

logger = logging.getLogger(__name__)

FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
           "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}  # fmt: skip
_RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
_UNSAID = {"sync_module_states": None, "use_orig_params": True}
_WITHOUT_EFFECT = {  # in version 2: field -> the value that is the only one there, and why
    "use_orig_params": (True, "parameters always keep their names"),
    "limit_all_gathers": (True, "memory never runs ahead of the device"),
    "backward_prefetch": (BackwardPrefetch.BACKWARD_PRE, "the backward always prefetches one unit ahead"),
    "state_dict_config": (None, "state_dict_type alone decides"),
    "optim_state_dict_config": (None, "state_dict_type alone decides"),
}


@dataclass
class FullyShardedDataParallelPlugin:
    """How FSDP shards a model; names, defaults and accepted values are those of Accelerate 1.15.

    Args:
        fsdp_version: 1 (FullyShardedDataParallel) or 2 (`fully_shard`).
        sharding_strategy: version 1's word for what is sharded; under version 2 it says `reshard_after_forward`, and
            HYBRID_SHARD that nodes hold replicas.
        reshard_after_forward: version 2: False keeps a unit whole until its backward; a number reshards to so many
            ranks. Version 1: the same as `sharding_strategy`.
        backward_prefetch: version 1: when the next unit is gathered in a backward.
        mixed_precision_policy: the units' dtypes: torch's object, a dict of its fields, or "bf16" for all of them.
            None: float32 parameters, and what the run's precision computes in 16 bits.
        auto_wrap_policy: which modules are units: a word, a function, or a collection of modules or classes; None for
            the layers that the model names (`_no_split_modules`), else those it keeps in lists.
        cpu_offload: parameters, gradients and optimizer state on the CPU.
        ignored_modules: modules, or a regular expression of their names, that stay whole on each rank; their gradients
            are averaged over the ranks.
        state_dict_type: what a checkpoint holds of a model: parts of each rank (the default, in version 1 too), or one
            whole state from the first.
        use_orig_params: version 1: parameters keep their names and shapes, so that an optimizer may be made before.
        param_init_fn: gives a module on "meta" its values; called with each module that has parameters of its own.
        sync_module_states: the first rank's weights go to all before they are sharded; None for yes.
        forward_prefetch: the next unit is gathered while one computes its forward.
        activation_checkpointing: a unit's activations are computed again in its backward.
        cpu_ram_efficient_loading: only the first process has weights when the model is prepared.
        transformer_cls_names_to_wrap: the classes of units by name, for "transformer_based_wrap".
        min_num_params: the least elements of a unit, for "size_based_wrap".
        activation_checkpointing_offload: drivetrain's as an argument, Accelerate's as a launch key: what units need to
            compute their activations again waits on the CPU.

    Raises:
        ValueError: a value does not exist, or has no meaning in this version; the message shows it.
    """

    slot: ClassVar[str] = "fsdp_plugin"

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None
    activation_checkpointing_offload: bool | None = None

    def __post_init__(self) -> None:
        launched = environment.group("FSDP_")
        version = self.fsdp_version
        self.fsdp_version = version = launched.agreed("version", version, launched.integer("version", 1))
        if version not in (1, 2):
            raise ValueError(f"Expected fsdp_version 1 or 2. Received: fsdp_version={version!r}. Choose one.")
        self._given = {one.name for one in fields(self) if getattr(self, one.name) not in (None, one.default)}
        self._set_sharding(launched)
        self._set_words(launched)
        self._set_flags(launched)
        self._set_wrapping(launched)
        self.set_cpu_offload()
        self.set_state_dict_type()
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy)
        self.validate_mixed_precision_policy()
        self.validate_cpu_offload()
        if version == 2:
            self._tell_of_no_effect()

    def strategy(self, parallelism: Any = None) -> Strategy:
        """Returns the engine with these options; a ParallelismConfig says how ranks are arranged."""
        engine: Strategy
        if self.fsdp_version == 2 and parallelism is not None:
            engine = parallelism.strategy(self)
            return engine
        module, name = ("fsdp1", "FSDP1Strategy") if self.fsdp_version == 1 else ("fsdp", "FSDPStrategy")
        options = {} if parallelism is None else {"parallelism": parallelism}
        engine = getattr(import_module(f".{module}", __package__), name)(self, **options)
        return engine

    @property
    def full_state(self) -> bool:
        """Whether checkpoints hold whole weights, written by the first rank."""
        return bool(self.state_dict_type is StateDictType.FULL_STATE_DICT)

    @property
    def hybrid(self) -> bool:
        """Whether there are several replicas, each of them sharded."""
        return str(getattr(self.sharding_strategy, "name", self.sharding_strategy)).startswith("HYBRID")

    @property
    def offloads(self) -> bool:
        """Whether parameters lie on the CPU."""
        if isinstance(self.cpu_offload, CPUOffload):
            return bool(self.cpu_offload.offload_params)
        return isinstance(self.cpu_offload, CPUOffloadPolicy)

    def offload_on(self, device: torch.device) -> Any:
        """Returns version 2's policy of offloading for a device."""
        if isinstance(self.cpu_offload, CPUOffloadPolicy) and device.type == "cpu":
            return replace(self.cpu_offload, pin_memory=False)  # there is no accelerator whose copies it could speed
        return self.cpu_offload

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Sets what checkpoints hold of a model: a StateDictType or its name."""
        value = state_dict_type if state_dict_type is not None else self.state_dict_type
        value = "SHARDED_STATE_DICT" if value is None else value
        kind = _member(StateDictType, value, "state_dict_type", FSDP_STATE_DICT_TYPE)
        if kind is StateDictType.LOCAL_STATE_DICT:
            raise ValueError(
                "Expected a state that other numbers of processes can load. Received: state_dict_type="
                "LOCAL_STATE_DICT. Use SHARDED_STATE_DICT."
            )
        self.state_dict_type = kind

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Resolves "transformer_based_wrap" for a model: the classes that were named, else those that it names."""
        if self._wraps != "TRANSFORMER_BASED_WRAP" or callable(self.auto_wrap_policy):
            return
        names = self.transformer_cls_names_to_wrap or wrapping.named_layers(model)
        if not names:
            raise ValueError(
                "Expected the classes of layers to wrap. Received: transformer_cls_names_to_wrap=None, and a "
                f"{type(model).__name__} without _no_split_modules. Name the classes, or leave auto_wrap_policy out."
            )
        classes = wrapping.by_class(names, model)
        self.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)

    def policy_for(self, model: torch.nn.Module) -> Any:
        """Returns what `wrapping.units` takes as its policy for a model."""
        self.set_auto_wrap_policy(model)
        return False if self._wraps == "NO_WRAP" else self.auto_wrap_policy

    def ignored_in(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Returns the modules of a model that are not sharded."""
        if self.ignored_modules is None:
            return []
        if not isinstance(self.ignored_modules, str):
            return list(self.ignored_modules)
        pattern = re.compile(self.ignored_modules)
        return [module for name, module in model.named_modules() if name and pattern.fullmatch(name)]

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Sets the units' dtypes: all of them by a word or a dtype, or one by one by a dict or torch's own object."""
        kind = MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy
        current = self.mixed_precision_policy
        if isinstance(current, (MixedPrecision, MixedPrecisionPolicy)) and not override:
            return
        if isinstance(mixed_precision, (MixedPrecision, MixedPrecisionPolicy)):
            self.mixed_precision_policy = mixed_precision
        elif isinstance(mixed_precision, dict):
            self.mixed_precision_policy = kind(**{name: _dtype(value) for name, value in mixed_precision.items()})
        else:
            dtype = _dtype(mixed_precision)
            last = "buffer_dtype" if self.fsdp_version == 1 else "output_dtype"
            third = {last: torch.float32 if buffer_autocast else dtype}
            self.mixed_precision_policy = kind(param_dtype=dtype, reduce_dtype=dtype, **third)

    def validate_mixed_precision_policy(self) -> None:
        """Raises ValueError for a policy of the other version."""
        self._of_version("mixed_precision_policy", MixedPrecision, MixedPrecisionPolicy)

    def set_cpu_offload(self) -> None:
        """Makes `cpu_offload` the object that the version has for it."""
        if isinstance(self.cpu_offload, bool):
            if self.fsdp_version == 1:
                self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
            else:
                self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raises ValueError for an object of the other version."""
        self._of_version("cpu_offload", CPUOffload, OffloadPolicy)

    def _of_version(self, name: str, first: type, second: type) -> None:
        value, expected = getattr(self, name), first if self.fsdp_version == 1 else second
        if value is not None and not isinstance(value, expected):
            raise ValueError(
                f"Expected {name} as a {expected.__name__} for fsdp_version={self.fsdp_version}. Received: {value!r}. "
                f"Use the other version, or a {expected.__name__}."
            )

    def _set_sharding(self, launched: environment.Group) -> None:
        word = launched.agreed("sharding_strategy", self.sharding_strategy, launched.text("sharding_strategy"))
        reshard = launched.agreed(
            "reshard_after_forward", self.reshard_after_forward, launched.text("reshard_after_forward")
        )
        if self.fsdp_version == 1:
            if reshard is not None and word is None and not _is_truth(reshard):
                word = reshard
            self.sharding_strategy = self.reshard_after_forward = _member(
                ShardingStrategy, word or "FULL_SHARD", "sharding_strategy", FSDP_SHARDING_STRATEGY
            )
            return
        kind = None
        if word is not None or isinstance(reshard, ShardingStrategy):
            kind = _member(ShardingStrategy, word or reshard, "sharding_strategy", FSDP_SHARDING_STRATEGY)
            if kind is ShardingStrategy.NO_SHARD:
                raise ValueError(
                    "Expected a strategy that shards. Received: sharding_strategy=NO_SHARD with fsdp_version=2. "
                    "Use strategy='ddp'."
                )
        self.sharding_strategy = kind
        self.reshard_after_forward = _reshard(reshard, kind)

    def _set_words(self, launched: environment.Group) -> None:
        word = launched.agreed("backward_prefetch", self.backward_prefetch, launched.text("backward_prefetch"))
        if isinstance(word, str) and word.upper() == "NO_PREFETCH":
            word = None
        if word is not None:
            word = _member(BackwardPrefetch, word, "backward_prefetch", FSDP_BACKWARD_PREFETCH)
        self.backward_prefetch = word
        for name in ("state_dict_type", "ignored_modules"):
            setattr(self, name, launched.agreed(name, getattr(self, name), launched.text(name)))

    def _set_flags(self, launched: environment.Group) -> None:
        self.cpu_offload = launched.agreed("offload_params", self.cpu_offload, launched.flag("offload_params"))
        for name in ("use_orig_params", "sync_module_states", "forward_prefetch", "activation_checkpointing",
                     "activation_checkpointing_offload", "cpu_ram_efficient_loading"):  # fmt: skip
            said = launched.flag(name) if launched.text(name) is not None else None
            value = launched.agreed(name, getattr(self, name), said)
            setattr(self, name, _UNSAID.get(name, False) if value is None else value)
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError(
                "Expected activation_checkpointing, of which activation_checkpointing_offload keeps the inputs on the "
                "CPU. Received: activation_checkpointing=False. Set it."
            )
        if self.cpu_ram_efficient_loading and self.sync_module_states is False:
            raise ValueError(
                "Expected sync_module_states with cpu_ram_efficient_loading, under which only the first process has "
                "weights. Received: sync_module_states=False. Leave it out."
            )

    def _set_wrapping(self, launched: environment.Group) -> None:
        names = launched.text("transformer_cls_to_wrap")
        said = None if names is None else [name.strip() for name in names.split(",")]
        self.transformer_cls_names_to_wrap = launched.agreed(
            "transformer_cls_to_wrap", _listed(self.transformer_cls_names_to_wrap), said
        )
        self.min_num_params = launched.agreed(
            "min_num_params", self.min_num_params, launched.integer("min_num_params", 0)
        )
        policy = launched.agreed("auto_wrap_policy", self.auto_wrap_policy, launched.text("auto_wrap_policy"))
        self._wraps = policy.upper() if isinstance(policy, str) else None
        if policy is None and self.transformer_cls_names_to_wrap:
            self._wraps = "TRANSFORMER_BASED_WRAP"
        if self._wraps not in (None, *FSDP_AUTO_WRAP_POLICY):
            raise ValueError(
                f"Expected auto_wrap_policy to be one of {', '.join(FSDP_AUTO_WRAP_POLICY)}, a function, or modules. "
                f"Received: auto_wrap_policy={policy!r}. Choose one."
            )
        self.auto_wrap_policy = None if isinstance(policy, str) else policy
        if self._wraps == "SIZE_BASED_WRAP":
            self.auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=self.min_num_params)

    def _tell_of_no_effect(self) -> None:
        for name, (only, why) in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if name in self._given and value not in (None, only):
                logger.warning("%s=%r has no effect with fsdp_version=2: %s.", name, value, why)


def _reshard(value: Any, kind: ShardingStrategy | None) -> bool | int:
    if value is None or isinstance(value, ShardingStrategy):
        return True if kind is None else _RESHARDS[kind.name]
    if isinstance(value, str) and value.upper() in _RESHARDS:
        return _RESHARDS[value.upper()]
    if _is_truth(value):
        return value if isinstance(value, bool) else json.loads(str(value).lower())
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"Expected reshard_after_forward as true, false or a number of ranks. Received: {value!r}. Correct it."
        ) from None


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in ("true", "false")


def _member(kind: Any, value: Any, name: str, words: list[str]) -> Any:
    if isinstance(value, kind):
        return value
    text = str(value).upper()
    if text.isdigit() and 1 <= int(text) <= len(words):  # as Accelerate numbers them in its files
        text = words[int(text) - 1]
    if text not in kind.__members__:
        raise ValueError(f"Expected {name} to be one of {', '.join(words)}. Received: {name}={value!r}. Choose one.")
    return kind[text]


def _dtype(value: Any) -> Any:
    if isinstance(value, str):
        word = value.removeprefix("torch.")
        if word not in _DTYPES:
            raise ValueError(f"Expected a dtype of {', '.join(_DTYPES)}. Received: {value!r}. Choose one.")
        return _DTYPES[word]
    return value


def _listed(names: Any) -> list[str] | None:
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    return None if names is None else list(names)
