"""8-bit floats by torchao: which layers of a model multiply in float8, and converting them.

Weights stay float32 and keep their names, so that a checkpoint does not tell in which format it was trained. Scales
are found anew for every tensor of every step, so that there is no state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .fp8_recipes import AORecipeKwargs

logger = logging.getLogger(__name__)

Filter = Callable[[nn.Module, str], bool]
_MULTIPLE = 16  # the matrix product of 8-bit floats takes no other sizes
_CAPABILITY = (8, 9)  # the first of NVIDIA's GPUs that multiply them
_KEPT = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")  # what a converted layer has of its own


def require_float8(device: torch.device) -> None:
    """Raises ImportError where torchao is missing, ValueError where the device cannot multiply 8-bit floats."""
    from .availability import is_torchao_available

    if not is_torchao_available():
        raise ImportError(
            "Expected torchao for fp8. Received: no such package. Install drivetrain[fp8], or use "
            "mixed_precision='bf16'."
        )
    able = device.type in ("cpu", "xpu") or (
        device.type == "cuda"
        and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _CAPABILITY)
    )
    if not able:
        raise ValueError(
            "Expected a device that multiplies 8-bit floats: a CPU, or a GPU of compute capability 8.9 or above. "
            f"Received: precision='fp8', device='{device}'. Use 'bf16-mixed'."
        )


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Filter | None = None
) -> nn.Module:
    """Lets a model's linear layers multiply in float8, in place; returns the model (another one, if it is a layer).

    `config` is a `torchao.float8.Float8LinearConfig`. Without `module_filter_func(module, name)` all linear layers are
    converted but the first and the last, which training is most sensitive to, and those whose sizes are no multiple
    of 16. Parameters stay the same objects; hooks and modes stay too.

    Raises:
        ImportError: torchao is missing.
    """
    require_float8(torch.device("cpu"))
    from torchao.float8 import convert_to_float8_training

    if module_filter_func in (None, filter_first_and_last_linear_layers):
        ends = [name for name in find_first_last_linear_layers(model) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=ends)
    before = dict(model.named_modules(remove_duplicate=False))
    config = config if config is not None else configuration(AORecipeKwargs())
    converted = convert_to_float8_training(model, config=config, module_filter_fn=module_filter_func)
    changed = 0
    for name, module in converted.named_modules(remove_duplicate=False):
        if module is not before[name]:
            vars(module).update({key: value for key, value in vars(before[name]).items() if key not in _KEPT})
            changed += 1
    if not changed:
        logger.warning(
            "No linear layer of %s is converted to float8: the first and the last are left out, and sizes have to be "
            "multiples of %d. It computes in bfloat16. AORecipeKwargs(module_filter_func=...) chooses layers.",
            type(model).__name__, _MULTIPLE,
        )  # fmt: skip
    return converted


def has_ao_layers(model: nn.Module) -> bool:
    """Whether some layer of a model computes in torchao's 8-bit floats."""
    return any(type(part).__name__ == "Float8Linear" for part in model.modules())


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of a model's first and last linear layer, in the order in which they were added; None without any."""
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Whether a layer of this name is to be converted: a linear one, not listed, its sizes multiples of 16."""
    return (
        isinstance(module, nn.Linear)
        and fqn not in layers_to_filter
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """`filter_linear_layers` without the first and last linear layer of what it is given.

    As an argument of `convert_model_to_fp8_ao` it means the first and last of the whole model.
    """
    ends = [name for name in find_first_last_linear_layers(module) if name is not None]
    return filter_linear_layers(module, fqn, layers_to_filter=ends)


def configuration(recipe: AORecipeKwargs, *, sharded: bool = False) -> Any:
    """Returns torchao's configuration for a recipe; `sharded` weights may be gathered in 8 bits."""
    if recipe.config is not None:
        return recipe.config
    from torchao.float8 import Float8LinearConfig

    gathers = sharded and bool(recipe.enable_fsdp_float8_all_gather)
    return Float8LinearConfig(
        pad_inner_dim=recipe.pad_inner_dim is not False, enable_fsdp_float8_all_gather=gathers
    )
