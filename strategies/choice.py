"""Which engine a run gets, where an argument, option objects and a launch may each have a say.

An option object (a plugin, a ParallelismConfig) knows its engine: it has a method `strategy(parallelism=None)` that
makes one, and `slot`, the name of the Accelerator's argument that takes it. What a launcher says comes as variables,
which the classes of `_LAUNCHED` read themselves when they are made without arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import environment, rendezvous
from .base import Strategy

if TYPE_CHECKING:
    from .mesh import ParallelismConfig

_MODULES = {
    "SingleDeviceStrategy": "base", "DDPStrategy": "ddp",
    "FSDPStrategy": "fsdp", "FSDP1Strategy": "fsdp1", "DeepSpeedStrategy": "deepspeed",
    "TensorParallelStrategy": "parallel",
    "ContextParallelStrategy": "parallel", "SequenceParallelStrategy": "parallel", "PipelineStrategy": "pipeline",
    "ExpertParallelStrategy": "parallel", "XLAStrategy": "xla", "MegatronStrategy": "megatron",
}  # fmt: skip
_STARTS = {"ddp": None, "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
_WORDS = {
    "tp": "TensorParallelStrategy", "tensor_parallel": "TensorParallelStrategy",
    "cp": "ContextParallelStrategy", "context_parallel": "ContextParallelStrategy",
    "sp": "SequenceParallelStrategy", "ulysses": "SequenceParallelStrategy",
    "pp": "PipelineStrategy", "pipeline": "PipelineStrategy",
    "ep": "ExpertParallelStrategy", "expert_parallel": "ExpertParallelStrategy",
    "megatron": "MegatronStrategy",
    "xla": "XLAStrategy", "tpu": "XLAStrategy",
}  # fmt: skip
_DEVICES = {"tpu": "xla", "xla": "xla"}  # kinds of devices that only one engine has
_OFFLOAD = {"offload_optimizer_device": "cpu"}
# Variable of a launch -> module and class of the options that it stands for. An engine adds its own line.
_LAUNCHED: dict[str, tuple[str, str]] = {
    "USE_FSDP": ("fsdp_plugin", "FullyShardedDataParallelPlugin"),
    "USE_PARALLELISM_CONFIG": ("mesh", "ParallelismConfig"),
    "USE_DEEPSPEED": ("deepspeed_plugin", "DeepSpeedPlugin"),
    "USE_MEGATRON_LM": ("megatron_plugin", "MegatronLMPlugin"),
    "USE_XLA": ("xla_plugin", "XLAPlugin"),
}


def followed() -> set[str]:
    """Returns the variables of launches that some engine of this version follows."""
    return set(_LAUNCHED)


def engine_of(device: str | None) -> str | None:
    """Returns the name of the engine that a kind of device needs; None where several engines have it."""
    return _DEVICES.get(device or "")


def registry() -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns every name of a strategy with the class that it stands for and that class's arguments."""
    names: dict[str, tuple[str, dict[str, Any]]] = {"single": ("SingleDeviceStrategy", {})}
    names |= {word: (name, {}) for word, name in _WORDS.items()}
    names["deepspeed"] = ("DeepSpeedStrategy", {})
    for stage in (1, 2, 3):
        names[f"deepspeed_stage_{stage}"] = ("DeepSpeedStrategy", {"zero_stage": stage})
    names["deepspeed_stage_2_offload"] = ("DeepSpeedStrategy", {"zero_stage": 2, **_OFFLOAD})
    everything = {"zero_stage": 3, **_OFFLOAD, "offload_param_device": "cpu"}
    names["deepspeed_stage_3_offload"] = ("DeepSpeedStrategy", everything)
    names |= {"fsdp": ("FSDPStrategy", {}), "fsdp2": ("FSDPStrategy", {})}
    names["fsdp1"] = ("FSDP1Strategy", {})
    names |= {"xla_spmd": ("XLAStrategy", {"spmd": True}), "xla_fsdp": ("XLAStrategy", {"fsdp": True})}
    names["hsdp"] = ("FSDPStrategy", {"replicate": "nodes"})
    for name, start in _STARTS.items():
        options = {} if start is None else {"start_method": start}
        names[name] = ("DDPStrategy", options)
        for unused in (True, False):
            suffix = f"_find_unused_parameters_{str(unused).lower()}"
            names[name + suffix] = ("DDPStrategy", {**options, "find_unused_parameters": unused})
    return names


def create(
    strategy: Any = None, *, size: int = 1, plugins: Iterable[Any] = (), parallelism: ParallelismConfig | None = None
) -> Strategy:
    """Returns the engine of a run: that on which all of these agree.

    `strategy` is a name, a Strategy, an option object, or None (also "auto") for what the others say: the plugins,
    then the launch, else one device, or DDP for several processes.

    Raises:
        TypeError: an object is none of these.
        ValueError: no strategy has that name (the message names the nearest), or two of these do not agree.
        NotImplementedError: the engine is not part of this version.
    """
    rendezvous.report_uncaught()  # what follows may refuse a script's settings, and the launcher is to say so
    plugins = [plugin for plugin in plugins if plugin is not None]
    for plugin in plugins:
        _check_options(plugin, "an engine's option object, for example FullyShardedDataParallelPlugin()")
    if parallelism is not None:
        _check_options(parallelism, "parallelism_config to be a ParallelismConfig")
    if strategy is not None and not isinstance(strategy, (str, Strategy)):
        _check_options(strategy, "a strategy, its name, or an engine's options")
        if strategy.slot == "parallelism_config":
            parallelism, strategy = _same("parallelism_config", parallelism, strategy), None
        else:
            plugins, strategy = [*plugins, strategy], None
    if strategy in (None, "auto"):
        _check_launch(plugins)
        return _by_options(plugins, parallelism, size)
    engine = _by_name(strategy) if isinstance(strategy, str) else strategy
    if not plugins and parallelism is None:
        return _as_launched(engine, strategy)
    made = _with_options(engine, strategy, plugins, parallelism)
    _check_word(strategy, made)
    return made


def _check_word(word: Any, engine: Strategy) -> None:
    """Raise ValueError where a name says other options ("deepspeed_stage_1") than those that the engine has."""
    for name, value in registry()[word][1].items() if isinstance(word, str) else ():
        own = getattr(engine.plugin, name, value)
        if own != value:
            raise ValueError(
                f"Expected one value for {name}. Received: {value!r} by strategy={word!r}, and {own!r} in the options. "
                "Set it in one place."
            )


def _by_name(word: str) -> Strategy:
    known = registry()
    if word not in known:
        raise _unknown(word, list(known))
    name, options = known[word]
    engine: Strategy = getattr(import_module(f".{_MODULES[name]}", __package__), name)(**options)
    return engine


def _unknown(strategy: str, known: list[str]) -> Exception:
    near = difflib.get_close_matches(strategy, [*known, "auto"], n=1)
    advice = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
    return ValueError(f"Expected strategy to be one of auto, {', '.join(known)}. Received: {strategy!r}. {advice}")


def _by_options(plugins: list[Any], parallelism: Any, size: int) -> Strategy:
    """The engine of the options given, else of those that a launch asks for, else the default for this size."""
    if not plugins and parallelism is None:
        plugins, parallelism = _launched()
    if len(plugins) > 1:
        raise ValueError(f"Expected the options of one engine. Received: {_names(plugins)}. Give one.")
    if plugins:
        engine: Strategy = plugins[0].strategy(parallelism)
        return engine
    if parallelism is not None:
        engine = parallelism.strategy()
        return engine
    return _by_name("ddp" if size > 1 else "single")


def _as_launched(engine: Strategy, given: Any) -> Strategy:
    """The engine that was asked for alone: with a launch's options where it is the launch's, else an error."""
    plugins, parallelism = _launched()
    if not plugins and parallelism is None:
        return engine
    other = _by_options(plugins or _own(engine, given), parallelism, 1)
    if type(other) is not type(engine):
        raise _not_as_launched(f"strategy={given if isinstance(given, str) else engine.name!r}")
    if isinstance(given, Strategy) or (registry()[given][1] and parallelism is None):
        return engine  # what a word stands for was compared with the launch's options when it was made
    _check_word(given, other)
    return other


def _own(engine: Strategy, given: Any) -> list[Any]:
    """The options of an engine that was named, where a ParallelismConfig is no engine of its own beside it."""
    return [engine.plugin] if isinstance(given, str) and engine.takes_parallelism else []


def _check_launch(plugins: list[Any]) -> None:
    """Raise ValueError for options of another engine than a launch asks for."""
    asked = {getattr(import_module(f".{module}", __package__), name).slot for variable, (module, name) in
             (_LAUNCHED.items() if plugins else ()) if environment.flag(variable)} - {"parallelism_config"}  # fmt: skip
    if asked and not asked & {plugin.slot for plugin in plugins}:
        raise _not_as_launched(_names(plugins))


def _not_as_launched(given: str) -> ValueError:
    launched = [f"ACCELERATE_{one.removeprefix('ACCELERATE_')}" for one in _LAUNCHED if environment.flag(one)]
    said = environment.sources()
    shown = ", ".join(f"{name}=true ({said[name]})" if name in said else f"{name}=true" for name in launched)
    return ValueError(f"Expected the engine of the launch. Received: {given}, and {shown}. Set it in one place.")


def _with_options(engine: Strategy, given: Any, plugins: list[Any], parallelism: Any) -> Strategy:
    """The engine that was asked for, with options if they are its own."""
    if not plugins and parallelism is None:
        return engine
    other = _by_options(plugins or _own(engine, given), parallelism, 1)
    if type(other) is not type(engine) or (isinstance(given, Strategy) and engine is not other):
        shown = _names([*plugins, *([] if parallelism is None else [parallelism])])
        raise ValueError(
            f"Expected one engine. Received: strategy={given if isinstance(given, str) else engine.name!r}, and "
            f"{shown}, which asks for {other.name!r}. Leave strategy out, or the options."
        )
    return other


def _launched() -> tuple[list[Any], Any]:
    """The option objects that a launch asks for, and its ParallelismConfig."""
    found = []
    for variable, (module, name) in _LAUNCHED.items():
        if environment.flag(variable):
            found.append(getattr(import_module(f".{module}", __package__), name)())
    mesh = next((one for one in found if one.slot == "parallelism_config"), None)
    return [one for one in found if one is not mesh], mesh


def _check_options(value: Any, expected: str) -> None:
    if not callable(getattr(value, "strategy", None)) or not hasattr(value, "slot"):
        raise TypeError(f"Expected {expected}. Received: {value!r}. Pass one of these.")


def _same(name: str, one: Any, other: Any) -> Any:
    if one is not None and one != other:
        raise ValueError(f"Expected {name} once. Received: {one} and {other}. Keep one.")
    return other


def _names(options: list[Any]) -> str:
    return ", ".join(f"{one.slot}={type(one).__name__}" for one in options)
