"""Which optional packages and devices this machine has: `is_…_available`, found without importing the package.

The names are Accelerate's. A package counts as available where Python finds it; answers are remembered.
"""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from packaging.version import Version, parse

Function = TypeVar("Function", bound=Callable[..., Any])
_COMPARISONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">=": operator.ge,
                ">": operator.gt}  # fmt: skip


@functools.cache
def has_package(name: str) -> bool:
    """Whether Python finds a package (dotted names too)."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # its parent is missing, or a stand-in without a spec is in its place
        return name in sys.modules and sys.modules[name] is not None


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether a version, or that of an installed library, is `operation` ("<", "<=", "==", "!=", ">=", ">") another.

    Raises:
        ValueError: the operation is another one.
        PackageNotFoundError: the library is not installed.
    """
    if operation not in _COMPARISONS:
        known = ", ".join(_COMPARISONS)
        raise ValueError(f"Expected an operation of {known}. Received: operation={operation!r}. Choose one of these.")
    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return bool(_COMPARISONS[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version, without what follows a plus sign, is `operation` another: `(">=", "2.9")`."""
    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)


def deepspeed_required(function: Function) -> Function:
    """A function that raises ImportError, naming what to install, where DeepSpeed is missing."""
    return _requiring(function, is_deepspeed_available, "deepspeed")


def torchao_required(function: Function) -> Function:
    """A function that raises ImportError, naming what to install, where torchao is missing."""
    return _requiring(function, is_torchao_available, "torchao")


def _requiring(function: Function, available: Callable[[], bool], package: str) -> Function:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not available():
            name = getattr(function, "__name__", repr(function))
            raise ImportError(f"Expected {package} to be installed for {name}. Received: no such package. "
                              f"Install it: pip install {package}.")  # fmt: skip
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine's device computes in bfloat16 (CPUs and TPUs do)."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return torch.cuda.is_bf16_supported() if is_cuda_available() else not is_mps_available()


def is_fp16_available() -> bool:
    """Whether this machine's device computes in float16: every one that torch runs on."""
    return True


def is_fp8_available() -> bool:
    """Whether a library for 8-bit floats is installed."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()


def is_cuda_available() -> bool:
    """Whether there is a CUDA (or ROCm) device."""
    return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether the GPU is AMD's."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is one of Apple's GPUs, and torch is at least of `min_version`."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available() and torch.backends.mps.is_built()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is one of Intel's GPUs; `check_device` also asks for its number."""
    return torch.xpu.is_available() and (not check_device or torch.xpu.device_count() > 0)


def is_xccl_available() -> bool:
    """Whether torch was built with the collectives of Intel's GPUs."""
    return torch.distributed.is_available() and torch.distributed.distributed_c10d.is_xccl_available()


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether there is one of Intel's Gaudi devices."""
    return has_package("habana_frameworks") and _has_device("hpu")


def is_habana_gaudi1() -> bool:
    """Whether the Gaudi device is of the first generation; False without one."""
    if not is_hpu_available():
        return False
    import habana_frameworks.torch.utils.experimental as experimental

    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_npu_available(check_device: bool = False) -> bool:
    """Whether there is one of Huawei's NPUs."""
    return has_package("torch_npu") and _has_device("npu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether there is one of Cambricon's MLUs."""
    return has_package("torch_mlu") and _has_device("mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Whether there is one of Moore Threads' GPUs."""
    return has_package("torch_musa") and _has_device("musa")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether there is one of Tecorigin's devices."""
    return has_package("torch_sdaa") and _has_device("sdaa")


def is_neuron_available(check_device: bool = False) -> bool:
    """Whether there is one of AWS's Neuron devices."""
    return has_package("torch_neuronx") and _has_device("neuron")


def _has_device(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed, and if asked for its device is a TPU, or a GPU.

    Raises:
        ValueError: both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("Expected one of check_is_tpu and check_is_gpu. Received: both are True. Ask for one.")
    if not has_package("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    import torch_xla

    kind = torch_xla.runtime.device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


def is_weights_only_available() -> bool:
    """True: every torch that drivetrain runs on reads files without running code from them."""
    return True


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, of at least `min_version` if one is given."""
    return has_package("bitsandbytes") and (min_version is None or compare_versions("bitsandbytes", ">=", min_version))


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes has 4-bit weights (0.39)."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes has 8-bit weights (0.37.2)."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes runs on more than NVIDIA's GPUs."""
    if not is_bnb_available():
        return False
    import bitsandbytes

    return "multi_backend" in getattr(bitsandbytes, "features", ())


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is there together with a GPU that has blocks of 8-bit floats (Blackwell)."""
    return is_transformer_engine_available() and is_cuda_available() and torch.cuda.get_device_capability() >= (10, 0)


def is_aim_available() -> bool:
    """Whether aim is installed."""
    return has_package("aim")


def is_amdsmi_available() -> bool:
    """Whether amdsmi is installed."""
    return has_package("amdsmi")


def is_boto3_available() -> bool:
    """Whether boto3 is installed."""
    return has_package("boto3")


def is_clearml_available() -> bool:
    """Whether clearml is installed."""
    return has_package("clearml")


def is_comet_ml_available() -> bool:
    """Whether comet_ml is installed."""
    return has_package("comet_ml")


def is_datasets_available() -> bool:
    """Whether datasets is installed."""
    return has_package("datasets")


def is_deepspeed_available() -> bool:
    """Whether deepspeed is installed."""
    return has_package("deepspeed")


def is_dvclive_available() -> bool:
    """Whether dvclive is installed."""
    return has_package("dvclive")


def is_import_timer_available() -> bool:
    """Whether import_timer is installed."""
    return has_package("import_timer")


def is_lomo_available() -> bool:
    """Whether lomo_optim is installed."""
    return has_package("lomo_optim")


def is_matplotlib_available() -> bool:
    """Whether matplotlib is installed."""
    return has_package("matplotlib")


def is_megatron_lm_available() -> bool:
    """Whether megatron-core is installed."""
    return has_package("megatron.core")


def is_mlflow_available() -> bool:
    """Whether mlflow is installed."""
    return has_package("mlflow")


def is_msamp_available() -> bool:
    """Whether msamp is installed."""
    return has_package("msamp")


def is_pandas_available() -> bool:
    """Whether pandas is installed."""
    return has_package("pandas")


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return has_package("peft")


def is_pippy_available() -> bool:
    """Whether torch.distributed.pipelining is installed."""
    return has_package("torch.distributed.pipelining")


def is_pynvml_available() -> bool:
    """Whether pynvml is installed."""
    return has_package("pynvml")


def is_pytest_available() -> bool:
    """Whether pytest is installed."""
    return has_package("pytest")


def is_rich_available() -> bool:
    """Whether rich is installed."""
    return has_package("rich")


def is_sagemaker_available() -> bool:
    """Whether sagemaker is installed."""
    return has_package("sagemaker")


def is_schedulefree_available() -> bool:
    """Whether schedulefree is installed."""
    return has_package("schedulefree")


def is_swanlab_available() -> bool:
    """Whether swanlab is installed."""
    return has_package("swanlab")


def is_tensorboard_available() -> bool:
    """Whether tensorboard is installed."""
    return has_package("tensorboard")


def is_timm_available() -> bool:
    """Whether timm is installed."""
    return has_package("timm")


def is_torchao_available() -> bool:
    """Whether torchao is installed."""
    return has_package("torchao")


def is_torchdata_available() -> bool:
    """Whether torchdata is installed."""
    return has_package("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata.stateful_dataloader is installed."""
    return has_package("torchdata.stateful_dataloader")


def is_torchvision_available() -> bool:
    """Whether torchvision is installed."""
    return has_package("torchvision")


def is_trackio_available() -> bool:
    """Whether trackio is installed."""
    return has_package("trackio")


def is_transformer_engine_available() -> bool:
    """Whether transformer_engine is installed."""
    return has_package("transformer_engine")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return has_package("transformers")


def is_triton_available() -> bool:
    """Whether triton is installed."""
    return has_package("triton")


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return has_package("wandb")
