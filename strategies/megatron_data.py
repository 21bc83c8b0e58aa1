"""Megatron's indexed data sets (.bin and .idx), through the same loaders as any data set.

Megatron shuffles and cuts documents into samples once, by its seed, into an index that it keeps beside the data. So
loaders take samples in order, and go on after a resume where they were. Building is done by all ranks together: the
first one writes the index, the others read it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader, Subset

from .megatron_models import core

SPLITS = ("train", "valid", "test")
_ALIASES = {"splits_string": "split", "data_cache_path": "path_to_cache", "seed": "random_seed",
            "sequence_length": "seq_length"}  # fmt: skip
_OWN = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "seq_length", "micro_batch_size",
        "num_workers", "eod")  # fmt: skip
_FORMER = {"data_impl": ("mmap", "infer"), "skip_warmup": (True, False), "mmap_warmup": (False,)}  # of older Megatrons


class MegatronLMDummyDataLoader:
    """Stands for loaders over Megatron's indexed data sets, until `prepare` knows the ranks.

    Pass it to `accelerator.prepare` up to three times: what comes back are loaders of training, validation and test
    data, in this order; None for a split without documents.

    Args:
        dataset_kwargs: `data_path` (a prefix of .bin and .idx files, or a list of prefixes, or of weights and prefixes
            in turn), or `train_data_path`, `valid_data_path`, `test_data_path`; `splits_string` ("969,30,1"),
            `seq_length`, `micro_batch_size` of each rank (1), `num_workers` (0), `seed` (1234), `data_cache_path`,
            `eod` (the token between documents, where its losses or positions are treated in a special way), and
            further fields of megatron-core's GPTDatasetConfig.

    Raises:
        ValueError: a name is unknown; the message has the nearest.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = _checked({_ALIASES.get(name, name): value for name, value in dataset_kwargs.items()})

    def datasets(self, plugin: Any, replicas: int = 1) -> list[Any]:
        """Returns the data sets of the three splits; every rank calls this.

        A data set of training has as many samples as `train_samples` or `train_iters` of the plugin say, else those of
        one pass over its documents.
        """
        sizes = self._sizes(plugin, replicas)
        provider = plugin.custom_megatron_datasets_provider_function
        if provider is not None:
            found = provider(sizes)
        else:  # whole passes over the documents, of which the last one may be more than is wanted
            found = map(_cut, build(self._options(plugin), sizes), sizes)
        return [None if data is None or not len(data) else data for data in found]

    def loaders(self, plugin: Any, replicas: int = 1) -> list[Any]:
        """Returns loaders of the three splits, each batch as large as `num_micro_batches` micro-batches."""
        args, size = self.dataset_args, self._batch(plugin)
        return [
            None if data is None else
            DataLoader(data, batch_size=size, num_workers=args.get("num_workers", 0), drop_last=split == "train")
            for split, data in zip(SPLITS, self.datasets(plugin, replicas), strict=True)
        ]  # fmt: skip

    def _batch(self, plugin: Any) -> int:
        return int(self.dataset_args.get("micro_batch_size", 1) * (plugin.num_micro_batches or 1))

    def _sizes(self, plugin: Any, replicas: int) -> list[int | None]:
        """How many samples are wanted of each split; None for one pass."""
        step = self._batch(plugin) * replicas
        training = plugin.train_samples or (plugin.train_iters and plugin.train_iters * step)
        if training is None:
            return [None, None, None]
        evaluations = training // step // plugin.eval_interval + 1
        return [training, evaluations * plugin.eval_iters * step, plugin.eval_iters * step]

    def _options(self, plugin: Any) -> dict[str, Any]:
        """What the data sets are built of, where the plugin has a say too."""
        options = {name: value for name, value in self.dataset_args.items() if name not in _OWN[5:7]}
        for name, said in (("seq_length", plugin.seq_length), ("eod_mask_loss", plugin.eod_mask_loss or None)):
            if said is not None and options.setdefault(name, said) != said:
                raise ValueError(
                    f"Expected {name} once. Received: {name}={options[name]!r} of the data and {said!r} of "
                    "MegatronLMPlugin. Leave one out."
                )
        return options


class _Tokens:
    """What Megatron's data sets ask of a tokenizer whose work is done."""

    vocab_size = None

    def __init__(self, eod: int | None) -> None:
        self.eod = eod
        self.unique_identifiers = OrderedDict(tokens=eod)


def build(options: dict[str, Any], sizes: Sequence[int | None]) -> list[Any]:
    """Returns GPT's data sets of the three splits, blended where there are several prefixes; every rank calls this.

    Raises:
        ValueError: there is no path or length, or `eod` is missing where it counts.
        ImportError: the package's compiled helpers are missing.
    """
    options = dict(options)
    helpers()
    config: dict[str, Any] = {"random_seed": 1234, "reset_position_ids": False, "reset_attention_mask": False,
                              "eod_mask_loss": False}  # fmt: skip
    config |= {name: value for name, value in options.items() if name not in _OWN}
    config.setdefault("create_attention_mask", bool(config["reset_attention_mask"]))
    special = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if config[name]]
    if special and options.get("eod") is None and "tokenizer" not in config:
        raise ValueError(
            f"Expected eod, the token between documents, with {special[0]}. Received: none. Pass eod=<its number>."
        )
    if options.get("seq_length") is None:
        raise ValueError("Expected seq_length, the tokens of a sample. Received: none. Pass seq_length=1024.")
    config.setdefault("tokenizer", _Tokens(options.get("eod")))
    gpt = core("datasets.gpt_dataset")
    made = gpt.GPTDatasetConfig(sequence_length=options["seq_length"], **_blend(options), **config)
    builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    found: list[Any] = builder(gpt.GPTDataset, list(sizes), lambda: True, made).build()
    return found


def replaced(objects: Iterable[Any], plugin: Any, replicas: int) -> tuple[Any, ...]:
    """Returns the objects of a `prepare` with loaders in the places of a MegatronLMDummyDataLoader.

    Raises:
        ValueError: one comes more than three times, or `megatron_dataset_flag` is set and there is another loader.
    """
    objects, made, count = tuple(objects), {}, dict[int, int]()
    stand_ins = [one for one in objects if isinstance(one, MegatronLMDummyDataLoader)]
    if plugin.megatron_dataset_flag and not stand_ins and any(isinstance(one, DataLoader) for one in objects):
        raise ValueError(
            "Expected a MegatronLMDummyDataLoader with megatron_dataset_flag=True. Received: a DataLoader. Pass "
            "MegatronLMDummyDataLoader(data_path=…), or leave the flag out."
        )
    found = []
    for one in objects:
        if isinstance(one, MegatronLMDummyDataLoader):
            number = count[id(one)] = count.get(id(one), -1) + 1
            if number >= len(SPLITS):
                raise ValueError("Expected a MegatronLMDummyDataLoader three times at most, for training, validation "
                                 "and test data. Received: more. Leave it out.")  # fmt: skip
            if id(one) not in made:
                made[id(one)] = one.loaders(plugin, replicas)
            one = made[id(one)][number]
        found.append(one)
    return tuple(found)


def helpers() -> Any:
    """Returns the package's compiled part, without which no index is built.

    Raises:
        ImportError: it is missing, as in packages that were built without a compiler.
    """
    core("package_info")  # says what to install where the package is missing
    try:
        return import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise ImportError(
            f"Expected megatron-core with its compiled data helpers. Received: {error}. Install the wheel of your "
            "Python and machine (pip install --only-binary megatron-core megatron-core), or compile them: "
            "megatron.core.datasets.utils.compile_helpers()."
        ) from error


def _checked(args: dict[str, Any]) -> dict[str, Any]:
    fields = {one.name for one in dataclasses.fields(core("datasets.gpt_dataset").GPTDatasetConfig) if one.init}
    known = fields - {"sequence_length", "blend", "blend_per_split"} | set(_OWN)
    for name in [name for name in args if name not in known]:
        if args[name] in _FORMER.get(name, ()):
            args.pop(name)
            continue
        near = difflib.get_close_matches(name, sorted(known | set(_ALIASES)), n=1)
        advice = f"Did you mean {near[0]!r}?" if near else "Leave it out."
        raise ValueError(f"Expected options of Megatron's data sets. Received: {name}={args[name]!r}. {advice}")
    return args


def _blend(options: dict[str, Any]) -> dict[str, Any]:
    """Megatron's description of which files the splits come from."""
    each = [options.get(f"{split}_data_path") for split in SPLITS]
    if any(each):
        if options.get("data_path") or options.get("split"):
            raise ValueError(
                "Expected data_path with a split, or paths of single splits. Received: both. Leave one out."
            )
        return {"blend_per_split": [None if one is None else _weighted(one) for one in each]}
    if not options.get("data_path"):
        raise ValueError("Expected data_path, the prefix of .bin and .idx files. Received: none. Pass it.")
    found = {"blend": _weighted(options["data_path"])}
    return found if options.get("split") else {**found, "split": "969,30,1"}


def _weighted(paths: Any) -> tuple[list[str], list[float] | None]:
    """Prefixes and their weights, of one prefix, a list of them, or weights and prefixes in turn."""
    paths = str(paths).split() if not isinstance(paths, (list, tuple)) else list(paths)
    weights = [_number(one) for one in paths[::2]]
    if len(paths) % 2 == 0 and all(one is not None for one in weights):
        return [str(one) for one in paths[1::2]], [one for one in weights if one is not None]
    return [str(one) for one in paths], None


def _cut(data: Any, size: int | None) -> Any:
    return data if data is None or size is None or len(data) <= size else Subset(data, range(size))


def _number(value: Any) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None
