"""Names that other libraries import from Accelerate, for what drivetrain does not do: an exact error where one is used.

With drivetrain in Accelerate's place such libraries import, and work as long as they need none of these.
"""

from __future__ import annotations

from typing import Any

from .settings import not_in_this_version

_DEVICE_MAP = "one device a process, and strategies that shard (device_map=None)"


class AlignDevicesHook:
    """Moves inputs to where a module's weights are, in Accelerate; not part of drivetrain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise not_in_this_version("AlignDevicesHook", _DEVICE_MAP)


def add_hook_to_module(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError, as its neighbours do."""
    raise not_in_this_version("add_hook_to_module", "torch.nn.Module.register_forward_pre_hook")


def remove_hook_from_module(module: Any, recurse: bool = False) -> Any:
    """Returns the module: there are no such hooks to be removed."""
    return module


def dispatch_model(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError."""
    raise not_in_this_version("dispatch_model", _DEVICE_MAP)


def load_checkpoint_and_dispatch(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError."""
    raise not_in_this_version("load_checkpoint_and_dispatch", "load_checkpoint_in_model")


def infer_auto_device_map(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError."""
    raise not_in_this_version("infer_auto_device_map", _DEVICE_MAP)


def get_balanced_memory(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError."""
    raise not_in_this_version("get_balanced_memory", _DEVICE_MAP)


def get_max_memory(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError."""
    raise not_in_this_version("get_max_memory", _DEVICE_MAP)


def get_max_layer_size(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError."""
    raise not_in_this_version("get_max_layer_size", _DEVICE_MAP)


def clean_device_map(*args: Any, **kwargs: Any) -> Any:
    """Not part of drivetrain: raises NotImplementedError."""
    raise not_in_this_version("clean_device_map", _DEVICE_MAP)
