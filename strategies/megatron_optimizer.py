"""From torch's optimizer to Megatron's, whose options follow it, and a step of it in the parts that a loop asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from .megatron_engine import Engine
from .megatron_plugin import MegatronLMPlugin
from .optimizer import AcceleratedOptimizer

_GROUP = "drivetrain_group"  # in Megatron's groups: which of the script's they follow, and how
_KERNELS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")  # not what is computed
_ADVICE = "Use torch's Adam, AdamW or SGD, or strategy='fsdp'."


def create(engine: Engine, given: torch.optim.Optimizer, plugin: MegatronLMPlugin, *, word: str, scale: Any = None,
           extra: dict[str, Any] | None = None) -> Any:  # fmt: skip
    """Returns Megatron's optimizer for the chunks of an engine, with the kind and groups of torch's one (collective).

    Raises:
        ValueError: Megatron has no such optimizer, or lacks an option of it.
    """
    module = import_module("megatron.core.optimizer")
    config = module.OptimizerConfig(
        **_kind(given), bf16=word.startswith("bf16"), fp16=word.startswith("16"), clip_grad=0.0,
        params_dtype=engine.config.params_dtype, use_distributed_optimizer=plugin.use_distributed_optimizer,
        use_precision_aware_optimizer=plugin.use_precision_aware_optimizer, **_offload(plugin), **(scale or {}),
        **(extra or {}),
    )  # fmt: skip
    _take_over(given, engine)
    labels = _labels(engine, given, plugin)
    optimizer = module.get_megatron_optimizer(config, engine.chunks, config_overrides=_overrides(labels, given))
    _check_options(optimizer, given)
    return optimizer


def _kind(given: torch.optim.Optimizer) -> dict[str, Any]:
    """The fields of OptimizerConfig that say what an optimizer of torch computes."""
    group = given.param_groups[0]
    common = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
    if isinstance(given, torch.optim.Adam):  # AdamW is one by now
        decoupled = bool(group.get("decoupled_weight_decay", isinstance(given, torch.optim.AdamW)))
        betas = group["betas"]
        return {**common, "optimizer": "adam", "decoupled_weight_decay": decoupled, "adam_beta1": betas[0],
                "adam_beta2": betas[1], "adam_eps": group["eps"]}  # fmt: skip
    if isinstance(given, torch.optim.AdamW):
        betas = group["betas"]
        return {**common, "optimizer": "adam", "decoupled_weight_decay": True, "adam_beta1": betas[0],
                "adam_beta2": betas[1], "adam_eps": group["eps"]}  # fmt: skip
    if isinstance(given, torch.optim.SGD):
        return {**common, "optimizer": "sgd", "sgd_momentum": group["momentum"]}
    raise ValueError(f"Expected an optimizer that Megatron has. Received: {type(given).__name__}. {_ADVICE}")


def _offload(plugin: MegatronLMPlugin) -> dict[str, Any]:
    if not plugin.optimizer_cpu_offload:
        return {}
    return {
        "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_torch_optimizer_for_cpu_offload": True,
        "overlap_cpu_optimizer_d2h_h2d": plugin.overlap_cpu_optimizer_d2h_h2d,
    }  # fmt: skip


# Groups


def _take_over(given: torch.optim.Optimizer, engine: Engine) -> None:
    """Gives an optimizer that was made over another form of the model Megatron's parameters.

    Weights go where a group has weight decay, biases and norms where one has none, if there are both.
    """
    own = list(engine.model.parameters())
    known = {id(parameter) for parameter in own}
    held = [id(parameter) for group in given.param_groups for parameter in group["params"]]
    if any(one in known for one in held):
        return
    if len({float(group["lr"]) for group in given.param_groups}) > 1:
        raise ValueError(
            "Expected one learning rate for a model that Megatron builds anew. Received: groups with several. Make the "
            "optimizer over a MegatronModel, or use scale_lr_cond and lr_mult."
        )
    decayed = next((g for g in given.param_groups if g.get("weight_decay")), given.param_groups[0])
    others = next((g for g in given.param_groups if not g.get("weight_decay")), decayed)
    for group in given.param_groups:
        group["params"] = []
    for parameter in own:
        if parameter.requires_grad:
            (decayed if parameter.ndim > 1 else others)["params"].append(parameter)
    given.state.clear()


def _labels(engine: Engine, given: torch.optim.Optimizer, plugin: MegatronLMPlugin) -> dict[int, int]:
    """By parameters' ids: four times the group's number, 2 for no weight decay, 1 for a scaled learning rate."""
    groups = {id(parameter): index for index, group in enumerate(given.param_groups) for parameter in group["params"]}
    labels = {}
    for chunk in engine.chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            if id(parameter) not in groups:
                raise ValueError(
                    f"Expected all trained parameters of Megatron's model in the optimizer. Received: none for {name}. "
                    "Pass model.parameters(), or set requires_grad=False."
                )
            plain = plugin.no_wd_decay_cond is not None and bool(plugin.no_wd_decay_cond(name, parameter))
            scaled = plugin.scale_lr_cond is not None and bool(plugin.scale_lr_cond(name, parameter))
            labels[id(parameter)] = 4 * groups[id(parameter)] + 2 * plain + scaled
    return labels


def _overrides(labels: dict[int, int], given: torch.optim.Optimizer) -> dict[Any, Any]:
    config = import_module("megatron.core.optimizer.optimizer_config")

    def having(label: int) -> Callable[[Any], bool]:
        return lambda parameter: labels.get(id(parameter)) == label

    every = range(4 * len(given.param_groups))
    predicates = {label: config.ParamPredicate(name=f"{_GROUP}_{label}", fn=having(label)) for label in every}
    return {config.ParamKey(predicate=predicate): {_GROUP: label} for label, predicate in predicates.items()}


def _check_options(optimizer: Any, given: torch.optim.Optimizer) -> None:
    known = _known(optimizer)
    for group in given.param_groups if known else ():
        lost = [name for name, value in group.items() if name not in (*known, "params", *_KERNELS)
                and not name.startswith("initial_") and value]  # fmt: skip
        if lost:
            raise ValueError(
                f"Expected options that Megatron's optimizer has. Received: {', '.join(lost)} of "
                f"{type(given).__name__}. Leave them out, or use strategy='fsdp'."
            )


def _known(optimizer: Any) -> set[str]:
    inner = [one.optimizer for one in optimizer.chained_optimizers if one.optimizer is not None]
    return set().union(*(one.defaults for one in inner)) if inner else set()


class Stepper:
    """One optimizer of Megatron between the calls of a loop: gradients made ready, looked at, clipped, and the step."""

    def __init__(self, engine: Engine, optimizer: Any, given: torch.optim.Optimizer, plugin: MegatronLMPlugin) -> None:
        self.engine, self.optimizer, self.given, self.plugin = engine, optimizer, given, plugin
        self.options = _known(optimizer) - set(_KERNELS) - {"params"}
        self.norm: float | None = None  # of the gradients, as it was before clipping
        self._overflow: bool | None = None  # None: gradients are not ready yet
        self._clipped: float | None = None

    def ready(self) -> bool:
        """Makes gradients ready, once for a step; returns whether they overflowed."""
        if self._overflow is None:
            self._overflow = bool(self.optimizer.prepare_grads())
            self.norm = self._clipped = None
        return self._overflow

    def total_norm(self) -> torch.Tensor:
        """Returns the norm of the gradients of all ranks; infinity after an overflow, 0 where there are none."""
        if not self.engine.complete:
            return torch.zeros(())
        if self.ready():
            return torch.full((), float("inf"))
        if self.norm is None:
            self.norm = float(self.optimizer.get_grad_norm())
        return torch.tensor(self.norm)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips to a norm; returns the norm before.

        Raises:
            ValueError: the options say another one.
        """
        configured = self.plugin.gradient_clipping
        if self.plugin.clips and configured != max_norm and max_norm != float("inf"):
            raise ValueError(
                f"Expected one value for the largest norm of the gradients. Received: gradient_clipping={configured} "
                f"in Megatron's options, max_norm={max_norm} in the script. Set it in one place."
            )
        norm = self.total_norm()
        if max_norm != float("inf") and self.engine.complete and not self._overflow and self._clipped is None:
            self._clip(float(max_norm))
        return norm

    def _clip(self, max_norm: float) -> None:
        self._clipped = max_norm
        clip = import_module("megatron.core.optimizer.clip_grads").clip_grad_by_total_norm_fp32
        for one in self.optimizer.chained_optimizers:
            parameters = [] if one.is_stub_optimizer else one.get_parameters()
            if parameters:
                clip(parameters, max_norm, self.norm, one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)

    def step(self) -> bool:
        """Steps with the gradients of a window, if there are any; returns whether an overflow skipped that."""
        if not self.engine.complete:
            return False
        skipped = self.ready()
        if self.plugin.gradient_clipping and self._clipped is None and not skipped:
            self.total_norm()
            self._clip(self.plugin.gradient_clipping)
        if not skipped:
            self._follow()
            self.optimizer.step_with_ready_grads()
            vars(self.given)["_opt_called"] = True  # else a scheduler complains that it steps before
        self._overflow = None
        self.engine.forget()
        self.optimizer.zero_grad()
        return skipped

    def _follow(self) -> None:
        """Gives Megatron's groups the options that the script's have now."""
        for group in self.optimizer.param_groups:
            label = group[_GROUP]
            source = self.given.param_groups[label // 4]
            for name in self.options & source.keys():
                group[name] = source[name]
            if label & 2:
                group["weight_decay"] = 0.0
            if label & 1:
                group["lr"] = group["lr"] * self.plugin.lr_mult


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """A prepared optimizer, which Megatron's own steps in its place; groups and options are the script's."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        super().__init__(optimizer, False, **options)
        self.drop: Any = None  # what forgets gradients that are not stepped with
        self.read: Any = None  # what gathers the state from the ranks
        self.write: Any = None  # and brings it back

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state by names of the whole model, on the first rank only; every rank has to call this."""
        return super().state_dict() if self.read is None else dict(self.read())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, of which every rank has to have all."""
        if self.write is None:
            super().load_state_dict(state_dict)
        else:
            self.write(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets gradients that no step has used."""
        if self.drop is not None and self.gradient_state.sync_gradients:
            self.drop()
