"""The index of a sharded checkpoint of torch (`.metadata`), which is a pickle: read so that it can only be an index.

What it may name is the list below: torch's records about tensors and where they lie, and types of plain values. None
of these does more than hold what it is given; any other name is an error, and nothing of the file is used.
Format: torch.distributed.checkpoint.metadata and .filesystem (torch 2.3 and later).
"""

from __future__ import annotations

import pickle  # a reader of this one kind of file, by names that are allowed
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from .files import CheckpointError

NAME = ".metadata"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # what Python 3.13 calls it
}  # fmt: skip


class IndexReader(FileSystemReader):
    """torch's reader of sharded checkpoints, with its index read safely, once; tensors are read as tensors only."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.index = read_index(directory)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index that was read."""
        return self.index


def read_index(directory: Path) -> Metadata:
    """Return the index of a sharded checkpoint; raises CheckpointError for what is none, naming what it asks for."""
    path = directory / NAME
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(f"{path}: is no index of a sharded checkpoint ({error!r}).") from error
    if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise CheckpointError(f"{path}: is no index of a sharded checkpoint.")
    for info in (index.storage_data or {}).values():
        place = Path(getattr(info, "relative_path", ""))
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(f"{path}: names {str(place)!r}, which is no file of this folder.")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _RECORDS.get(module, ()):
            raise CheckpointError(
                f"Expected an index of tensors. Received: a file that asks for {module}.{name}. Do not load it: an "
                "index needs no such thing."
            )
        return super().find_class(module, name)
