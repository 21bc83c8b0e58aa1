"""manifest.json: what a checkpoint is made of, with a checksum of its own.

The file is JSON whose last line is its checksum: the xxh3 hash of all bytes before the text `"checksum"`.
"""

from __future__ import annotations

import datetime
import importlib
import json
import operator
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_hexdigest

from .files import CheckpointError, HashingReader
from .state import decode, encode

NAME = "manifest.json"
FORMAT = "drivetrain-checkpoint"
VERSION = 1
HASH = "xxh3_64"
_COUNTS = ("step", "epoch", "samples", "world_size")
_ALWAYS = (*_COUNTS, "strategy")  # metadata that every reader asks for: null where it is not given
_OWN = ("format", "format_version", "time", "versions", "files", "checksum")
_TICK = datetime.timedelta(microseconds=1)
_latest: datetime.datetime | None = None  # of the times in manifests
_PART = re.compile(r"(?!\.)[^/\\\0]+")


def compose(files: dict[str, tuple[int, str]], metadata: dict[str, Any]) -> bytes:
    """Return a manifest's bytes for files (name → (size, hash)) and metadata, as `describe` made it."""
    manifest = {
        "format": FORMAT,
        "format_version": VERSION,
        "time": _time(),
        "versions": _versions(),
        **dict.fromkeys(_ALWAYS),
        **metadata,
        "files": {name: {"size": size, HASH: digest} for name, (size, digest) in sorted(files.items())},
    }
    text = json.dumps(manifest, indent=1, allow_nan=False)
    body = f"{text[:-2]},\n ".encode()
    return body + _ending(body)


def describe(metadata: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return metadata as JSON trees. Raises TypeError, by path, for what is no plain data (tensors are not)."""
    described = {}
    for key, value in {**defaults, **metadata}.items():
        if not isinstance(key, str) or key in _OWN:
            raise ValueError(f"Expected metadata under names of its own. Received: {key!r}. Call it otherwise.")
        if key in _COUNTS and value is not None:
            value = operator.index(value)
        described[key], tensors = encode(value, f"metadata.{key}")
        if tensors:
            raise TypeError(f"Expected metadata without tensors. Received: {next(iter(tensors))}. Save it in a file.")
    return described


def load(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; see `parse`."""
    with HashingReader(directory / NAME) as file:
        return parse(bytes(file.take(file.size)), str(file.path))


def parse(data: bytes, place: str) -> dict[str, Any]:
    """Return the manifest in `data`; raises CheckpointError, naming `place`, unless it is whole and of this version."""
    manifest = parse_json(data, place)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{place}: is not the manifest of a checkpoint.")
    _check_version(manifest.get("format_version"), place)
    body, mark, _ = data.rpartition(b'"checksum"')
    if not mark or data != body + _ending(body):
        raise CheckpointError(f"{place}: is damaged (its checksum is wrong).")
    _check_content(manifest, place)
    _note_time(manifest["time"])
    return {key: value if key in _OWN else decode(value) for key, value in manifest.items()}


def parse_json(data: bytes, place: str) -> Any:
    """Return what a JSON file says; raises CheckpointError, naming `place`, for anything but strict JSON."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(data.decode(), parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place}: is damaged (no JSON: {error}).") from error


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises ValueError where a key stands twice: two readers may take different ones."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def check_name(name: Any) -> None:
    """Raise ValueError unless this is a relative path, with "/", that stays inside its folder and hides nothing."""
    if not isinstance(name, str) or not all(_PART.fullmatch(part) for part in name.split("/")):
        raise ValueError(
            f"Expected the name of a file inside the checkpoint, such as 'rank-00000/model.safetensors'. "
            f"Received: {name!r}."
        )


def _time() -> str:
    """Now; or, where a clock went back, just after the latest manifest that this process has seen or written.

    So what is saved later counts as newer, whatever the clock says.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    _note_time((now if _latest is None or now > _latest else _latest + _TICK).isoformat(timespec="microseconds"))
    assert _latest is not None
    return _latest.isoformat(timespec="microseconds")


def _note_time(text: str) -> None:
    global _latest
    try:
        time = datetime.datetime.fromisoformat(text)
        if time.tzinfo is not None and time.year < 9999:
            _latest = time if _latest is None else max(_latest, time)
    except ValueError:
        return  # whoever wrote it has another idea of time


def _versions() -> dict[str, str]:
    own = importlib.import_module(__package__.partition(".")[0])  # the package's root, whatever it is imported as
    return {"drivetrain": own.__version__, "torch": str(torch.__version__), "numpy": np.__version__,
            "python": platform.python_version()}  # fmt: skip


def _ending(body: bytes) -> bytes:
    return f'"checksum": "{xxh3_64_hexdigest(body)}"\n}}\n'.encode()


def _check_version(version: Any, place: str) -> None:
    if type(version) is not int:
        raise CheckpointError(f"{place}: is damaged (format_version is {version!r}).")
    if version == VERSION:
        return
    age = "newer" if version > VERSION else "older"
    what = "Update drivetrain" if version > VERSION else "Load it with the version of drivetrain that wrote it"
    raise CheckpointError(f"{place}: expected format_version {VERSION}. Received: {version}, which is {age}. {what}.")


def _check_content(manifest: dict[str, Any], place: str) -> None:
    files, time = manifest.get("files"), manifest.get("time")
    if not isinstance(files, dict) or not isinstance(time, str):
        raise CheckpointError(f"{place}: lacks its list of files or its time.")
    for key in _COUNTS:
        if manifest.get(key) is not None and type(manifest[key]) is not int:
            raise CheckpointError(f"{place}: its {key} is {manifest[key]!r}, which is no number.")
    for name, record in files.items():
        try:
            check_name(name)
            size, digest = record["size"], record[HASH]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{place}: lists {name!r} wrongly ({error}).") from error
        if type(size) is not int or size < 0 or not isinstance(digest, str):
            raise CheckpointError(f"{place}: lists {name!r} wrongly.")
