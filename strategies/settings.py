"""Settings of the engines, as plain dataclasses and enumerations: nothing here reads the environment or acts.

The names, fields and defaults are those of Accelerate 1.15, so that code written for it runs unchanged; fields that
drivetrain adds are marked. Every class checks its values when it is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, EnumMeta
from typing import Any

import torch

class _Searchable(EnumMeta):
    """Lets `"fp16" in PrecisionType` ask for a value as well as for a member."""

    def __contains__(cls, item: object) -> bool:
        members: list[Any] = list(cls)
        return any(item is member or item == member.value for member in members)


class BaseEnum(Enum, metaclass=_Searchable):
    """An enumeration that prints its value and can list its values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Returns the values in the order of their definition."""
        return [member.value for member in cls]


class DistributedType(str, Enum):
    """What kind of distribution runs: a label for users, never a branch of the library's own code."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class SageMakerDistributedType(str, Enum):
    """How a SageMaker job is distributed."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(str, Enum):
    """Which library computes in 8-bit floats."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class ComputeEnvironment(str, Enum):
    """Where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DynamoBackend(str, BaseEnum):
    """Backends of torch.compile by Accelerate's words; `NO` leaves the model as it is."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DDPCommunicationHookType(BaseEnum):
    """How DDP's gradients travel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class LoggerType(BaseEnum):
    """Trackers that `log_with` names."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(str, BaseEnum):
    """Words that `mixed_precision` takes in Accelerate; the Trainer's words are taken too (see precision.py)."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(BaseEnum):
    """Random number generators that can be synchronised over the processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CustomDtype(Enum):
    """Data types that torch has no name for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class KwargsHandler:
    """Base of the option classes that `Accelerator(kwargs_handlers=[...])` takes."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a deep copy of all fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields whose value is not the class's default."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`: `cache_enabled=None` keeps torch's setting."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of `torch.amp.GradScaler`; `growth_interval` counts optimizer steps without an overflow."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        _check(self.init_scale > 0, "a positive number", init_scale=self.init_scale)
        _check(self.growth_factor > 1, "a factor above 1", growth_factor=self.growth_factor)
        _check(0 < self.backoff_factor < 1, "a factor between 0 and 1", backoff_factor=self.backoff_factor)
        _check(self.growth_interval >= 1, "at least one step", growth_interval=self.growth_interval)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`.

    `backend` left at its default means the backend of the device in use: gloo on the CPU, nccl on CUDA.
    `timeout=None` means torch's default for that backend.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        given = self.timeout
        _check(given is None or isinstance(given, timedelta), "a datetime.timedelta or None", timeout=given)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel` and the hook that reduces its gradients.

    `comm_state_option` goes to PowerSGD's state; `comm_wrapper` compresses what the hook sends.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = _member(DDPCommunicationHookType, self.comm_hook, "comm_hook")
        self.comm_wrapper = _member(DDPCommunicationHookType, self.comm_wrapper, "comm_wrapper")
        wrappers = [DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16]
        _check(self.comm_wrapper in wrappers, "comm_wrapper no, fp16 or bf16", comm_wrapper=str(self.comm_wrapper))
        _check(
            not (self.static_graph and self.find_unused_parameters),
            "static_graph or find_unused_parameters, as a static graph finds unused parameters by itself",
            static_graph=True,
            find_unused_parameters=True,
        )

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Returns the fields that DDP's constructor takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Registers the hook that the fields name on a DDP model; `no` registers nothing."""
        if self.comm_hook is DDPCommunicationHookType.NO:
            _check(self.comm_wrapper is DDPCommunicationHookType.NO, "comm_hook to be set", comm_hook="no")
            return
        state, hook = _communication_hook(DDPCommunicationHookType(self.comm_hook), self.comm_state_option)
        model.register_comm_hook(state, _wrapped_hook(DDPCommunicationHookType(self.comm_wrapper), hook))


def _communication_hook(kind: DDPCommunicationHookType, options: dict[str, Any]) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if kind is DDPCommunicationHookType.FP16:
        return None, default_hooks.fp16_compress_hook
    if kind is DDPCommunicationHookType.BF16:
        return None, _bf16_hook
    state = powerSGD_hook.PowerSGDState(process_group=None, **options)
    if kind is DDPCommunicationHookType.POWER_SGD:
        return state, powerSGD_hook.powerSGD_hook
    return state, powerSGD_hook.batched_powerSGD_hook


def _wrapped_hook(wrapper: DDPCommunicationHookType, hook: Callable[..., Any]) -> Callable[..., Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if wrapper is DDPCommunicationHookType.FP16:
        return default_hooks.fp16_compress_wrapper(hook)
    if wrapper is DDPCommunicationHookType.BF16:
        return default_hooks.bf16_compress_wrapper(hook)
    return hook


def _bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which are text here
    # torch's own bf16 hook refuses every backend but NCCL and XCCL; gloo reduces bfloat16 as well.
    gradients = bucket.buffer()
    compressed = gradients.to(torch.bfloat16).div_(torch.distributed.get_world_size())
    future = torch.distributed.all_reduce(compressed, async_op=True).get_future()

    def decompress(done: torch.futures.Future[Any]) -> Any:
        return gradients.copy_(done.value()[0])

    return future.then(decompress)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`; `activities` are names ("cpu", "cuda", "xpu", …) or None (torch's).

    `schedule_option` has the keys of `torch.profiler.schedule` (wait, warmup, active, repeat, skip_first). With
    `output_trace_dir` each process writes a Chrome trace there when the profile ends.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Returns the profiler, not started."""
        activities, schedule = None, None
        if self.activities is not None:
            activities = [self._activity(name) for name in self.activities]
        if self.schedule_option is not None:
            schedule = torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    @staticmethod
    def _activity(name: Any) -> Any:
        if isinstance(name, torch.profiler.ProfilerActivity):
            return name
        known = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU"}
        _check(name in known, f"an activity of {sorted(known)}", activities=name)
        return getattr(torch.profiler.ProfilerActivity, known[name])


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share data among the processes.

    The last two fields are drivetrain's: `split_last_batch` shares a short last global batch among the ranks and
    weights it, instead of repeating samples; `shard=False` says that each rank's loader already holds its own share.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    split_last_batch: bool = False
    shard: bool = True


@dataclass
class ProjectConfiguration:
    """Where a project keeps its checkpoints and logs, and how its checkpoints are named and counted."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        limit = self.total_limit
        _check(limit is None or limit >= 1, "None or at least 1", total_limit=limit)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Sets the project's folder, and the logs' folder to the same where none is set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated: `num_steps` micro-batches make one optimizer step.

    `scale_last_window` is drivetrain's: a short last window of an epoch is averaged over the micro-batches that it
    holds, not over `num_steps`.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    scale_last_window: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_num_steps(self.num_steps)


_OF_XLA = {"OPENXLA": "AOT_TORCHXLA_TRACE_ONCE", "OPENXLA_EVAL": "TORCHXLA_TRACE_ONCE"}  # torch's names, Accelerate's


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`; `use_regional_compilation` compiles the repeated blocks of a model one by one."""

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        name = "NO" if self.backend is None else str(self.backend).upper()
        self.backend = _member(DynamoBackend, _OF_XLA.get(name, name), "dynamo_backend")

    @property
    def active(self) -> bool:
        """Whether models are compiled at all."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, the backend in torch's lower-case spelling."""
        return {**super().to_dict(), "backend": DynamoBackend(self.backend).value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the arguments for `torch.compile`: those fields that differ from its defaults."""
        values = {name: value for name, value in self.to_dict().items() if value not in (None, False)}
        values.pop("use_regional_compilation", None)
        of_xla = (name.lower() for name, old in _OF_XLA.items() if old == self.backend)
        values["backend"] = next(of_xla, values["backend"])
        return values if self.active else {name: value for name, value in values.items() if name != "backend"}


def check_num_steps(num_steps: int) -> int:
    """Returns a number of micro-batches per optimizer step, or raises when it is not a whole number above zero."""
    whole = isinstance(num_steps, int) and not isinstance(num_steps, bool)
    _check(whole and num_steps >= 1, "a whole number of at least 1", gradient_accumulation_steps=num_steps)
    return num_steps


def not_in_this_version(name: str, instead: str = 'strategy="ddp"') -> NotImplementedError:
    """Returns the error for an engine, plugin or method that this version does not have; the caller raises it."""
    return NotImplementedError(f"{name} is not part of this version of drivetrain. Use {instead} instead.")


def _check(condition: bool, expected: str, **received: Any) -> None:
    if not condition:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        raise ValueError(f"Expected {expected}. Received: {values}. Correct the value.")


def _member(kind: type[Enum], value: Any, name: str) -> Any:
    for member in kind:
        if value is member or value == member.value:
            return member
    known = ", ".join(str(member.value) for member in kind)
    raise ValueError(f"Expected {name} to be one of {known}. Received: {name}={value!r}. Choose one of these.")
