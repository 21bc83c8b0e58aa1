"""drivetrain: PyTorch training that is exact, durable, thin and plain.

All public names live here and load on first use: `import drivetrain` alone imports no torch.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBPACKAGES = ("callbacks", "strategies", "trainer")

_EXPORTS: dict[str, str] = {
    # The three ways in
    "Trainer": "trainer.trainer",
    "TrainModule": "trainer.module",
    "DataModule": "trainer.datamodule",
    "Accelerator": "trainer.accelerator",
    "TrainCLI": "trainer.cli.train_cli",
    # Callbacks
    "Callback": "callbacks.base",
    "LambdaCallback": "callbacks.base",
    "AnomalyError": "callbacks.anomaly",
    "AnomalyPolicy": "callbacks.anomaly",
    "Interrupted": "callbacks.preemption",
    "OutOfMemory": "callbacks.out_of_memory",
    "PeerFailed": "callbacks.siblings",
    "Preemption": "callbacks.preemption",
    "Rescue": "callbacks.rescue",
    "Stalled": "callbacks.watchdog",
    "Watchdog": "callbacks.watchdog",
    "CheckpointUpload": "callbacks.upload",
    "EarlyStopping": "callbacks.early_stopping",
    "GradientAccumulation": "callbacks.accumulation",
    "GradientClipping": "callbacks.clipping",
    "CompilationMonitor": "callbacks.compilation",
    "DeviceStatsMonitor": "callbacks.device_stats",
    "LearningRateMonitor": "callbacks.lr_monitor",
    "NormMonitor": "callbacks.norms",
    "ThroughputMonitor": "callbacks.throughput",
    "ModelCheckpoint": "callbacks.checkpoint",
    "ModelSummary": "callbacks.summary",
    "OnExceptionCheckpoint": "callbacks.checkpoint",
    "Profiler": "callbacks.profiler",
    "Report": "callbacks.report.record",
    "Progress": "callbacks.progress",
    "Timer": "callbacks.timer",
    "Tracking": "callbacks.tracking.callback",
    # Trackers
    "CSVTracker": "callbacks.tracking.csv",
    "GeneralTracker": "callbacks.tracking.base",
    "JSONLinesTracker": "callbacks.tracking.jsonl",
    "TensorBoardTracker": "callbacks.tracking.tensorboard",
    "AimTracker": "callbacks.tracking.aim",
    "ClearMLTracker": "callbacks.tracking.clearml",
    "CometMLTracker": "callbacks.tracking.comet",
    "DVCLiveTracker": "callbacks.tracking.dvclive",
    "MLflowTracker": "callbacks.tracking.mlflow",
    "SwanLabTracker": "callbacks.tracking.swanlab",
    "TrackioTracker": "callbacks.tracking.trackio",
    "WandBTracker": "callbacks.tracking.wandb",
    "register_tracker_class": "callbacks.tracking.base",
    # Strategies
    "DeepSpeedStrategy": "strategies.deepspeed",
    "DeepSpeedPlugin": "strategies.deepspeed_plugin",
    "HfDeepSpeedConfig": "strategies.deepspeed_config",
    "DummyOptim": "strategies.deepspeed_optimizer",
    "DummyScheduler": "strategies.deepspeed_optimizer",
    "DeepSpeedEngineWrapper": "strategies.deepspeed_engine",
    "DeepSpeedOptimizerWrapper": "strategies.deepspeed_optimizer",
    "DeepSpeedSchedulerWrapper": "strategies.deepspeed_optimizer",
    "map_pytorch_optim_to_deepspeed": "strategies.deepspeed_optimizer",
    "GatheredParameters": "strategies.deepspeed_access",
    "get_active_deepspeed_plugin": "strategies.deepspeed_access",
    "compile_regions_deepspeed": "strategies.deepspeed_access",
    "MegatronLMPlugin": "strategies.megatron_plugin",
    "MegatronStrategy": "strategies.megatron",
    "MegatronModel": "strategies.megatron_model",
    "MegatronEngine": "strategies.megatron_loop",
    "MegatronLMOptimizerWrapper": "strategies.megatron_optimizer",
    "MegatronLMSchedulerWrapper": "strategies.megatron_scheduler",
    "MegatronLMDummyDataLoader": "strategies.megatron_data",
    "MegatronGPT": "trainer.megatron_module",
    "MegatronBert": "trainer.megatron_module",
    "MegatronT5": "trainer.megatron_module",
    "MegatronDataModule": "trainer.megatron_module",
    "MegatronLMDummyScheduler": "strategies.megatron_scheduler",
    "AbstractTrainStep": "strategies.megatron_train_steps",
    "GPTTrainStep": "strategies.megatron_train_steps",
    "BertTrainStep": "strategies.megatron_train_steps",
    "T5TrainStep": "strategies.megatron_train_steps",
    "avg_losses_across_data_parallel_group": "strategies.megatron_loop",
    "gather_across_data_parallel_groups": "strategies.megatron_loop",
    "XLAPlugin": "strategies.xla_plugin",
    "XLAStrategy": "strategies.xla",
    "DDPStrategy": "strategies.ddp",
    "FSDPStrategy": "strategies.fsdp",
    "FSDP1Strategy": "strategies.fsdp1",
    "SingleDeviceStrategy": "strategies.base",
    "Strategy": "strategies.base",
    # Settings
    "AutocastKwargs": "strategies.settings",
    "DDPCommunicationHookType": "strategies.settings",
    "DataLoaderConfiguration": "strategies.settings",
    "DistributedDataParallelKwargs": "strategies.settings",
    "DistributedType": "strategies.settings",
    "DynamoBackend": "strategies.settings",
    "GradScalerKwargs": "strategies.settings",
    "GradientAccumulationPlugin": "strategies.settings",
    "InitProcessGroupKwargs": "strategies.settings",
    "LoggerType": "strategies.settings",
    "PrecisionType": "strategies.settings",
    "ProfileKwargs": "strategies.settings",
    "ProjectConfiguration": "strategies.settings",
    "RNGType": "strategies.settings",
    "TorchDynamoPlugin": "strategies.settings",
    # State of this process
    "AcceleratorState": "strategies.state",
    "GradientState": "strategies.gradients",
    "PartialState": "strategies.state",
    # Functions
    "prepare_data_loader": "strategies.data.preparing",
    "prove_loop": "trainer.proof",
    "prove_resume": "trainer.proof",
    "set_seed": "strategies.random",
    "skip_first_batches": "strategies.data.loader",
    # Data
    "SeedableRandomSampler": "strategies.data.shards",
    "BatchSamplerShard": "strategies.data.shards",
    "IterableDatasetShard": "strategies.data.shards",
    "SkipBatchSampler": "strategies.data.shards",
    "SkipDataLoader": "strategies.data.shards",
    "get_sampler": "strategies.data.shards",
    "DataLoaderDispatcher": "strategies.data.dispatcher",
    "DataLoaderShard": "strategies.data.loader",
    # Between processes
    "broadcast": "strategies.collectives",
    "broadcast_object_list": "strategies.collectives",
    "gather": "strategies.collectives",
    "gather_object": "strategies.collectives",
    "pad_across_processes": "strategies.collectives",
    "reduce": "strategies.collectives",
    "CannotPadNestedTensorWarning": "strategies.collectives",
    "DistributedOperationException": "strategies.world",
    "synchronize_rng_state": "strategies.agreement",
    "synchronize_rng_states": "strategies.agreement",
    "MultiProcessAdapter": "strategies.messages",
    "get_logger": "strategies.messages",
    "tqdm": "strategies.messages",
    "LocalSGD": "trainer.local_sgd",
    # Nested data
    "TensorInformation": "strategies.nested",
    "concatenate": "strategies.nested",
    "convert_outputs_to_fp32": "strategies.nested",
    "convert_to_fp32": "strategies.nested",
    "find_batch_size": "strategies.nested",
    "find_device": "strategies.nested",
    "get_data_structure": "strategies.nested",
    "get_shape": "strategies.nested",
    "honor_type": "strategies.nested",
    "ignorant_find_batch_size": "strategies.nested",
    "initialize_tensors": "strategies.nested",
    "is_namedtuple": "strategies.nested",
    "is_tensor_information": "strategies.nested",
    "is_torch_tensor": "strategies.nested",
    "listify": "strategies.nested",
    "pad_input_tensors": "strategies.nested",
    "recursively_apply": "strategies.nested",
    "send_to_device": "strategies.nested",
    "slice_tensors": "strategies.nested",
    # Models and weights
    "save": "strategies.weights",
    "load": "strategies.weights",
    "load_state_dict": "strategies.weights",
    "load_checkpoint_in_model": "strategies.weights",
    "clean_state_dict_for_safetensors": "strategies.weights",
    "named_module_tensors": "strategies.weights",
    "find_tied_parameters": "strategies.weights",
    "retie_parameters": "strategies.weights",
    "init_empty_weights": "strategies.empty_weights",
    "init_on_device": "strategies.empty_weights",
    "extract_model_from_parallel": "strategies.wrappers",
    "is_compiled_module": "strategies.wrappers",
    "has_compiled_regions": "strategies.wrappers",
    "compile_regions": "strategies.wrappers",
    "is_repeated_blocks": "strategies.wrappers",
    "has_repeated_blocks": "strategies.wrappers",
    "model_has_dtensor": "strategies.wrappers",
    "is_peft_model": "strategies.wrappers",
    "get_module_children_bottom_up": "strategies.wrappers",
    "get_pretty_name": "strategies.wrappers",
    "recursive_getattr": "strategies.wrappers",
    "merge_dicts": "strategies.wrappers",
    "convert_bytes": "strategies.sizes",
    "convert_file_size_to_int": "strategies.sizes",
    "dtype_byte_size": "strategies.sizes",
    "compute_module_sizes": "strategies.sizes",
    "id_tensor_storage": "strategies.sizes",
    "clear_device_cache": "strategies.memory",
    "release_memory": "strategies.memory",
    "should_reduce_batch_size": "strategies.memory",
    "find_executable_batch_size": "strategies.memory",
    "MODEL_NAME": "strategies.file_names",
    "OPTIMIZER_NAME": "strategies.file_names",
    "SCHEDULER_NAME": "strategies.file_names",
    "SAMPLER_NAME": "strategies.file_names",
    "SCALER_NAME": "strategies.file_names",
    "RNG_STATE_NAME": "strategies.file_names",
    "WEIGHTS_NAME": "strategies.file_names",
    "WEIGHTS_PATTERN_NAME": "strategies.file_names",
    "WEIGHTS_INDEX_NAME": "strategies.file_names",
    "SAFE_MODEL_NAME": "strategies.file_names",
    "SAFE_WEIGHTS_NAME": "strategies.file_names",
    "SAFE_WEIGHTS_PATTERN_NAME": "strategies.file_names",
    "SAFE_WEIGHTS_INDEX_NAME": "strategies.file_names",
    "PROFILE_PATTERN_NAME": "strategies.file_names",
    # Launching
    "debug_launcher": "strategies.launch",
    "notebook_launcher": "strategies.launch",
    # Environment
    "patch_environment": "strategies.variables",
    "clear_environment": "strategies.variables",
    "purge_accelerate_environment": "strategies.variables",
    "str_to_bool": "strategies.variables",
    "get_int_from_env": "strategies.variables",
    "parse_flag_from_env": "strategies.variables",
    "parse_choice_from_env": "strategies.variables",
    "convert_dict_to_env_variables": "strategies.variables",
    "are_libraries_initialized": "strategies.variables",
    # What is installed
    "has_package": "strategies.availability",
    "compare_versions": "strategies.availability",
    "is_torch_version": "strategies.availability",
    "deepspeed_required": "strategies.availability",
    "torchao_required": "strategies.availability",
    "is_bf16_available": "strategies.availability",
    "is_fp16_available": "strategies.availability",
    "is_fp8_available": "strategies.availability",
    "is_cuda_available": "strategies.availability",
    "is_rocm_available": "strategies.availability",
    "is_mps_available": "strategies.availability",
    "is_xpu_available": "strategies.availability",
    "is_xccl_available": "strategies.availability",
    "is_hpu_available": "strategies.availability",
    "is_habana_gaudi1": "strategies.availability",
    "is_npu_available": "strategies.availability",
    "is_mlu_available": "strategies.availability",
    "is_musa_available": "strategies.availability",
    "is_sdaa_available": "strategies.availability",
    "is_neuron_available": "strategies.availability",
    "is_torch_xla_available": "strategies.availability",
    "is_weights_only_available": "strategies.availability",
    "is_bnb_available": "strategies.availability",
    "is_4bit_bnb_available": "strategies.availability",
    "is_8bit_bnb_available": "strategies.availability",
    "is_bitsandbytes_multi_backend_available": "strategies.availability",
    "is_transformer_engine_mxfp8_available": "strategies.availability",
    "is_aim_available": "strategies.availability",
    "is_amdsmi_available": "strategies.availability",
    "is_boto3_available": "strategies.availability",
    "is_clearml_available": "strategies.availability",
    "is_comet_ml_available": "strategies.availability",
    "is_datasets_available": "strategies.availability",
    "is_deepspeed_available": "strategies.availability",
    "is_dvclive_available": "strategies.availability",
    "is_import_timer_available": "strategies.availability",
    "is_lomo_available": "strategies.availability",
    "is_matplotlib_available": "strategies.availability",
    "is_megatron_lm_available": "strategies.availability",
    "is_mlflow_available": "strategies.availability",
    "is_msamp_available": "strategies.availability",
    "is_pandas_available": "strategies.availability",
    "is_peft_available": "strategies.availability",
    "is_pippy_available": "strategies.availability",
    "is_pynvml_available": "strategies.availability",
    "is_pytest_available": "strategies.availability",
    "is_rich_available": "strategies.availability",
    "is_sagemaker_available": "strategies.availability",
    "is_schedulefree_available": "strategies.availability",
    "is_swanlab_available": "strategies.availability",
    "is_tensorboard_available": "strategies.availability",
    "is_timm_available": "strategies.availability",
    "is_torchao_available": "strategies.availability",
    "is_torchdata_available": "strategies.availability",
    "is_torchdata_stateful_dataloader_available": "strategies.availability",
    "is_torchvision_available": "strategies.availability",
    "is_trackio_available": "strategies.availability",
    "is_transformer_engine_available": "strategies.availability",
    "is_transformers_available": "strategies.availability",
    "is_triton_available": "strategies.availability",
    "is_wandb_available": "strategies.availability",
    # Further settings
    "ComputeEnvironment": "strategies.settings",
    "CustomDtype": "strategies.settings",
    "FP8BackendType": "strategies.settings",
    "KwargsHandler": "strategies.settings",
    "SageMakerDistributedType": "strategies.settings",
    # Ports
    "get_free_port": "strategies.ports",
    "is_port_in_use": "strategies.ports",
    # Meeting
    "wait_for_everyone": "strategies.agreement",
    # More of trackers
    "filter_trackers": "callbacks.tracking.base",
    "get_available_trackers": "callbacks.tracking.base",
    "on_main_process": "callbacks.tracking.base",
    # The launch file
    "write_basic_config": "trainer.cli.basic_config",
    # What is prepared
    "AcceleratedOptimizer": "strategies.optimizer",
    "AcceleratedScheduler": "strategies.scheduler",
    "BaseEnum": "strategies.settings",
    # What is refused
    "AlignDevicesHook": "strategies.refusals",
    "add_hook_to_module": "strategies.refusals",
    "remove_hook_from_module": "strategies.refusals",
    "dispatch_model": "strategies.refusals",
    "load_checkpoint_and_dispatch": "strategies.refusals",
    "infer_auto_device_map": "strategies.refusals",
    "get_balanced_memory": "strategies.refusals",
    "get_max_memory": "strategies.refusals",
    "get_max_layer_size": "strategies.refusals",
    "clean_device_map": "strategies.refusals",
    "save_fsdp_model": "strategies.fsdp_functions",
    "load_fsdp_model": "strategies.fsdp_functions",
    "save_fsdp_optimizer": "strategies.fsdp_functions",
    "load_fsdp_optimizer": "strategies.fsdp_functions",
    "merge_fsdp_weights": "strategies.fsdp_functions",
    "enable_fsdp_ram_efficient_loading": "strategies.fsdp_functions",
    "disable_fsdp_ram_efficient_loading": "strategies.fsdp_functions",
    "fsdp2_load_full_state_dict": "strategies.fsdp_functions",
    "fsdp2_switch_optimizer_parameters": "strategies.fsdp_functions",
    "fsdp2_canonicalize_names": "strategies.fsdp_functions",
    "fsdp2_prepare_auto_wrap_policy": "strategies.fsdp_functions",
    # Engines
    "FullyShardedDataParallelPlugin": "strategies.fsdp_plugin",
    "ParallelismConfig": "strategies.mesh",
    "TorchTensorParallelConfig": "strategies.parallel_options",
    "TorchTensorParallelPlugin": "strategies.parallel_options",
    "TorchContextParallelConfig": "strategies.parallel_options",
    "DeepSpeedSequenceParallelConfig": "strategies.parallel_options",
    "PipelineConfig": "strategies.parallel_options",
    "ParallelStrategy": "strategies.parallel",
    "TensorParallelStrategy": "strategies.parallel",
    "ContextParallelStrategy": "strategies.parallel",
    "SequenceParallelStrategy": "strategies.parallel",
    "PipelineStrategy": "strategies.pipeline",
    "ExpertParallelStrategy": "strategies.parallel",
    "AORecipeKwargs": "strategies.fp8_recipes",
    "TERecipeKwargs": "strategies.fp8_recipes",
    "MSAMPRecipeKwargs": "strategies.fp8_recipes",
    "FP8RecipeKwargs": "strategies.fp8_recipes",
    "convert_model_to_fp8_ao": "strategies.float8",
    "has_ao_layers": "strategies.float8",
    "find_first_last_linear_layers": "strategies.float8",
    "filter_linear_layers": "strategies.float8",
    "filter_first_and_last_linear_layers": "strategies.float8",
}
"""Name → the module that defines it."""

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:  # the same names for editors and type checkers; a test compares both
    from .callbacks.accumulation import GradientAccumulation as GradientAccumulation
    from .callbacks.anomaly import AnomalyError as AnomalyError
    from .callbacks.anomaly import AnomalyPolicy as AnomalyPolicy
    from .callbacks.preemption import Interrupted as Interrupted
    from .callbacks.out_of_memory import OutOfMemory as OutOfMemory
    from .callbacks.siblings import PeerFailed as PeerFailed
    from .callbacks.preemption import Preemption as Preemption
    from .callbacks.rescue import Rescue as Rescue
    from .callbacks.watchdog import Stalled as Stalled
    from .callbacks.watchdog import Watchdog as Watchdog
    from .callbacks.base import Callback as Callback
    from .callbacks.base import LambdaCallback as LambdaCallback
    from .callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
    from .callbacks.upload import CheckpointUpload as CheckpointUpload
    from .callbacks.checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .callbacks.clipping import GradientClipping as GradientClipping
    from .callbacks.compilation import CompilationMonitor as CompilationMonitor
    from .callbacks.early_stopping import EarlyStopping as EarlyStopping
    from .callbacks.device_stats import DeviceStatsMonitor as DeviceStatsMonitor
    from .callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from .callbacks.norms import NormMonitor as NormMonitor
    from .callbacks.throughput import ThroughputMonitor as ThroughputMonitor
    from .callbacks.profiler import Profiler as Profiler
    from .callbacks.report.record import Report as Report
    from .callbacks.progress import Progress as Progress
    from .callbacks.summary import ModelSummary as ModelSummary
    from .callbacks.timer import Timer as Timer
    from .callbacks.tracking.base import GeneralTracker as GeneralTracker
    from .callbacks.tracking.base import register_tracker_class as register_tracker_class
    from .callbacks.tracking.callback import Tracking as Tracking
    from .callbacks.tracking.csv import CSVTracker as CSVTracker
    from .callbacks.tracking.jsonl import JSONLinesTracker as JSONLinesTracker
    from .callbacks.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
    from .callbacks.tracking.aim import AimTracker as AimTracker
    from .callbacks.tracking.clearml import ClearMLTracker as ClearMLTracker
    from .callbacks.tracking.comet import CometMLTracker as CometMLTracker
    from .callbacks.tracking.dvclive import DVCLiveTracker as DVCLiveTracker
    from .callbacks.tracking.mlflow import MLflowTracker as MLflowTracker
    from .callbacks.tracking.swanlab import SwanLabTracker as SwanLabTracker
    from .callbacks.tracking.trackio import TrackioTracker as TrackioTracker
    from .callbacks.tracking.wandb import WandBTracker as WandBTracker
    from .strategies.base import SingleDeviceStrategy as SingleDeviceStrategy
    from .strategies.base import Strategy as Strategy
    from .strategies.data.preparing import prepare_data_loader as prepare_data_loader
    from .strategies.data.loader import skip_first_batches as skip_first_batches
    from .strategies.xla import XLAStrategy as XLAStrategy
    from .strategies.xla_plugin import XLAPlugin as XLAPlugin
    from .strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from .strategies.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from .strategies.deepspeed_config import HfDeepSpeedConfig as HfDeepSpeedConfig
    from .strategies.deepspeed_optimizer import DummyOptim as DummyOptim
    from .strategies.deepspeed_optimizer import DummyScheduler as DummyScheduler
    from .strategies.deepspeed_engine import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
    from .strategies.deepspeed_optimizer import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
    from .strategies.deepspeed_optimizer import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
    from .strategies.deepspeed_optimizer import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
    from .strategies.megatron_plugin import MegatronLMPlugin as MegatronLMPlugin
    from .strategies.megatron import MegatronStrategy as MegatronStrategy
    from .strategies.megatron_model import MegatronModel as MegatronModel
    from .strategies.megatron_loop import MegatronEngine as MegatronEngine
    from .strategies.megatron_optimizer import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
    from .strategies.megatron_scheduler import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
    from .strategies.megatron_data import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
    from .trainer.megatron_module import MegatronGPT as MegatronGPT
    from .trainer.megatron_module import MegatronBert as MegatronBert
    from .trainer.megatron_module import MegatronT5 as MegatronT5
    from .trainer.megatron_module import MegatronDataModule as MegatronDataModule
    from .strategies.megatron_scheduler import MegatronLMDummyScheduler as MegatronLMDummyScheduler
    from .strategies.megatron_train_steps import AbstractTrainStep as AbstractTrainStep
    from .strategies.megatron_train_steps import GPTTrainStep as GPTTrainStep
    from .strategies.megatron_train_steps import BertTrainStep as BertTrainStep
    from .strategies.megatron_train_steps import T5TrainStep as T5TrainStep
    from .strategies.megatron_loop import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
    from .strategies.megatron_loop import gather_across_data_parallel_groups as gather_across_data_parallel_groups
    from .strategies.deepspeed_access import GatheredParameters as GatheredParameters
    from .strategies.deepspeed_access import get_active_deepspeed_plugin as get_active_deepspeed_plugin
    from .strategies.deepspeed_access import compile_regions_deepspeed as compile_regions_deepspeed
    from .strategies.ddp import DDPStrategy as DDPStrategy
    from .strategies.fsdp import FSDPStrategy as FSDPStrategy
    from .strategies.fsdp1 import FSDP1Strategy as FSDP1Strategy
    from .strategies.gradients import GradientState as GradientState
    from .strategies.random import set_seed as set_seed
    from .strategies.settings import AutocastKwargs as AutocastKwargs
    from .strategies.settings import DDPCommunicationHookType as DDPCommunicationHookType
    from .strategies.settings import DataLoaderConfiguration as DataLoaderConfiguration
    from .strategies.settings import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .strategies.settings import DistributedType as DistributedType
    from .strategies.settings import DynamoBackend as DynamoBackend
    from .strategies.settings import GradScalerKwargs as GradScalerKwargs
    from .strategies.settings import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .strategies.settings import InitProcessGroupKwargs as InitProcessGroupKwargs
    from .strategies.settings import LoggerType as LoggerType
    from .strategies.settings import PrecisionType as PrecisionType
    from .strategies.settings import ProfileKwargs as ProfileKwargs
    from .strategies.settings import ProjectConfiguration as ProjectConfiguration
    from .strategies.settings import RNGType as RNGType
    from .strategies.settings import TorchDynamoPlugin as TorchDynamoPlugin
    from .strategies.state import AcceleratorState as AcceleratorState
    from .strategies.state import PartialState as PartialState
    from .trainer.accelerator import Accelerator as Accelerator
    from .trainer.cli.train_cli import TrainCLI as TrainCLI
    from .trainer.datamodule import DataModule as DataModule
    from .trainer.module import TrainModule as TrainModule
    from .trainer.proof import prove_loop as prove_loop
    from .trainer.proof import prove_resume as prove_resume
    from .trainer.trainer import Trainer as Trainer
    from .strategies.data.shards import SeedableRandomSampler as SeedableRandomSampler
    from .strategies.data.shards import BatchSamplerShard as BatchSamplerShard
    from .strategies.data.shards import IterableDatasetShard as IterableDatasetShard
    from .strategies.data.shards import SkipBatchSampler as SkipBatchSampler
    from .strategies.data.shards import SkipDataLoader as SkipDataLoader
    from .strategies.data.shards import get_sampler as get_sampler
    from .strategies.data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
    from .strategies.data.loader import DataLoaderShard as DataLoaderShard
    from .strategies.collectives import broadcast as broadcast
    from .strategies.collectives import broadcast_object_list as broadcast_object_list
    from .strategies.collectives import gather as gather
    from .strategies.collectives import gather_object as gather_object
    from .strategies.collectives import pad_across_processes as pad_across_processes
    from .strategies.collectives import reduce as reduce
    from .strategies.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from .strategies.world import DistributedOperationException as DistributedOperationException
    from .strategies.agreement import synchronize_rng_state as synchronize_rng_state
    from .strategies.agreement import synchronize_rng_states as synchronize_rng_states
    from .strategies.messages import MultiProcessAdapter as MultiProcessAdapter
    from .strategies.messages import get_logger as get_logger
    from .strategies.messages import tqdm as tqdm
    from .trainer.local_sgd import LocalSGD as LocalSGD
    from .strategies.nested import TensorInformation as TensorInformation
    from .strategies.nested import concatenate as concatenate
    from .strategies.nested import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from .strategies.nested import convert_to_fp32 as convert_to_fp32
    from .strategies.nested import find_batch_size as find_batch_size
    from .strategies.nested import find_device as find_device
    from .strategies.nested import get_data_structure as get_data_structure
    from .strategies.nested import get_shape as get_shape
    from .strategies.nested import honor_type as honor_type
    from .strategies.nested import ignorant_find_batch_size as ignorant_find_batch_size
    from .strategies.nested import initialize_tensors as initialize_tensors
    from .strategies.nested import is_namedtuple as is_namedtuple
    from .strategies.nested import is_tensor_information as is_tensor_information
    from .strategies.nested import is_torch_tensor as is_torch_tensor
    from .strategies.nested import listify as listify
    from .strategies.nested import pad_input_tensors as pad_input_tensors
    from .strategies.nested import recursively_apply as recursively_apply
    from .strategies.nested import send_to_device as send_to_device
    from .strategies.nested import slice_tensors as slice_tensors
    from .strategies.weights import save as save
    from .strategies.weights import load as load
    from .strategies.weights import load_state_dict as load_state_dict
    from .strategies.weights import load_checkpoint_in_model as load_checkpoint_in_model
    from .strategies.weights import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
    from .strategies.weights import named_module_tensors as named_module_tensors
    from .strategies.weights import find_tied_parameters as find_tied_parameters
    from .strategies.weights import retie_parameters as retie_parameters
    from .strategies.empty_weights import init_empty_weights as init_empty_weights
    from .strategies.empty_weights import init_on_device as init_on_device
    from .strategies.wrappers import extract_model_from_parallel as extract_model_from_parallel
    from .strategies.wrappers import is_compiled_module as is_compiled_module
    from .strategies.wrappers import has_compiled_regions as has_compiled_regions
    from .strategies.wrappers import compile_regions as compile_regions
    from .strategies.wrappers import is_repeated_blocks as is_repeated_blocks
    from .strategies.wrappers import has_repeated_blocks as has_repeated_blocks
    from .strategies.wrappers import model_has_dtensor as model_has_dtensor
    from .strategies.wrappers import is_peft_model as is_peft_model
    from .strategies.wrappers import get_module_children_bottom_up as get_module_children_bottom_up
    from .strategies.wrappers import get_pretty_name as get_pretty_name
    from .strategies.wrappers import recursive_getattr as recursive_getattr
    from .strategies.wrappers import merge_dicts as merge_dicts
    from .strategies.sizes import convert_bytes as convert_bytes
    from .strategies.sizes import convert_file_size_to_int as convert_file_size_to_int
    from .strategies.sizes import dtype_byte_size as dtype_byte_size
    from .strategies.sizes import compute_module_sizes as compute_module_sizes
    from .strategies.sizes import id_tensor_storage as id_tensor_storage
    from .strategies.memory import clear_device_cache as clear_device_cache
    from .strategies.memory import release_memory as release_memory
    from .strategies.memory import should_reduce_batch_size as should_reduce_batch_size
    from .strategies.memory import find_executable_batch_size as find_executable_batch_size
    from .strategies.file_names import MODEL_NAME as MODEL_NAME
    from .strategies.file_names import OPTIMIZER_NAME as OPTIMIZER_NAME
    from .strategies.file_names import SCHEDULER_NAME as SCHEDULER_NAME
    from .strategies.file_names import SAMPLER_NAME as SAMPLER_NAME
    from .strategies.file_names import SCALER_NAME as SCALER_NAME
    from .strategies.file_names import RNG_STATE_NAME as RNG_STATE_NAME
    from .strategies.file_names import WEIGHTS_NAME as WEIGHTS_NAME
    from .strategies.file_names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
    from .strategies.file_names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
    from .strategies.file_names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
    from .strategies.file_names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from .strategies.file_names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
    from .strategies.file_names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
    from .strategies.file_names import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
    from .strategies.launch import debug_launcher as debug_launcher
    from .strategies.launch import notebook_launcher as notebook_launcher
    from .strategies.variables import patch_environment as patch_environment
    from .strategies.variables import clear_environment as clear_environment
    from .strategies.variables import purge_accelerate_environment as purge_accelerate_environment
    from .strategies.variables import str_to_bool as str_to_bool
    from .strategies.variables import get_int_from_env as get_int_from_env
    from .strategies.variables import parse_flag_from_env as parse_flag_from_env
    from .strategies.variables import parse_choice_from_env as parse_choice_from_env
    from .strategies.variables import convert_dict_to_env_variables as convert_dict_to_env_variables
    from .strategies.variables import are_libraries_initialized as are_libraries_initialized
    from .strategies.availability import has_package as has_package
    from .strategies.availability import compare_versions as compare_versions
    from .strategies.availability import is_torch_version as is_torch_version
    from .strategies.availability import deepspeed_required as deepspeed_required
    from .strategies.availability import torchao_required as torchao_required
    from .strategies.availability import is_bf16_available as is_bf16_available
    from .strategies.availability import is_fp16_available as is_fp16_available
    from .strategies.availability import is_fp8_available as is_fp8_available
    from .strategies.availability import is_cuda_available as is_cuda_available
    from .strategies.availability import is_rocm_available as is_rocm_available
    from .strategies.availability import is_mps_available as is_mps_available
    from .strategies.availability import is_xpu_available as is_xpu_available
    from .strategies.availability import is_xccl_available as is_xccl_available
    from .strategies.availability import is_hpu_available as is_hpu_available
    from .strategies.availability import is_habana_gaudi1 as is_habana_gaudi1
    from .strategies.availability import is_npu_available as is_npu_available
    from .strategies.availability import is_mlu_available as is_mlu_available
    from .strategies.availability import is_musa_available as is_musa_available
    from .strategies.availability import is_sdaa_available as is_sdaa_available
    from .strategies.availability import is_neuron_available as is_neuron_available
    from .strategies.availability import is_torch_xla_available as is_torch_xla_available
    from .strategies.availability import is_weights_only_available as is_weights_only_available
    from .strategies.availability import is_bnb_available as is_bnb_available
    from .strategies.availability import is_4bit_bnb_available as is_4bit_bnb_available
    from .strategies.availability import is_8bit_bnb_available as is_8bit_bnb_available
    from .strategies.availability import (
        is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    )
    from .strategies.availability import is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available
    from .strategies.availability import is_aim_available as is_aim_available
    from .strategies.availability import is_amdsmi_available as is_amdsmi_available
    from .strategies.availability import is_boto3_available as is_boto3_available
    from .strategies.availability import is_clearml_available as is_clearml_available
    from .strategies.availability import is_comet_ml_available as is_comet_ml_available
    from .strategies.availability import is_datasets_available as is_datasets_available
    from .strategies.availability import is_deepspeed_available as is_deepspeed_available
    from .strategies.availability import is_dvclive_available as is_dvclive_available
    from .strategies.availability import is_import_timer_available as is_import_timer_available
    from .strategies.availability import is_lomo_available as is_lomo_available
    from .strategies.availability import is_matplotlib_available as is_matplotlib_available
    from .strategies.availability import is_megatron_lm_available as is_megatron_lm_available
    from .strategies.availability import is_mlflow_available as is_mlflow_available
    from .strategies.availability import is_msamp_available as is_msamp_available
    from .strategies.availability import is_pandas_available as is_pandas_available
    from .strategies.availability import is_peft_available as is_peft_available
    from .strategies.availability import is_pippy_available as is_pippy_available
    from .strategies.availability import is_pynvml_available as is_pynvml_available
    from .strategies.availability import is_pytest_available as is_pytest_available
    from .strategies.availability import is_rich_available as is_rich_available
    from .strategies.availability import is_sagemaker_available as is_sagemaker_available
    from .strategies.availability import is_schedulefree_available as is_schedulefree_available
    from .strategies.availability import is_swanlab_available as is_swanlab_available
    from .strategies.availability import is_tensorboard_available as is_tensorboard_available
    from .strategies.availability import is_timm_available as is_timm_available
    from .strategies.availability import is_torchao_available as is_torchao_available
    from .strategies.availability import is_torchdata_available as is_torchdata_available
    from .strategies.availability import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from .strategies.availability import is_torchvision_available as is_torchvision_available
    from .strategies.availability import is_trackio_available as is_trackio_available
    from .strategies.availability import is_transformer_engine_available as is_transformer_engine_available
    from .strategies.availability import is_transformers_available as is_transformers_available
    from .strategies.availability import is_triton_available as is_triton_available
    from .strategies.availability import is_wandb_available as is_wandb_available
    from .strategies.settings import ComputeEnvironment as ComputeEnvironment
    from .strategies.settings import CustomDtype as CustomDtype
    from .strategies.settings import FP8BackendType as FP8BackendType
    from .strategies.settings import KwargsHandler as KwargsHandler
    from .strategies.settings import SageMakerDistributedType as SageMakerDistributedType
    from .strategies.ports import get_free_port as get_free_port
    from .strategies.ports import is_port_in_use as is_port_in_use
    from .strategies.agreement import wait_for_everyone as wait_for_everyone
    from .callbacks.tracking.base import filter_trackers as filter_trackers
    from .callbacks.tracking.base import get_available_trackers as get_available_trackers
    from .callbacks.tracking.base import on_main_process as on_main_process
    from .trainer.cli.basic_config import write_basic_config as write_basic_config
    from .strategies.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from .strategies.scheduler import AcceleratedScheduler as AcceleratedScheduler
    from .strategies.settings import BaseEnum as BaseEnum
    from .strategies.refusals import AlignDevicesHook as AlignDevicesHook
    from .strategies.refusals import add_hook_to_module as add_hook_to_module
    from .strategies.refusals import remove_hook_from_module as remove_hook_from_module
    from .strategies.refusals import dispatch_model as dispatch_model
    from .strategies.refusals import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from .strategies.refusals import infer_auto_device_map as infer_auto_device_map
    from .strategies.refusals import get_balanced_memory as get_balanced_memory
    from .strategies.refusals import get_max_memory as get_max_memory
    from .strategies.refusals import get_max_layer_size as get_max_layer_size
    from .strategies.refusals import clean_device_map as clean_device_map
    from .strategies.fsdp_functions import save_fsdp_model as save_fsdp_model
    from .strategies.fsdp_functions import load_fsdp_model as load_fsdp_model
    from .strategies.fsdp_functions import save_fsdp_optimizer as save_fsdp_optimizer
    from .strategies.fsdp_functions import load_fsdp_optimizer as load_fsdp_optimizer
    from .strategies.fsdp_functions import merge_fsdp_weights as merge_fsdp_weights
    from .strategies.fsdp_functions import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
    from .strategies.fsdp_functions import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
    from .strategies.fsdp_functions import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
    from .strategies.fsdp_functions import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
    from .strategies.fsdp_functions import fsdp2_canonicalize_names as fsdp2_canonicalize_names
    from .strategies.fsdp_functions import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
    from .strategies.fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from .strategies.mesh import ParallelismConfig as ParallelismConfig
    from .strategies.parallel_options import TorchTensorParallelConfig as TorchTensorParallelConfig
    from .strategies.parallel_options import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from .strategies.parallel_options import TorchContextParallelConfig as TorchContextParallelConfig
    from .strategies.parallel_options import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from .strategies.parallel_options import PipelineConfig as PipelineConfig
    from .strategies.parallel import ParallelStrategy as ParallelStrategy
    from .strategies.parallel import TensorParallelStrategy as TensorParallelStrategy
    from .strategies.parallel import ContextParallelStrategy as ContextParallelStrategy
    from .strategies.parallel import SequenceParallelStrategy as SequenceParallelStrategy
    from .strategies.pipeline import PipelineStrategy as PipelineStrategy
    from .strategies.parallel import ExpertParallelStrategy as ExpertParallelStrategy
    from .strategies.fp8_recipes import AORecipeKwargs as AORecipeKwargs
    from .strategies.fp8_recipes import TERecipeKwargs as TERecipeKwargs
    from .strategies.fp8_recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from .strategies.fp8_recipes import FP8RecipeKwargs as FP8RecipeKwargs
    from .strategies.float8 import convert_model_to_fp8_ao as convert_model_to_fp8_ao
    from .strategies.float8 import has_ao_layers as has_ao_layers
    from .strategies.float8 import find_first_last_linear_layers as find_first_last_linear_layers
    from .strategies.float8 import filter_linear_layers as filter_linear_layers
    from .strategies.float8 import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_imported(_EXPORTS[name]), name)
    return value


def _imported(module: str) -> Any:
    """Import a module without collecting garbage meanwhile: all that an import makes stays, and torch makes a lot."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(f".{module}", __name__)
    finally:
        if collecting:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
