"""Arguments of the Trainer that are one of a few values: checked before anything is made of them."""

from __future__ import annotations

from typing import Any

from .limits import whole

_BOTH = (True, False)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "enable_checkpointing": (*_BOTH, None),
    "enable_progress_bar": (*_BOTH, None),
    "enable_model_summary": (*_BOTH, None),
    "gradient_clip_algorithm": ("norm", "value", None),
    "deterministic": (*_BOTH, "warn", None),
    "benchmark": (*_BOTH, None),
    "inference_mode": _BOTH,
    "use_distributed_sampler": _BOTH,
    "detect_anomaly": _BOTH,
    "barebones": _BOTH,
    "sync_batchnorm": _BOTH,
}


def check_switches(given: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for an argument that is none of its few values."""
    for name, choices in _CHOICES.items():
        value = given[name]
        if not any(value is choice or isinstance(choice, str) and value == choice for choice in choices):
            words = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"Expected one of {words}. Received: {name}={value!r}. Use one of these.")
    whole(given, "reload_dataloaders_every_n_epochs", least=0)
    root, accelerator = given["default_root_dir"], given["accelerator"]
    if not (root is None or isinstance(root, str) or hasattr(root, "__fspath__")):
        raise TypeError(f'Expected a folder. Received: default_root_dir={root!r}. Write its path, e.g. "runs".')
    if root is not None and "://" in str(root):
        raise ValueError(
            f"Expected a folder on this machine. Received: default_root_dir={str(root)!r}. Have checkpoints copied "
            f'there by callbacks=[CheckpointUpload({str(root)!r})]; resume="last" finds them.'
        )
    if not (accelerator is None or isinstance(accelerator, str) or is_accelerator(accelerator)):
        raise TypeError(
            f"Expected a kind of device or an Accelerator. Received: accelerator={accelerator!r}. "
            'Write "auto", "cpu" or "gpu", or pass Accelerator().'
        )


def is_accelerator(thing: Any) -> bool:
    """Tell whether ``thing`` is an Accelerator, or stands in for one."""
    return not isinstance(thing, type) and hasattr(thing, "prepare") and hasattr(thing, "backward")
