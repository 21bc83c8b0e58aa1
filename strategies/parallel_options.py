"""The options of each kind of parallelism, as plain dataclasses: names and defaults of Accelerate 1.15, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from . import environment

if TYPE_CHECKING:
    from .base import Strategy
    from .mesh import ParallelismConfig

_GROUP = "PARALLELISM_CONFIG_"
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip


@dataclass
class TorchTensorParallelConfig:
    """How layers are divided (tensor parallel).

    Args:
        enable_async_tp: lets torch's compiler overlap communication with products (on CUDA, under torch.compile).
        plan: drivetrain's: module name (with `*` for any number) → a word, such as "colwise", or one of torch's
            parallel styles; or a function of the module that returns such a dict. None: the plan that Hugging Face
            models carry.
        loss_parallel: drivetrain's: outputs that the plan leaves as shards of the vocabulary (word
            "colwise_loss_parallel") go into `torch.nn.functional.cross_entropy` as they are.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None
    loss_parallel: bool = False


@dataclass
class TorchContextParallelConfig:
    """How sequences are divided (context parallel, and sequence parallel of the torch backend).

    Args:
        cp_comm_strategy: "allgather" (keys and values are gathered) or "alltoall" (they travel around a ring, where
            torch has that: on CUDA). None: as PARALLELISM_CONFIG_CP_COMM_STRATEGY says, else "allgather".
        sequence_dims: drivetrain's: which entries of a batch are divided, and along which dimension: their keys or
            positions → the dimension. None: every tensor whose dimension 1 is as long as that of the first with two
            or more dimensions, along that one.
    """

    cp_comm_strategy: str | None = None
    sequence_dims: Mapping[Any, int] | None = None

    def __post_init__(self) -> None:
        launched = environment.group(_GROUP)
        word = launched.agreed("cp_comm_strategy", self.cp_comm_strategy, launched.text("cp_comm_strategy"))
        self.cp_comm_strategy = word or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(
                "Expected cp_comm_strategy to be 'allgather' or 'alltoall'. Received: "
                f"cp_comm_strategy={self.cp_comm_strategy!r}. Choose one of these."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How sequences are divided by DeepSpeed: their length, whether it varies, and how attention is computed."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    @property
    def fixed_length(self) -> int | None:
        """The length that all sequences have; None where it varies."""
        return None if self.sp_seq_length_is_variable else self.sp_seq_length

    def __post_init__(self) -> None:
        launched = environment.group(_GROUP)
        self.sp_seq_length = launched.agreed(
            "sp_seq_length", self.sp_seq_length, launched.integer("sp_seq_length")
        )
        variable = launched.agreed(
            "sp_seq_length_is_variable", self.sp_seq_length_is_variable,
            launched.flag("sp_seq_length_is_variable", self.sp_seq_length is None),
        )  # fmt: skip
        self.sp_seq_length_is_variable = variable
        word = launched.agreed(
            "sp_attn_implementation", self.sp_attn_implementation, launched.text("sp_attn_implementation")
        )
        self.sp_attn_implementation = word or "sdpa"
        known = ("sdpa", "flash_attention_2", "flash_attention_3")
        if self.sp_attn_implementation not in known:
            raise ValueError(
                f"Expected sp_attn_implementation to be one of {', '.join(known)}. Received: "
                f"sp_attn_implementation={self.sp_attn_implementation!r}. Choose one of these."
            )
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            raise ValueError(
                "Expected sp_seq_length where lengths do not vary. Received: sp_seq_length=None, "
                "sp_seq_length_is_variable=False. Give the length."
            )


@dataclass
class PipelineConfig:
    """Drivetrain's: how a model is cut into stages (pipeline parallel).

    Args:
        module: name of the part that is cut, as the training module calls it once a step ("net"); None: its only
            child that has parameters.
        split: names within that part at which a stage begins, one fewer than there are stages; None: as many layers
            for each stage. Or a function of (part, number of the stage, number of stages) that returns the stage.
        schedule: one of GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.
        microbatches: parts of each batch; None: twice as many as there are stages, or fewer where they do not divide.
        stages_per_rank: stages on each rank; None: 1, and 2 for the schedules that need several.
    """

    module: str | None = None
    split: list[str] | Callable[[Any, int, int], Any] | None = None
    schedule: str = "1F1B"
    microbatches: int | None = None
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        known = {name.lower(): name for name in SCHEDULES}
        if self.schedule.lower() not in known:
            raise ValueError(
                f"Expected schedule to be one of {', '.join(SCHEDULES)}. Received: schedule={self.schedule!r}. "
                "Choose one of these."
            )
        self.schedule = known[self.schedule.lower()]
        several = self.schedule not in ("GPipe", "1F1B")
        self.stages_per_rank = self.stages_per_rank or (2 if several else 1)
        if several != (self.stages_per_rank > 1) or (self.schedule[0] in "ZD" and self.stages_per_rank != 2):
            wanted = "2 stages" if self.schedule[0] in "ZD" else "several stages" if several else "one stage"
            raise ValueError(
                f"Expected {wanted} on each rank for schedule={self.schedule!r}. Received: "
                f"stages_per_rank={self.stages_per_rank}. Leave it out."
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"Expected microbatches of 1 or more. Received: {self.microbatches}. Give a number.")


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallel alone: `tp_size` ranks share each layer; a mesh may be given instead.

    `plan` (drivetrain's) says how layers are divided (see TorchTensorParallelConfig).
    """

    slot: ClassVar[str] = "torch_tp_plugin"

    tp_size: int = 1
    torch_device_mesh: Any = field(default=None, compare=False)
    plan: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        names = getattr(self.torch_device_mesh, "mesh_dim_names", None)
        if self.torch_device_mesh is not None:
            if not names or "tp" not in names:
                raise ValueError(
                    f"Expected torch_device_mesh with a dimension 'tp'. Received: {names}. Name it so."
                )
            self.tp_size = self.torch_device_mesh["tp"].size()
        if not isinstance(self.tp_size, int) or self.tp_size < 1 and self.tp_size != -1:
            raise ValueError(f"Expected tp_size of 1 or more. Received: tp_size={self.tp_size!r}. Give a number.")

    def strategy(self, parallelism: ParallelismConfig | None = None) -> Strategy:
        """Returns the engine: that of a ParallelismConfig with this degree.

        Raises:
            ValueError: the ParallelismConfig has another one.
        """
        handler = TorchTensorParallelConfig(plan=self.plan)
        if parallelism is None:  # whose module imports this one
            mesh = import_module(".mesh", __package__)
            parallelism = mesh.ParallelismConfig(tp_size=self.tp_size, tp_handler=handler)
        elif parallelism.tp_size != self.tp_size:
            raise ValueError(
                f"Expected one tp_size. Received: torch_tp_plugin.tp_size={self.tp_size} and "
                f"parallelism_config.tp_size={parallelism.tp_size}. Leave the plugin out."
            )
        engine: Strategy = parallelism.strategy()
        engine.plugin = self
        return engine
