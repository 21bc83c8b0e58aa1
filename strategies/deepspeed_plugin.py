"""DeepSpeedPlugin: how a run uses DeepSpeed, said by fields, by a configuration, or by a launch."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

from . import environment
from .deepspeed_config import HfDeepSpeedConfig, Said, of_precision, settle

_LAUNCH = environment.group("ACCELERATE_DEEPSPEED_")
_DEVICES = ("none", "cpu", "nvme")
# Keys of a configuration that DeepSpeed itself would not miss: it reads those that it knows (runtime/config.py).
_KEYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "fp16", "bf16",
    "amp", "gradient_clipping", "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "steps_per_print", "wall_clock_breakdown", "dump_state", "flops_profiler", "activation_checkpointing",
    "tensorboard", "wandb", "csv_monitor", "comet", "compression_training", "data_efficiency", "curriculum_learning",
    "checkpoint", "data_types", "elasticity", "autotuning", "aio", "comms_logger", "hybrid_engine", "nebula",
    "tensor_parallel", "sequence_parallel_size", "pipeline", "compile", "dataloader_drop_last", "disable_allgather",
    "seq_parallel_communication_data_type", "managed_gradient_accumulation", "memory_breakdown", "torch_autocast",
    "graph_harvesting", "use_data_before_expert_parallelism", "gradient_allreduce_op",
    "disable_python_gc", "vocabulary_size", "log_level", "progressive_layer_drop", "eigenvalue",
    "sparse_attention", "weight_quantization", "load_universal", "expert_parallel", "zenflow",
)  # fmt: skip
# Field -> key of the configuration, and name and kind of the launch's variable.
_FIELDS = {
    "zero_stage": ("zero_optimization.stage", "zero_stage", int),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "offload_optimizer_device", str),
    "offload_param_device": ("zero_optimization.offload_param.device", "offload_param_device", str),
    "offload_optimizer_nvme_path": (
        "zero_optimization.offload_optimizer.nvme_path", "offload_optimizer_nvme_path", str,
    ),
    "offload_param_nvme_path": ("zero_optimization.offload_param.nvme_path", "offload_param_nvme_path", str),
    "zero3_save_16bit_model": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero3_save_16bit_model", bool,
    ),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", None, int),
    "gradient_clipping": ("gradient_clipping", None, float),
}  # fmt: skip


@dataclass
class DeepSpeedPlugin:
    """The options of DeepSpeed, under Accelerate's names and with its defaults.

    Args:
        hf_ds_config: DeepSpeed's own configuration, as a JSON file, a dict or an HfDeepSpeedConfig. Values that are
            "auto" are filled from the run; what it says besides must agree with the fields and the script.
        gradient_accumulation_steps: micro-batches per step of the optimizer; None: the Accelerator's.
        gradient_clipping: the largest norm of the gradients; None: only what the script clips.
        zero_stage: what ZeRO shares out: 0 nothing, 1 optimizer states, 2 gradients too (default), 3 weights too.
        is_train_batch_min: of several loaders that are prepared together the smallest batch counts, not the largest.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme", with `…_nvme_path` for the last.
        zero3_init_flag: ZeRO-3 partitions weights as soon as they are made; False: when the model is prepared.
        zero3_save_16bit_model: False refuses to gather the whole model for saving under ZeRO-3.
        transformer_moe_cls_names: names of the classes of MoE layers, separated by commas, whose experts ZeRO-3
            gathers together (not all ranks use the same ones).
        enable_msamp, msamp_opt_level: MS-AMP's 8-bit modes, which today's DeepSpeed no longer has.

    Raises:
        ValueError: a value does not exist, or fields, configuration and launch disagree; the message shows all of it.
    """

    slot: ClassVar[str] = "deepspeed_plugin"

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        self._selected = False
        self._hold: Any = None
        self.precision_word: str | None = None  # in the Trainer's spelling, once the run has told it
        self._refuse_msamp()
        file = _launched_file() if self.hf_ds_config is not None else []
        self.hf_ds_config = _LAUNCH.text("config_file") if self.hf_ds_config is None else self.hf_ds_config
        given = self.hf_ds_config not in (None, "none")
        config = HfDeepSpeedConfig(self.hf_ds_config if given else _default())
        settle(config, self._said(config, given) + file, complete=False)
        self.hf_ds_config = config
        self.refuses_init = self.zero3_init_flag is False
        self._take_over(config, given)
        self._check(config)

    def strategy(self, parallelism: Any = None) -> Any:
        """Returns the engine that these are the options of."""
        return import_module(".deepspeed", __package__).DeepSpeedStrategy(plugin=self, parallelism=parallelism)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration, in which "auto" values are filled when a model is prepared."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    # What it is made from

    def _said(self, config: HfDeepSpeedConfig, given: bool) -> list[Said]:
        """What fields and the launch say, the launch's last; what a launch has from nobody gives way."""
        values = {name: getattr(self, name) for name in _FIELDS}
        found = [
            Said(_FIELDS[name][0], value, f"DeepSpeedPlugin({name}={value!r})")
            for name, value in values.items()
            if value is not None and value != "auto"
        ]
        found += _by_launch(given, silent=[name for name, value in values.items() if value is not None])
        if not given:
            found.append(Said("zero_optimization.stage", 2, "the default", firm=False))
        return _needed(found, config, given)

    def _take_over(self, config: HfDeepSpeedConfig, given: bool) -> None:
        """Makes the fields say what is in force."""
        for name, (key, _, _) in _FIELDS.items():
            value = config.get_value(key)
            setattr(self, name, value if value is not None else "none" if name.endswith("_device") else None)
        self.zero_stage = config.stage
        if self.zero3_init_flag is None:
            self.zero3_init_flag = _LAUNCH.flag("zero3_init", given)
        self.zero3_init_flag = self.zero3_init_flag and config.is_zero3()
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = _LAUNCH.text("moe_layer_cls_names")
        config.config.setdefault("steps_per_print", math.inf)  # DeepSpeed prints every ten steps otherwise

    def _check(self, config: HfDeepSpeedConfig) -> None:
        for key in set(config.config) - set(_KEYS):
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)
            if near:  # others may be newer than this list
                raise ValueError(
                    f"Expected a key of DeepSpeed's configuration. Received: {key!r} in {config.source}, which it "
                    f"would leave unread. Did you mean {near[0]!r}?"
                )
        if config.get_value("zero_optimization.stage", 0) not in (0, 1, 2, 3, "auto"):
            _refuse("a stage of ZeRO from 0 to 3", "zero_stage", config.get_value("zero_optimization.stage"))
        for part in ("optimizer", "param"):
            device = config.get_value(f"zero_optimization.offload_{part}.device", "none")
            if device not in _DEVICES:
                _refuse(f"one of {', '.join(_DEVICES)}", f"offload_{part}_device", device)
            if device == "nvme" and not config.get_value(f"zero_optimization.offload_{part}.nvme_path"):
                _refuse(f"offload_{part}_nvme_path with the device nvme", f"offload_{part}_nvme_path", None)
            least = 3 if part == "param" else 1
            if device != "none" and config.stage < least:
                _refuse(f"a stage of ZeRO from {least} on to offload what it shares out", "zero_stage", config.stage)

    def _refuse_msamp(self) -> None:
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ValueError(
                f"Expected no MS-AMP. Received: enable_msamp={self.enable_msamp}, msamp_opt_level="
                f"{self.msamp_opt_level!r}; DeepSpeed has no such mode any more. Use mixed_precision='bf16'."
            )

    # Accelerate's way to fill a configuration

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fills an "auto" key from `kwargs`; a value that differs from it goes to `mismatches`, or is an error."""
        value = self.hf_ds_config.get_value(ds_key_long)
        if value is None or ds_key_long not in kwargs:
            if value == "auto":
                raise ValueError(f'Expected a value for {ds_key_long}, which is "auto". Received: {sorted(kwargs)}.')
            return
        try:
            settle(self.hf_ds_config, [Said(ds_key_long, kwargs[ds_key_long], "the script", firm=must_match)],
                   complete=False)  # fmt: skip
        except ValueError as error:
            if mismatches is None:
                raise
            mismatches.append(str(error).split("\n- ")[1].split("\n")[0])

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key of the configuration waits to be filled."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Returns the value of a key of the configuration."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fills every "auto" key for which `kwargs` has a value; ValueError that lists those that differ."""
        firm = [Said(key, value, "the script", firm=must_match) for key, value in kwargs.items()
                if key.startswith(prefix) and self.hf_ds_config.get_value(key) is not None]  # fmt: skip
        settle(self.hf_ds_config, firm, complete=False)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Fills the configuration's fp16 and bf16 where it leaves them open."""
        for word in ("fp16", "bf16"):
            if self.is_auto(f"{word}.enabled") or (mixed_precision == word and self.get_value(word) is None):
                self.hf_ds_config.set_value(f"{word}.enabled", mixed_precision == word)

    # ZeRO-3

    def is_zero3_init_enabled(self) -> bool:
        """Whether ZeRO-3 partitions weights as soon as they are made."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Any:
        """Switches that on or off for a block."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def ready_config(self) -> HfDeepSpeedConfig:
        """Returns a copy that DeepSpeed accepts though no batch size is known yet."""
        config = copy.deepcopy(self.hf_ds_config)
        config.del_config_sub_tree("train_batch_size")
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if config.get_value(key) in (None, "auto"):
                config.set_value(key, 1)
        if self.precision_word is not None:
            settle(config, of_precision(self.precision_word, "the script"), complete=False)
        for key in config.autos():
            config.del_config_sub_tree(key)
        return config

    def set_deepspeed_weakref(self) -> None:
        """Tells transformers of this configuration: its `from_pretrained` then partitions weights under ZeRO-3."""
        try:
            known = import_module("transformers.integrations.deepspeed")
        except ImportError:
            return
        if self.zero3_init_flag:
            self._hold = self.ready_config()  # transformers holds it weakly
            known.set_hf_deepspeed_config(self._hold)
        else:
            self._hold = None
            known.unset_hf_deepspeed_config()

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Lets ZeRO-3 gather the experts of MoE layers together.

        Raises:
            ValueError: the model has no module of one of these classes.
        """
        names = [name.strip() for name in (self.transformer_moe_cls_names or "").split(",") if name.strip()]
        if not names or self.zero_stage != 3:
            return
        kinds = {type(module).__name__: type(module) for module in model.modules()}
        missing = [name for name in names if name not in kinds]
        if missing:
            raise ValueError(
                f"Expected modules of the classes in transformer_moe_cls_names. Received: {missing}, which the model "
                f"lacks; it has {', '.join(sorted(kinds))}. Name those of its MoE layers."
            )
        import_module("deepspeed.utils").set_z3_leaf_modules(model, [kinds[name] for name in names])

    # Of several

    @property
    def selected(self) -> bool:
        """Whether the next model is prepared by these options."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError("Expected AcceleratorState().select_deepspeed_plugin(name). Received: an assignment.")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Makes these the options in force; by `AcceleratorState().select_deepspeed_plugin(name)` only."""
        if not _from_accelerator_state:
            raise ValueError(
                "Expected AcceleratorState().select_deepspeed_plugin(name). Received: DeepSpeedPlugin.select(). Call "
                "that, which also deselects the others."
            )
        self._selected = True
        self.set_deepspeed_weakref()


@dataclass
class DeepSpeedPlugins:
    """Several sets of options by name, the first of which is in force until another one is selected."""

    slot: ClassVar[str] = "deepspeed_plugins"

    plugins: dict[str, DeepSpeedPlugin]

    def __post_init__(self) -> None:
        if not self.plugins or not all(isinstance(one, DeepSpeedPlugin) for one in self.plugins.values()):
            raise TypeError(f"Expected deepspeed_plugins as name → DeepSpeedPlugin. Received: {self.plugins!r}.")

    def strategy(self, parallelism: Any = None) -> Any:
        """Returns the engine that these are the options of."""
        return import_module(".deepspeed", __package__).DeepSpeedStrategy(plugins=self.plugins, parallelism=parallelism)


def choose(plugins: Iterable[DeepSpeedPlugin], chosen: DeepSpeedPlugin) -> None:
    """Selects one of several plugins."""
    for plugin in plugins:
        plugin._selected = False
    chosen.select(_from_accelerator_state=True)


def _default() -> dict[str, Any]:
    """What DeepSpeed gets where nobody brings a configuration."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": "auto"},
    }


def of_argument(deepspeed: Any, said: Iterable[Said] = ()) -> DeepSpeedPlugin:
    """Returns the options for which an argument `deepspeed=` stands: a file, a dict, or a DeepSpeedPlugin.

    Raises:
        ValueError: it, a launch and what a script has `said` besides differ; the message shows all of that at once.
    """
    plugin = deepspeed if isinstance(deepspeed, DeepSpeedPlugin) else None
    config = HfDeepSpeedConfig(deepspeed if plugin is None else plugin.hf_ds_config)
    voices = _needed([*_by_launch(True), *_launched_file(), *said], config, True)
    settle(HfDeepSpeedConfig(config), voices, complete=False)
    return plugin or DeepSpeedPlugin(hf_ds_config=config)


def _by_launch(given: bool, *, silent: Iterable[str] = ()) -> list[Said]:
    """What a launch says of single fields; of `silent` ones only what somebody has told it."""
    found = []
    for name, (key, variable, kind) in _FIELDS.items():
        who, value, firm = _launched(variable or name, kind, shared=variable is None)
        if value is not None and (firm or name not in silent):
            found.append(Said(key, value, who, firm=firm, adds=not given))
    return found


def _launched_file() -> list[Said]:
    """What the file of a launch says of each of its keys, beside which a script brings a configuration."""
    file = _LAUNCH.text("config_file")
    if file in (None, "none"):
        return []
    launched = HfDeepSpeedConfig(file)
    who = f"{launched.source} of the launch"
    return [Said(key, value, who) for key, value in launched.leaves() if value != "auto"]


def _needed(said: list[Said], config: HfDeepSpeedConfig, given: bool) -> list[Said]:
    """Without what names no device for a part that nothing offloads anyway."""
    return [one for one in said if one.value != "none" or (given and config.get_value(one.key) is not None)]


def _launched(name: str, kind: type, *, shared: bool) -> tuple[str, Any, bool]:
    """A launch's variable, its value (None: unset) and whether somebody has said it."""
    group = environment.group("ACCELERATE_") if shared else _LAUNCH
    word, source = group.text(name), group.source(name)
    if word in (None, "auto"):
        return "", None, False
    value: Any = group.flag(name) if kind is bool else kind(word)
    variable = group.variable(name)
    return (f"{variable} ({source})" if source else variable), value, source is not None


def _refuse(expected: str, name: str, value: Any) -> None:
    raise ValueError(f"Expected {expected}. Received: {name}={value!r}. Change one of them.")
