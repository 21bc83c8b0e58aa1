"""DeepSpeed's configuration: a JSON file or dict, its "auto" values, and everybody who has a say in it.

A value may be said by the file, by the plugin, by a launch and by the script. Where all that is said agrees it holds;
where two differ, one error shows every disagreement at once. Keys: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
_OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed, asked by dotted keys such as "zero_optimization.stage".

    Args:
        config_file_or_dict: the path of a JSON file, a dict (which is copied), or another of these.

    Raises:
        ValueError: the file is not there, or holds no JSON object.
        TypeError: it is none of these.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        if isinstance(config_file_or_dict, HfDeepSpeedConfig):
            self.source: str = config_file_or_dict.source
            self.config: dict[str, Any] = copy.deepcopy(config_file_or_dict.config)
        elif isinstance(config_file_or_dict, dict):
            self.source, self.config = "the configuration", copy.deepcopy(config_file_or_dict)
        elif isinstance(config_file_or_dict, (str, os.PathLike)):
            self.source = os.path.basename(os.fspath(config_file_or_dict))
            self.config = _read(os.fspath(config_file_or_dict))
        else:
            raise TypeError(
                f"Expected the path of a JSON file or a dict for DeepSpeed. Received: {config_file_or_dict!r}. "
                "Pass one of these."
            )

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Returns the innermost dict of a dotted key (None where there is none), and its last part."""
        node: Any = self.config
        *outer, last = ds_key_long.split(".")
        for part in outer:
            node = node.get(part) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Returns the value of a dotted key, or the default."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Sets a dotted key, with the dicts around it."""
        node = self.config
        *outer, last = ds_key_long.split(".")
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Removes a dotted key with all below it; ValueError where it must exist and does not."""
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"Expected {ds_key_long} in {self.source}. Received: none. Add it.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is set to something true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is set, and to something false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key waits to be filled from the run."""
        return bool(self.get_value(ds_key_long) == AUTO)

    @property
    def stage(self) -> int:
        """The stage of ZeRO, 0 for none."""
        value = self.get_value("zero_optimization.stage", 0)
        return 0 if value == AUTO else int(value)

    def is_zero2(self) -> bool:
        """Whether gradients are partitioned, and weights are not."""
        return self.stage == 2

    def is_zero3(self) -> bool:
        """Whether weights are partitioned."""
        return self.stage == 3

    def is_offload(self) -> bool:
        """Whether optimizer states or weights are kept in the memory of the host, or on its disk."""
        return any(self.get_value(key) in ("cpu", "nvme") for key in _OFFLOADS)

    def leaves(self) -> list[tuple[str, Any]]:
        """Returns every dotted key that holds no dict, and its value."""
        return list(_leaves(self.config))

    def autos(self) -> list[str]:
        """Returns the dotted keys that wait to be filled."""
        return [key for key, value in self.leaves() if value == AUTO]


@dataclass(frozen=True)
class Said:
    """What somebody says of a key: `firm` unless it only fills an "auto", or a gap where `adds`."""

    key: str
    value: Any
    who: str
    firm: bool = True
    adds: bool = False


def settle(config: HfDeepSpeedConfig, said: list[Said], *, complete: bool = True) -> None:
    """Fills a configuration in place from what is said.

    Raises:
        ValueError: two who say something firm of one key differ, or (`complete`) an "auto" is left that nobody fills;
            the message shows all of them.
    """
    voices = {key: [one for one in said if one.key == key] for key in dict.fromkeys(one.key for one in said)}
    problems = [found for key, ones in voices.items() if (found := _disagreement(config, key, ones))]
    if problems:
        listed = "".join(f"\n- {problem}" for problem in problems)
        raise ValueError(f"Expected one value for each setting of DeepSpeed. Received:{listed}\nSet each in one place.")
    for key, ones in voices.items():
        chosen = next((one for one in ones if one.firm), ones[0])
        present = config.get_value(key)
        if present == AUTO or (present is None and (chosen.firm or chosen.adds)):
            config.set_value(key, chosen.value)
    left = config.autos() if complete else []
    if left:
        raise ValueError(
            f'Expected every "auto" of {config.source} to be filled from the run. Received: nothing for '
            f"{', '.join(left)}. {_advice(left)}"
        )


def _disagreement(config: HfDeepSpeedConfig, key: str, voices: list[Said]) -> str:
    """The values of a key with who says them, if they are not one."""
    present = config.get_value(key)
    pairs = [] if present in (None, AUTO) else [(present, config.source)]
    pairs += [(one.value, one.who) for one in voices if one.firm]
    if all(_same(value, pairs[0][0]) for value, _ in pairs):
        return ""
    return f"{key}: " + ", ".join(f"{value!r} in {who}" for value, who in pairs)


def _same(one: Any, other: Any) -> bool:
    numbers = (int, float)
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one) == bool(other)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


_ADVICE = (
    ("batch_size", "Prepare a loader that has a batch_size in the same call, or write the number"),
    ("optimizer.", "Prepare a DummyOptim with its options, or write the number"),
    ("scheduler.", "Prepare a DummyScheduler with its numbers of steps, or write the number"),
    ("zero_optimization.", "Give the model a config with hidden_size, or write the number"),
)


def _advice(left: list[str]) -> str:
    """What to do about each kind of key."""
    found = [text for part, text in _ADVICE if any(part in key for key in left)]
    return ". ".join(found or ["Write the value"]) + "."


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_without_repeats)
    except OSError as error:
        raise ValueError(f"Expected DeepSpeed's configuration. Received: {path!r}: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"Expected JSON in {path!r}. Received: {error}. Correct the file.") from None
    if not isinstance(content, dict):
        raise ValueError(f"Expected a JSON object in {path!r}. Received: {type(content).__name__}. Correct the file.")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


# What a run says


def of_batches(samples: int | None, micro_batches: int, ranks: int) -> list[Said]:
    """What loaders say: samples of a rank in a micro-batch (None where no loader is known)."""
    if samples is None:
        return []
    total = samples * micro_batches * ranks
    return [
        Said("train_micro_batch_size_per_gpu", samples, "the loader's batch_size"),
        Said("train_batch_size", total, f"the run ({samples} samples × {micro_batches} micro-batches × {ranks} ranks)",
             firm=True, adds=False),
    ]  # fmt: skip


def of_hidden_size(model: Any) -> list[Said]:
    """What a model's hidden size says of the buffers of ZeRO-3: one layer's square matrix, most of it prefetched."""
    size = hidden_size(model)
    if size is None:
        return []
    sizes = {"reduce_bucket_size": size * size, "stage3_prefetch_bucket_size": int(0.9 * size * size),
             "stage3_param_persistence_threshold": 10 * size}  # fmt: skip
    return [Said(f"zero_optimization.{key}", value, "the model", firm=False) for key, value in sizes.items()]


def hidden_size(model: Any) -> int | None:
    """Returns the width of a model by its Hugging Face configuration; of several the largest, None for none."""
    settings = getattr(model, "config", None)
    for where in (settings, getattr(settings, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "d_model", "n_embd"):
            found = where.get(name) if isinstance(where, dict) else getattr(where, name, None)
            if found:
                return int(max(found)) if isinstance(found, (list, tuple)) else int(found)
    return None


def of_precision(word: str, who: str) -> list[Said]:
    """What a precision's name says of DeepSpeed's own 16-bit modes."""
    return [
        Said("fp16.enabled", word.startswith("16"), who, adds=word.startswith("16")),
        Said("bf16.enabled", word.startswith("bf16"), who, adds=word.startswith("bf16")),
    ]
