"""The Accelerator: one object between a hand-written training loop and the engine that runs it.

It is composed of a Strategy (what the engine does), a World (which processes there are), a Precision, a
GradientState (where in an accumulation window the loop is) and trackers, and forwards to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ContextManager, TypeVar, overload

import torch

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
T6 = TypeVar("T6")


class Accelerator:
    """Prepares models, optimizers, loaders and schedulers, and runs the distributed and mixed-precision side of a loop."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list | None = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        strategy: Any = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
    ) -> None:
        raise NotImplementedError

    # Public attributes: strategy world precision state gradient_state scaler trackers project_configuration
    # dataloader_config step_scheduler_with_optimizer device_placement step (micro-batches in this window) flag_tensor
    strategy: Any
    world: Any
    precision: Any
    scaler: Any
    grad_norm: torch.Tensor | None      # the total norm that clip_grad_norm_ measured last
    skipped_steps: int                  # optimizer steps that the scaler skipped
    trackers: list

    # properties
    distributed_type: Any
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    is_main_process: bool
    is_local_main_process: bool
    is_last_process: bool
    use_distributed: bool
    multi_device: bool
    mixed_precision: str                # "no" "fp16" "bf16" as given by Accelerate's words; precision.name has the Trainer's
    split_batches: bool
    dispatch_batches: bool | None
    even_batches: bool
    use_seedable_sampler: bool
    non_blocking: bool
    use_stateful_dataloader: bool
    project_dir: str | None
    logging_dir: str | None
    save_iteration: int
    should_save_model: bool
    sync_gradients: bool                # settable
    gradient_accumulation_steps: int    # settable; a change takes effect at the next window's start
    optimizer_step_was_skipped: bool

    # preparing
    @overload
    def prepare(self, a: T1, /, *, device_placement: list[bool] | None = None) -> T1: ...
    @overload
    def prepare(self, a: T1, b: T2, /, *, device_placement: list[bool] | None = None) -> tuple[T1, T2]: ...
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any: ...
    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any: ...
    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any: ...
    def prepare_scheduler(self, scheduler: Any) -> Any: ...
    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Callable | None = None
    ) -> Any: ...
    def entry(self, model: Any, method: str, *, manual: bool = False) -> Callable:
        """The user's method routed through the engine; manual=True when the method itself calls backward."""

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any: ...

    # a step
    def accumulate(self, *models: Any) -> ContextManager: ...
    def no_sync(self, model: Any) -> ContextManager: ...
    def autocast(self, autocast_handler: Any = None) -> ContextManager: ...
    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None: ...
    def unscale_gradients(self, optimizer: Any = None) -> None: ...
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor: ...
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None: ...
    def join_uneven_inputs(self, joinables: list, even_batches: bool | None = None) -> ContextManager: ...
    def set_trigger(self) -> None: ...
    def check_trigger(self) -> bool: ...

    # collectives
    def gather(self, tensor: Any) -> Any: ...
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any: ...
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any: ...
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any: ...
    def wait_for_everyone(self) -> None: ...
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> ContextManager: ...
    def main_process_first(self) -> ContextManager: ...
    def local_main_process_first(self) -> ContextManager: ...
    def on_main_process(self, function: Callable | None = None) -> Callable: ...
    def on_local_main_process(self, function: Callable | None = None) -> Callable: ...
    def on_last_process(self, function: Callable) -> Callable: ...
    def on_process(self, function: Callable | None = None, process_index: int | None = None) -> Callable: ...
    def on_local_process(self, function: Callable | None = None, local_process_index: int | None = None) -> Callable: ...
    def print(self, *args: Any, **kwargs: Any) -> None: ...

    # trackers
    def init_trackers(self, project_name: str, config: dict | None = None, init_kwargs: dict | None = None) -> None: ...
    def get_tracker(self, name: str, unwrap: bool = False) -> Any: ...
    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None: ...
    def end_training(self) -> None: ...

    # state
    def save(self, obj: Any, f: Any, safe_serialization: bool = True) -> None: ...
    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None: ...
    def register_save_state_pre_hook(self, hook: Callable) -> Any: ...
    def register_load_state_pre_hook(self, hook: Callable) -> Any: ...
    def register_for_checkpointing(self, *objects: Any) -> None: ...
    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, *, metadata: dict | None = None,
        weights_only: bool = False, **kwargs: Any,
    ) -> str: ...
    def load_state(
        self, input_dir: Any = None, load_kwargs: dict | None = None, *, weights_only: bool = False, strict: bool = True,
        **kwargs: Any,
    ) -> dict: ...
    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict: ...
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any: ...
    def free_memory(self, *objects: Any) -> list: ...
    def clear(self, *objects: Any) -> list: ...
    def profile(self, profile_handler: Any = None) -> ContextManager: ...
