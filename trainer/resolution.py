"""What an Accelerator's arguments come to, together with its plugins and the variables that a launcher set.

Each value may be given in one place, or in several with the same value; different values are an error that shows them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from typing import Any

from ..strategies import environment
from ..strategies.deepspeed_config import Said, of_precision
from ..strategies.deepspeed_plugin import DeepSpeedPlugins, of_argument
from ..strategies.fp8_recipes import RECIPES, AORecipeKwargs
from ..strategies.precision import canonical_name
from ..strategies.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
    check_num_steps,
)

_PLUGINS = {
    "deepspeed_plugin": "a DeepSpeedPlugin", "fsdp_plugin": "a FullyShardedDataParallelPlugin",
    "megatron_lm_plugin": "a MegatronLMPlugin", "torch_tp_plugin": "a TorchTensorParallelPlugin",
}  # fmt: skip
HANDLERS = (
    AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs, *RECIPES,
)  # fmt: skip


def engine_plugins(*, deepspeed_plugin: Any, deepspeed_plugins: Any, **others: Any) -> list[Any]:
    """Returns the option objects of engines that were given, each checked to be of the class that its argument takes.

    Several of DeepSpeed come as a dict by names, the first of which is the one in force.
    """
    for several in (deepspeed_plugin, deepspeed_plugins):
        if isinstance(several, dict):
            deepspeed_plugin, deepspeed_plugins = None, DeepSpeedPlugins(several)
    if deepspeed_plugins is not None and not isinstance(deepspeed_plugins, DeepSpeedPlugins):
        deepspeed_plugin, deepspeed_plugins = deepspeed_plugins, None
    given = {"deepspeed_plugin": deepspeed_plugin, "deepspeed_plugins": deepspeed_plugins, **others}
    for name, plugin in given.items():
        if plugin is not None and name != "deepspeed_plugins" and getattr(plugin, "slot", None) != name:
            raise TypeError(f"Expected {_PLUGINS[name]} for {name}. Received: {plugin!r}. Pass one of these.")
    return [plugin for plugin in given.values() if plugin is not None]


_SAYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_clip_val": "gradient_clipping",
}  # fmt: skip


def deepspeed_options(deepspeed: Any, beside: dict[str, Any], **script: Any) -> Any:
    """Returns the options that `deepspeed=` stands for (a file, a dict or a plugin), else a `deepspeed_plugin`.

    `beside` are the other arguments for such options; `script` is what else is said of them, None for nothing.

    Raises:
        ValueError: options are given twice, or some of all that is said differs; the message shows all of it.
    """
    if deepspeed is None:
        return beside.get("deepspeed_plugin")
    both = [name for name, value in beside.items() if value is not None]
    if both:
        raise ValueError(f"Expected DeepSpeed's options once. Received: deepspeed and {', '.join(both)}. Give one.")
    said = []
    for name, value in script.items():
        who = f"{name}={value!r}"
        if value is not None:
            said += [Said(_SAYS[name], value, who)] if name in _SAYS else of_precision(canonical_name(value), who)
    return of_argument(deepspeed, said)


def slots(strategy: Any) -> dict[str, Any]:
    """Returns the option objects of an engine by the names that AcceleratorState has for them."""
    found = {} if strategy.plugin is None else {strategy.plugin.slot: strategy.plugin}
    return {"parallelism_config": strategy.parallelism, **found}


def handlers_by_type(handlers: list[KwargsHandler] | None) -> dict[type, Any]:
    """Returns the option objects by their type.

    Raises:
        TypeError: an object is none that `kwargs_handlers` takes.
        ValueError: two are of one type.
    """
    found: dict[type, Any] = {}
    for handler in handlers or []:
        kind = next((known for known in HANDLERS if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in HANDLERS)
            raise TypeError(f"Expected kwargs_handlers to hold {names}. Received: {handler!r}. Pass one of these.")
        if kind in found:
            raise ValueError(f"Expected one {kind.__name__}. Received: {found[kind]} and {handler}. Keep one.")
        found[kind] = handler
    return found


def accumulation_plugin(num_steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Returns how gradients are accumulated, from the argument, the plugin and ACCELERATE_GRADIENT_ACCUMULATION_STEPS.

    The argument's default of 1 counts as not given.
    """
    check_num_steps(num_steps)
    given = {
        "gradient_accumulation_steps": num_steps if num_steps != 1 else None,
        "gradient_accumulation_plugin.num_steps": None if plugin is None else plugin.num_steps,
        launched("GRADIENT_ACCUMULATION_STEPS"): environment.integer("GRADIENT_ACCUMULATION_STEPS"),
    }
    steps = one_value("the number of accumulated micro-batches", given)
    return dataclasses.replace(plugin or GradientAccumulationPlugin(), num_steps=steps or 1)


def precision_name(given: Any) -> Any:
    """Returns the precision's name: the argument, else ACCELERATE_MIXED_PRECISION, where "no" asks for nothing.

    Raises:
        ValueError: both ask for something, and not for the same ("no" contradicts only what a launch has said).
    """
    word = environment.text("MIXED_PRECISION")
    if given is None or word is None or word.lower() == "no":
        return word if given is None else given
    label = launched("MIXED_PRECISION")
    if canonical_name(given) != canonical_name(word.lower()) and (given != "no" or label.endswith(")")):
        one_value("the precision", {"mixed_precision": given, label: word.lower()})
    return given


def fp8_options(word: Any, handlers: dict[type, Any]) -> dict[str, Any]:
    """Returns what `Strategy.precision` takes for 8-bit floats beside the word: the recipe, where it is that word.

    Raises:
        ValueError: there are two recipes, one beside another precision, or one that contradicts ACCELERATE_FP8_….
        NotImplementedError: another library than torchao is asked for.
    """
    given = [handlers[kind] for kind in RECIPES if kind in handlers]
    if canonical_name(word) != "fp8-mixed":
        if given:
            raise ValueError(
                f"Expected mixed_precision='fp8' for {given[0]}. Received: {word or 'no'!r}. Set it, or leave that out."
            )
        return {}
    if len(given) > 1:
        raise ValueError(f"Expected one recipe for fp8. Received: {given[0]} and {given[1]}. Keep one.")
    recipe = given[0] if given else AORecipeKwargs()
    named = {} if not given else {type(recipe).__name__: getattr(recipe.backend, "value", recipe.backend)}
    backend = one_value("the library of fp8", named | {launched("FP8_BACKEND"): environment.text("FP8_BACKEND")})
    if backend not in (None, "AO"):
        library = {"TE": "Transformer Engine", "MSAMP": "MS-AMP"}.get(backend, backend)
        raise NotImplementedError(
            f"Expected torchao for fp8. Received: {library}, which drivetrain does not use. Pass AORecipeKwargs() in "
            "kwargs_handlers, or mixed_precision='bf16'."
        )
    recipe = recipe if isinstance(recipe, AORecipeKwargs) else AORecipeKwargs()
    if recipe.config is not None:
        return {"fp8": recipe}
    switches = {}
    for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
        said = None if environment.text(f"FP8_{name.upper()}") is None else environment.flag(f"FP8_{name.upper()}")
        switches[name] = one_value(name, {name: getattr(recipe, name), launched(f"FP8_{name.upper()}"): said})
    return {"fp8": dataclasses.replace(recipe, **switches)}


def check_clipping(max_norm: float) -> None:
    """Raises ValueError for a norm other than ACCELERATE_GRADIENT_CLIPPING; an infinite one only measures."""
    word = environment.text("GRADIENT_CLIPPING")
    if word is not None and math.isfinite(max_norm):
        given = {"max_norm": float(max_norm), launched("GRADIENT_CLIPPING"): float(word)}
        one_value("the largest norm of the gradients", given)


def launched(name: str) -> str:
    """Returns how a message calls a variable that a launcher set: with the file or flag that it came from."""
    variable = f"ACCELERATE_{name}"
    source = json.loads(environment.text("DRIVETRAIN_LAUNCH_SOURCES") or "{}").get(variable)
    return f"{variable} ({source})" if source else variable


def compilation_plugin(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Returns how models are compiled, from the argument or the plugin, else from ACCELERATE_DYNAMO_…"""
    if backend is not None and plugin is not None:
        raise ValueError(f"Expected dynamo_backend or dynamo_plugin. Received: {backend!r} and {plugin}. Give one.")
    if plugin is not None:
        return plugin
    if backend is not None:
        return TorchDynamoPlugin(backend=getattr(backend, "value", backend))
    name = environment.text("DYNAMO_BACKEND")
    if name is None or name.lower() == "no":
        return TorchDynamoPlugin()
    return TorchDynamoPlugin(
        backend=name,
        mode=environment.text("DYNAMO_MODE"),
        fullgraph=environment.flag("DYNAMO_USE_FULLGRAPH"),
        dynamic=True if environment.flag("DYNAMO_USE_DYNAMIC") else None,
        use_regional_compilation=environment.flag("DYNAMO_USE_REGIONAL_COMPILATION"),
    )


def loader_configuration(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """Returns a copy of the loaders' settings; `split_batches` alone is enough."""
    if config is None:
        return DataLoaderConfiguration(split_batches=bool(split_batches))
    if split_batches is not None and split_batches != config.split_batches:
        raise ValueError(
            f"Expected split_batches once. Received: split_batches={split_batches} and {config}. "
            "Set it in the DataLoaderConfiguration."
        )
    return copy.copy(config)


def project_configuration(
    config: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Returns where the project's files lie; the folder may be given apart."""
    config = copy.copy(config) if config is not None else ProjectConfiguration()
    if project_dir is not None:
        one_value("the project's folder", {"project_dir": str(project_dir), "project_config": config.project_dir})
        config.set_directories(str(project_dir))
    return config


def one_value(what: str, given: dict[str, Any]) -> Any:
    """Returns the one value that is given, None for none; different values are a ValueError that shows them all."""
    values = {name: value for name, value in given.items() if value is not None}
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"Expected one value for {what}. Received: {shown}. Set it in one place.")
    return next(iter(values.values()), None)


def rng_types(given: list[Any] | None) -> list[RNGType] | None:
    """Returns the generators to synchronise, checked: here they agree by construction, from seed and epoch."""
    for item in given or []:
        if item not in RNGType:
            known = ", ".join(RNGType.list())
            raise ValueError(f"Expected rng_types of {known}. Received: {item!r}. Choose of these.")
    return None if given is None else [RNGType(item) for item in given]
