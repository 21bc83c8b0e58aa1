"""MegatronLMPlugin: how a run uses Megatron, under Accelerate's names, from arguments and from what a launch says.

A launch says MEGATRON_LM_…; each variable stands for the field of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from . import environment

_LAUNCH = environment.group("MEGATRON_LM_")
# Field -> kind of the launch's variable, and the value where nobody says anything.
_LAUNCHED: dict[str, tuple[str, Any]] = {
    "tp_degree": ("integer", 1), "pp_degree": ("integer", 1), "use_custom_fsdp": ("flag", False),
    "overlap_cpu_optimizer_d2h_h2d": ("flag", False), "no_load_optim": ("flag", False),
    "eod_mask_loss": ("flag", False), "no_save_optim": ("flag", False), "optimizer_cpu_offload": ("flag", False),
    "use_precision_aware_optimizer": ("flag", False), "decoder_last_pipeline_num_layers": ("integer", None),
    "recompute_granularity": ("text", None), "recompute_method": ("text", None),
    "recompute_num_layers": ("integer", None), "attention_backend": ("text", None),
    "expert_model_parallel_size": ("integer", None), "context_parallel_size": ("integer", None),
    "attention_dropout": ("number", None), "hidden_dropout": ("number", None),
    "attention_softmax_in_fp32": ("flag", None), "expert_tensor_parallel_size": ("integer", None),
    "calculate_per_token_loss": ("flag", None), "use_rotary_position_embeddings": ("flag", None),
    "num_micro_batches": ("integer", 1), "gradient_clipping": ("number", 1.0),
    "sequence_parallelism": ("flag", False), "recompute_activations": ("flag", False),
    "use_distributed_optimizer": ("flag", False),
}  # fmt: skip
_SIZES = (
    "tp_degree", "pp_degree", "num_micro_batches", "expert_model_parallel_size", "context_parallel_size",
    "expert_tensor_parallel_size", "recompute_num_layers", "num_layers_per_virtual_pipeline_stage",
    "decoder_last_pipeline_num_layers", "train_iters", "train_samples", "seq_length",
)  # fmt: skip
_WORDS = {
    "recompute_granularity": ("full", "selective"), "recompute_method": ("uniform", "block"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
}  # fmt: skip
# Of Megatron-LM's own training program, which megatron-core does not have.
_GONE: dict[str, tuple[Any, str]] = {
    "pipeline_model_parallel_split_rank": (None, "megatron-core has no such split any more. Leave it out"),
    "use_custom_fsdp": (False, "Use strategy='fsdp' for sharded weights"),
    "tensorboard_dir": (None, "Use log_with='tensorboard', or Trainer(logger='tensorboard')"),
    "set_all_logging_options": (False, "Use log_with, or Trainer(logger=…)"),
    "custom_prepare_model_function": (None, "Prepare a MegatronModel of your own"),
    "custom_model_provider_function": (
        None, "Give MegatronModel an object with config, build and batch, whose build returns the chunk",
    ),
    "encoder_seq_length": (None, "Batches have lengths of their own"),
    "decoder_seq_length": (None, "Batches have lengths of their own"),
}


@dataclass
class MegatronLMPlugin:
    """The options of Megatron; names and defaults are those of Accelerate 1.15.

    None stands for what MEGATRON_LM_… of a launch says, else for the value in parentheses.

    Args:
        tp_degree: ranks that share each layer (1).
        pp_degree: stages (1); `num_layers_per_virtual_pipeline_stage` gives each rank several, interleaved.
        decoder_last_pipeline_num_layers: layers of the last stage, where it gets fewer than the others.
        sequence_parallelism: norms and dropout work on parts of each sequence, where layers are shared (False).
        context_parallel_size, expert_model_parallel_size, expert_tensor_parallel_size: further degrees (1).
        num_micro_batches: into so many a batch is cut, whose gradients are summed (1).
        gradient_clipping: the largest norm of the gradients (1.0); 0 for none. What a script clips to counts more
            than this default, and contradicts any other value.
        recompute_activations: attention is computed again in backward passes: "selective" granularity (False).
        recompute_granularity, recompute_method, recompute_num_layers: which activations are computed again.
        use_distributed_optimizer: ranks with other data share the optimizer's states (False).
        optimizer_cpu_offload, overlap_cpu_optimizer_d2h_h2d: the optimizer's states and updates on the CPU (False).
        use_precision_aware_optimizer: 16-bit states, which need Transformer Engine (False).
        no_load_optim, no_save_optim: checkpoints without the optimizer's state (False).
        attention_backend: "flash", "fused", "unfused", "local" or "auto"; None for the model's own.
        attention_dropout, hidden_dropout, attention_softmax_in_fp32, use_rotary_position_embeddings: of models; None
            for the model's own.
        calculate_per_token_loss: losses count by their tokens, which they do here wherever a step returns a "weight".
        eod_mask_loss: losses at ends of documents do not count, in Megatron's indexed data sets (False).
        is_train_batch_min: of several loaders that are prepared together the smallest batch counts.
        train_iters, train_samples, lr_…, min_lr, …weight_decay…: the schedule of a MegatronLMDummyScheduler.
        consumed_samples: zeros: checkpoints know where loaders go on.
        no_wd_decay_cond: `f(name, parameter)`: no weight decay here.
        scale_lr_cond, lr_mult: `f(name, parameter)`: the learning rate times `lr_mult` here.
        megatron_dataset_flag, seq_length, eval_iters, eval_interval, custom_megatron_datasets_provider_function:
            Megatron's indexed data sets (see MegatronLMDummyDataLoader).
        return_logits: `eval_step` returns logits beside losses.
        custom_train_step_class, custom_train_step_kwargs: an AbstractTrainStep in the place of GPT's, BERT's or T5's.
        custom_model_provider_function, custom_prepare_model_function: none: see MegatronModel for models of your own.
        custom_get_batch_function, custom_loss_function: parts of the train steps.
        other_megatron_args: further fields of megatron-core's TransformerConfig, OptimizerConfig or
            DistributedDataParallelConfig, by name.

    Raises:
        ValueError: a value does not exist, or megatron-core no longer has it; the message says what to use instead.
    """

    slot: ClassVar[str] = "megatron_lm_plugin"

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: str | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: Any = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    megatron_lm_default_args: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.clips = self.gradient_clipping is not None or _LAUNCH.source("gradient_clipping") is not None
        for name, (kind, default) in _LAUNCHED.items():
            launched = getattr(_LAUNCH, kind)(name) if _LAUNCH.text(name) is not None else None
            value = _LAUNCH.agreed(name, getattr(self, name), launched)
            setattr(self, name, default if value is None else value)
        self.consumed_samples = self.consumed_samples or [0, 0, 0]
        self._check()

    def strategy(self, parallelism: Any = None) -> Any:
        """Returns the engine that these are the options of."""
        return import_module(".megatron", __package__).MegatronStrategy(plugin=self, parallelism=parallelism)

    @property
    def degrees(self) -> dict[str, int]:
        """The sizes of Megatron's groups, by its names for them."""
        return {
            "tensor_model_parallel_size": self.tp_degree or 1,
            "pipeline_model_parallel_size": self.pp_degree or 1,
            "context_parallel_size": self.context_parallel_size or 1,
            "expert_model_parallel_size": self.expert_model_parallel_size or 1,
        }

    def _check(self) -> None:
        if any(self.consumed_samples or ()):
            raise ValueError(
                f"Expected no consumed_samples, as loaders go on where a checkpoint says. Received: "
                f"consumed_samples={self.consumed_samples}. Use load_state, or skip_first_batches."
            )
        for name, (default, advice) in _GONE.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"Expected {name}={default!r}. Received: {name}={getattr(self, name)!r}, which is no part of "
                    f"megatron-core. {advice}."
                )
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Expected {name} to be 1 or more. Received: {name}={value!r}. Choose a whole number.")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value is not None and value not in words:
                raise ValueError(f"Expected {name} of {', '.join(words)}. Received: {name}={value!r}. Choose one.")
        if self.gradient_clipping is None or self.gradient_clipping < 0:
            raise ValueError(
                f"Expected gradient_clipping of 0 or more. Received: gradient_clipping={self.gradient_clipping!r}. "
                "Use 0 for none."
            )
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.lr_mult != 1.0 and self.scale_lr_cond is None:
            raise ValueError(
                f"Expected scale_lr_cond with lr_mult, which says for what. Received: lr_mult={self.lr_mult}. Set both."
            )
        if self.sequence_parallelism and self.tp_degree == 1:
            raise ValueError(
                "Expected tp_degree of 2 or more with sequence_parallelism, which shares sequences among the ranks "
                "that share layers. Received: tp_degree=1. Set tp_degree, or leave sequence_parallelism out."
            )
        if self.num_layers_per_virtual_pipeline_stage is not None and self.pp_degree == 1:
            raise ValueError(
                "Expected pp_degree of 2 or more with num_layers_per_virtual_pipeline_stage. Received: pp_degree=1. "
                "Set pp_degree, or leave virtual stages out."
            )
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ValueError(
                "Expected one granularity. Received: recompute_activations=True, which is 'selective', and "
                "recompute_granularity='full'. Leave recompute_activations out."
            )
        if self.recompute_granularity == "full" and self.recompute_method is None:
            raise ValueError(
                "Expected recompute_method with recompute_granularity='full'. Received: None. Choose 'uniform' or "
                "'block', and recompute_num_layers."
            )
        if self.overlap_cpu_optimizer_d2h_h2d and not self.optimizer_cpu_offload:
            raise ValueError(
                "Expected optimizer_cpu_offload with overlap_cpu_optimizer_d2h_h2d. Received: False. Set both."
            )

    # Accelerate's own calls: here they note what a run says for who reads `megatron_lm_default_args`.

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Notes a model's sizes, by its config."""
        config = getattr(model, "config", model)
        known = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        self.megatron_lm_default_args |= {name: getattr(config, name) for name in known if hasattr(config, name)}

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Notes the precision ("fp16" or "bf16")."""
        self.megatron_lm_default_args |= {name: name == mixed_precision for name in ("fp16", "bf16")}

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Notes the sizes of batches: of a micro-batch, and of a step over all ranks."""
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * (self.num_micro_batches or 1)
        sizes = ("data_parallel_size", "micro_batch_size", "global_batch_size")
        self.megatron_lm_default_args |= {name: getattr(self, name) for name in sizes}

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Notes the kind of an optimizer and its options."""
        name = type(optimizer).__name__.lower()
        if "adam" not in name and "sgd" not in name:
            raise ValueError(f"Expected Adam, AdamW or SGD for Megatron. Received: {name}. Use one of these.")
        defaults = getattr(optimizer, "defaults", {})
        said = {"optimizer": "adam" if "adam" in name else "sgd"}
        said |= {key: defaults[key] for key in ("lr", "weight_decay") if key in defaults}
        self.megatron_lm_default_args |= said

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Takes the length of a MegatronLMDummyScheduler over, where no field says it."""
        if self.train_iters is None:
            self.train_iters = scheduler.total_num_steps
        if self.lr_warmup_iters is None and self.lr_warmup_samples is None and self.lr_warmup_fraction is None:
            self.lr_warmup_iters = scheduler.warmup_num_steps
        self.megatron_lm_default_args |= {"train_iters": self.train_iters, "lr_warmup_iters": self.lr_warmup_iters}

    def set_tensorboard_logging_options(self) -> None:
        """Notes nothing: trackers log (see `log_with`)."""
