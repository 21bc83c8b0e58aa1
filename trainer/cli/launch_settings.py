"""What can be said about a launch: every flag with its place in a launch file, its kind, default and variable.

Names, choices and defaults are those of Accelerate's command line and config file; a few settings that Accelerate has
only as flags may stand in a file too. One row says all about one setting, so that the command line, the files, the
environment and the questionnaire cannot disagree. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .sources import UsageError

PRECISIONS = ("no", "fp16", "bf16", "fp8")
DYNAMO_BACKENDS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "ipex", "tvm", "hpu_backend",
)  # fmt: skip
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMM_HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
    "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM", "TP",
    "DATA_PARALLEL", "MODEL_PARALLEL",  # SageMaker's
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One row: `section` is the mapping in a launch file that holds it, empty at the top; `switch` takes no value."""

    name: str
    kind: Callable[[Any], Any]
    default: Any = None
    text: str = ""
    section: str = ""
    choices: tuple[str, ...] = ()
    variable: str | None = None  # what the processes (and this one, as a source) read it from
    switch: bool = False
    flag: bool = True  # can be given on the command line
    short: str | None = None
    engine: str | None = None

    @property
    def place(self) -> tuple[str, ...]:
        """Where it stands in a launch file."""
        return (self.section, self.name) if self.section else (self.name,)

    def read(self, value: Any, source: str) -> Any:
        """Return a value that was written somewhere; raises UsageError with its source for one that does not fit."""
        try:
            read = None if value is None else self.kind(value)
        except (ValueError, TypeError):
            kinds: dict[Any, str] = {whole: "a whole number", number: "a number", truth: "true or false"}
            wanted = kinds.get(self.kind, "another value")
            raise UsageError(f"Expected {self.name} to be {wanted}. Received: {value!r} ({source}).") from None
        if self.choices and read is not None and read not in self.choices:
            raise UsageError(
                f"Expected {self.name} to be one of {', '.join(self.choices)}. Received: {value!r} ({source}). "
                f"{nearest(str(value), self.choices)}"
            )
        return read


def nearest(name: str, known: Any) -> str:
    """Return advice that names the nearest known name."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {found[0]}?" if found else "Choose one of these."


def words(value: Any) -> str:
    """Read text, where YAML 1.1 may have made a truth value of a word: `no` and `NO` are words here."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def spelled(value: Any) -> str:
    """Read a word that is often a truth value."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def lower(value: Any) -> str:
    """Read a word whose case does not matter."""
    return words(value).lower()


def joined(value: Any) -> str:
    """Read a word whose case and hyphens do not matter: MS-AMP is msamp."""
    return lower(value).replace("-", "")


def upper(value: Any) -> str:
    """Read a word that is written in capitals."""
    return words(value).upper()


def whole(value: Any) -> int | str:
    """Read a whole number, or the word auto (which DeepSpeed's files know)."""
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError(value)
    return int(value)


def number(value: Any) -> float | str:
    """Read a number, or the word auto."""
    if isinstance(value, bool):
        raise ValueError(value)
    return "auto" if value == "auto" else float(value)


def truth(value: Any) -> bool:
    """Read yes and no in all their spellings."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in ("1", "0", "true", "false", "yes", "no", "y", "n", "on", "off", "t", "f"):
        raise ValueError(value)
    return word in ("1", "true", "yes", "y", "on", "t")


def several(value: Any) -> list[str]:
    """Read a list of texts; one text is a list of one."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]


def _row(name: str, kind: Callable[[Any], Any], default: Any = None, text: str = "", **more: Any) -> Setting:
    return Setting(name, kind, default, text, **more)


_SWITCH: dict[str, Any] = {"switch": True}
_FILE: dict[str, Any] = {"flag": False}
_PROCESSES = (
    _row("compute_environment", upper, "LOCAL_MACHINE", "where it runs", **_FILE,
         choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER")),
    _row("distributed_type", upper, None, "what kind of distribution", **_FILE, choices=DISTRIBUTED_TYPES),
    _row("cpu", truth, False, "train on the CPU", **_SWITCH, variable="ACCELERATE_USE_CPU"),
    _row("multi_gpu", truth, False, "train on several GPUs", **_SWITCH),
    _row("num_processes", whole, None, "processes in all, over all machines; default: one per GPU, else one"),
    _row("num_machines", whole, 1, "machines"),
    _row("machine_rank", whole, 0, "this machine's number, from 0"),
    _row("main_process_ip", words, None, "address of machine 0"),
    _row("main_process_port", whole, None, "port on machine 0 (default: 29500 for several machines, else a free one)"),
    _row("gpu_ids", words, None, "which GPUs of this machine, as 0,1, or all"),
    _row("num_cpu_threads_per_process", whole, None, "OMP_NUM_THREADS; default: cores / processes on the CPU, else 1",
         variable="OMP_NUM_THREADS"),
    _row("enable_cpu_affinity", truth, False, "bind each process to the cores next to its GPU", **_SWITCH,
         variable="ACCELERATE_CPU_AFFINITY"),
    _row("same_network", truth, False, "all machines are in one network; accepted, needs nothing", **_SWITCH),
    _row("rdzv_backend", words, "static", "how machines meet: static, c10d, etcd"),
    _row("rdzv_conf", words, "", "settings of that, as key=value,key=value"),
    _row("max_restarts", whole, 0, "how often to start all processes again after one has failed"),
    _row("monitor_interval", number, 0.1, "seconds between looks at the processes"),
    _row("role", words, "default", "name of the processes in torch's logs"),
    _row("log_dir", words, None, "folder for what the processes write"),
    _row("tee", words, "0", "0 to 3: also to that folder: nothing, standard output, standard error, both", short="-t"),
)  # fmt: skip
_TRAINING = (
    _row("mixed_precision", lower, None, "precision of the computation", choices=PRECISIONS,
         variable="ACCELERATE_MIXED_PRECISION"),
    _row("downcast_bf16", truth, False, "TPU: double precision is bfloat16 too", **_SWITCH,
         variable="ACCELERATE_DOWNCAST_BF16"),
    _row("gradient_accumulation_steps", whole, None, "micro-batches per optimizer step",
         variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
    _row("gradient_clipping", number, None, "largest norm of the gradients", variable="ACCELERATE_GRADIENT_CLIPPING"),
    _row("debug", truth, False, "check shapes before collectives", **_SWITCH, variable="ACCELERATE_DEBUG_MODE"),
    _row("main_training_function", words, "main", "TPU: the function to start"),
)  # fmt: skip
_DYNAMO = (
    _row("dynamo_backend", lower, "no", "compile models with", choices=DYNAMO_BACKENDS),
    _row("dynamo_mode", words, "default", "torch.compile's mode", choices=DYNAMO_MODES),
    _row("dynamo_use_fullgraph", truth, False, "no breaks in the graph", **_SWITCH),
    _row("dynamo_use_dynamic", truth, False, "dynamic shapes", **_SWITCH),
    _row("dynamo_use_regional_compilation", truth, False, "compile repeated blocks once", **_SWITCH),
)  # fmt: skip
_FSDP = (
    _row("fsdp_version", words, "1", "FSDP's version", choices=("1", "2")),
    _row("fsdp_auto_wrap_policy", words, None, "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"),
    _row("fsdp_offload_params", truth, False, "parameters and gradients to the CPU"),
    _row("fsdp_min_num_params", whole, 100_000_000, "for SIZE_BASED_WRAP"),
    _row("fsdp_sharding_strategy", words, "FULL_SHARD", "what is sharded (version 1)"),
    _row("fsdp_reshard_after_forward", spelled, "true", "parameters are sharded again after the forward"),
    _row("fsdp_transformer_layer_cls_to_wrap", words, None, "class names of layers, comma-separated"),
    _row("fsdp_backward_prefetch", words, None, "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"),
    _row("fsdp_state_dict_type", words, None, "FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT"),
    _row("fsdp_forward_prefetch", truth, False, "prefetch in the forward"),
    _row("fsdp_use_orig_params", truth, True, "parameters keep their names (version 1)"),
    _row("fsdp_cpu_ram_efficient_loading", truth, True, "only the first process loads weights"),
    _row("fsdp_sync_module_states", truth, True, "weights go from the first process to all"),
    _row("fsdp_activation_checkpointing", truth, False, "compute activations again in the backward"),
    _row("fsdp_activation_checkpointing_offload", truth, False, "and keep what they need on the CPU (version 2)"),
    _row("fsdp_ignored_modules", words, None, "modules to leave out", **_FILE),
)  # fmt: skip
_DDP = (
    _row("ddp_bucket_cap_mb", whole, None, "size of the buckets in which gradients are reduced, in MiB"),
    _row("ddp_find_unused_parameters", truth, None, "look for parameters that take no part in a loss"),
    _row("ddp_static_graph", truth, None, "every step has the same graph"),
    _row("ddp_gradient_as_bucket_view", truth, None, "gradients lie in the buckets"),
    _row("ddp_broadcast_buffers", truth, None, "buffers go from the first process to all before each step"),
    _row("ddp_comm_hook", lower, None, "compress gradients", choices=COMM_HOOKS),
    _row("ddp_comm_wrapper", lower, None, "and send them as", choices=COMM_HOOKS[:3]),
)  # fmt: skip
_GROUP = (
    _row("ddp_backend", lower, None, "how processes communicate, under every engine: gloo, nccl, mpi, …"),
    _row("ddp_timeout", number, None, "seconds that a collective may wait, under every engine"),
)
_DEEPSPEED = (
    _row("deepspeed_config_file", words, None, "DeepSpeed's JSON file"),
    _row("zero_stage", whole, None, "ZeRO's stage"),
    _row("offload_optimizer_device", words, None, "none, cpu or nvme"),
    _row("offload_param_device", words, None, "none, cpu or nvme"),
    _row("offload_optimizer_nvme_path", words, None, "where on nvme"),
    _row("offload_param_nvme_path", words, None, "where on nvme"),
    _row("zero3_init_flag", spelled, None, "build models sharded"),
    _row("zero3_save_16bit_model", spelled, None, "save whole 16-bit weights"),
    _row("deepspeed_hostfile", words, None, "hosts"),
    _row("deepspeed_exclusion_filter", words, None, "hosts to leave out"),
    _row("deepspeed_inclusion_filter", words, None, "hosts to use"),
    _row("deepspeed_multinode_launcher", words, None, "DeepSpeed's launcher"),
    _row("deepspeed_moe_layer_cls_names", words, None, "class names of MoE layers"),
)  # fmt: skip
_MEGATRON_KINDS = (
    ("tp_degree", whole, 1), ("use_custom_fsdp", truth, False), ("no_load_optim", truth, False),
    ("eod_mask_loss", truth, False), ("overlap_cpu_optimizer_d2h_h2d", truth, False), ("no_save_optim", truth, False),
    ("optimizer_cpu_offload", truth, False), ("use_precision_aware_optimizer", truth, False),
    ("decoder_last_pipeline_num_layers", whole, None), ("pp_degree", whole, 1), ("num_micro_batches", whole, None),
    ("sequence_parallelism", spelled, None), ("recompute_activations", spelled, None),
    ("use_distributed_optimizer", spelled, None), ("gradient_clipping", number, 1.0),
    ("recompute_granularity", words, None), ("recompute_method", words, None), ("recompute_num_layers", whole, None),
    ("attention_backend", spelled, None), ("expert_model_parallel_size", whole, None),
    ("context_parallel_size", whole, None), ("attention_dropout", number, None), ("hidden_dropout", number, None),
    ("attention_softmax_in_fp32", spelled, None), ("expert_tensor_parallel_size", whole, None),
    ("calculate_per_token_loss", spelled, None), ("use_rotary_position_embeddings", spelled, None),
)  # fmt: skip
_MEGATRON = tuple(_row(f"megatron_lm_{name}", kind, default) for name, kind, default in _MEGATRON_KINDS)
_PARALLELISM = (
    _row("parallelism_config_dp_replicate_size", whole, 1, "replicas"),
    _row("parallelism_config_dp_shard_size", whole, 1, "shards"),
    _row("parallelism_config_tp_size", whole, 1, "tensor parallel degree"),
    _row("parallelism_config_cp_size", whole, 1, "context parallel degree"),
    _row("parallelism_config_cp_backend", words, "torch", choices=("torch",)),
    _row("parallelism_config_cp_comm_strategy", words, "allgather", "allgather or alltoall"),
    _row("parallelism_config_sp_size", whole, 1, "sequence parallel degree"),
    _row("parallelism_config_sp_backend", words, "deepspeed", choices=("deepspeed",)),
    _row("parallelism_config_sp_seq_length", words, None, "length of sequences"),
    _row("parallelism_config_sp_seq_length_is_variable", truth, True, "lengths vary"),
    _row("parallelism_config_sp_attn_implementation", words, "sdpa", "how attention is computed"),
)  # fmt: skip
_FP8 = (
    _row("fp8_backend", joined, None, choices=("ao", "te", "msamp")),
    _row("fp8_use_autocast_during_eval", truth, False, **_SWITCH),
    _row("fp8_margin", whole, 0),
    _row("fp8_interval", whole, 1),
    _row("fp8_format", upper, "HYBRID", choices=("HYBRID", "E4M3", "E5M2")),
    _row("fp8_amax_history_len", whole, 1024),
    _row("fp8_amax_compute_algo", lower, "most_recent", choices=("max", "most_recent")),
    _row("fp8_override_linear_precision", words, None, "three of true and false, comma-separated"),
    _row("fp8_opt_level", upper, "O2", choices=("O1", "O2")),
    _row("fp8_enable_fsdp_float8_all_gather", truth, True),
    _row("fp8_pad_inner_dim", truth, True),
    _row("fp8_use_mxfp8_block_scaling", truth, False, **_FILE),
)  # fmt: skip
_MPI = (
    _row("mpirun_hostfile", words, None, "start by mpirun on these hosts (implies the CPU)"),
    _row("mpirun_ccl", words, None, "workers of oneCCL", **_FILE),
)
_TPU = (
    _row("tpu", truth, False, "train on TPU cores", **_SWITCH),
    _row("tpu_use_cluster", truth, False, "a TPU pod: show the command that starts all its workers", **_FILE),
    _row("tpu_use_sudo", truth, False, "with sudo there", **_SWITCH),
    _row("tpu_vm", several, None, "names of TPU VMs", **_FILE),
    _row("tpu_env", several, None, "variables for them, NAME=VALUE", **_FILE),
    _row("tpu_name", words, None, "name of the pod", **_FILE),
    _row("tpu_zone", words, None, "its zone", **_FILE),
    _row("command_file", words, None, "file of commands to run on it", **_FILE),
    _row("commands", several, None, "commands to run on it", **_FILE),
)
_ENGINES = (
    _row("use_deepspeed", truth, False, "train by DeepSpeed", **_SWITCH),
    _row("use_fsdp", truth, False, "train by FSDP", **_SWITCH),
    _row("use_megatron_lm", truth, False, "train by Megatron-LM", **_SWITCH),
    _row("use_parallelism_config", truth, False, "combine kinds of parallelism", **_SWITCH),
)
_SAGEMAKER = tuple(
    _row(name, words, None, text, **_FILE)
    for name, text in (
        ("ec2_instance_type", "kind of machine"), ("iam_role_name", "role"), ("image_uri", "image"),
        ("profile", "AWS profile"), ("region", "AWS region"), ("base_job_name", "name of jobs"),
        ("pytorch_version", "version there"), ("transformers_version", "version there"),
        ("py_version", "version there"),
        ("sagemaker_inputs_file", "file of inputs"), ("sagemaker_metrics_file", "file of metrics"),
    )
) + (
    _row("aws_access_key_id", words, None, "SageMaker's key"),
    _row("aws_secret_access_key", words, None, "SageMaker's secret"),
    _row("additional_args", dict, None, "further arguments of the estimator", **_FILE),
)  # fmt: skip


def _in(section: str, rows: tuple[Setting, ...], prefix: str, engine: str | None = None) -> Iterator[Setting]:
    """Give rows their section and the variables by which Accelerate hands them on."""
    for row in rows:
        yield replace(row, section=section, variable=row.variable or f"{prefix}{row.name.upper()}", engine=engine)


_OWN_VARIABLES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "deepspeed_hostfile": None, "deepspeed_exclusion_filter": None, "deepspeed_inclusion_filter": None,
    "deepspeed_multinode_launcher": None,  # words for DeepSpeed's own launcher
}  # fmt: skip
_ALL = (
    *_PROCESSES, *_TRAINING, *_ENGINES, *_in("dynamo_config", _DYNAMO, "ACCELERATE_"),
    *_in("ddp_config", _DDP, "DRIVETRAIN_", "DDP"), *_in("ddp_config", _GROUP, "DRIVETRAIN_"),
    *_in("fsdp_config", _FSDP, "", "FSDP"), *_in("deepspeed_config", _DEEPSPEED, "ACCELERATE_DEEPSPEED_", "DeepSpeed"),
    *_in("megatron_lm_config", _MEGATRON, "", "Megatron-LM"),
    *_in("parallelism_config", _PARALLELISM, "", "ParallelismConfig"),
    *_in("fp8_config", _FP8, "ACCELERATE_"), *(replace(row, section="mpirun_config") for row in _MPI),
    *_TPU, *_SAGEMAKER,
)  # fmt: skip
SETTINGS = {row.name: replace(row, variable=_OWN_VARIABLES.get(row.name, row.variable)) for row in _ALL}
"""Every setting by its name."""

SECTIONS = {row.section for row in SETTINGS.values() if row.section}
SWITCHES = {"use_deepspeed": "DeepSpeed", "use_fsdp": "FSDP", "use_megatron_lm": "Megatron-LM", "tpu": "TPU (XLA)",
            "use_parallelism_config": "ParallelismConfig"}  # fmt: skip
"""The switches that ask for an engine, and that engine's name."""
