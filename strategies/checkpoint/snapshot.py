"""Saving in the background: the state is copied, and a thread writes the copy while training goes on.

The loop waits for the copy alone. It goes into memory that is kept for the next save, so that one copy of the state is
all the extra memory there ever is; a save that comes while another is being written therefore waits for that one. The
thread talks to the other ranks over a group of its own: two threads of a process must not share one.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..world import World
from .files import require_space
from .state import encode
from .tensor_file import data_size, split_aliases
from .writer import Writer

LARGE = 64 * 1024 * 1024  # bytes of state from which on a save in the background is worth its copy
_ALIGNMENT = 64  # bytes; of each copy within the buffer
_HUGE_PAGES = 14  # MADV_HUGEPAGE on Linux
_log = logging.getLogger(__name__)
_all: weakref.WeakSet[Saves] = weakref.WeakSet()


class Saves:
    """The saves of a run: in the foreground, or in the background and then one at a time.

    `pending` is true from the beginning of a background save until its end was told, by `poll`, `wait` or the next
    `save`: they raise the error with which it failed, or call its `then`. After an error the next save works.
    """

    def __init__(self, world: World) -> None:
        self.pending = False
        self._world = world
        self._own_world: World | None = None
        self._buffers = Buffers()
        self._thread: threading.Thread | None = None
        self._then: Callable[[], None] | None = None
        self._error: BaseException | None = None

    def save(
        self,
        directory: str | Path,
        fill: Callable[[Any], None],
        *,
        metadata: Mapping[str, Any],
        then: Callable[[], None] | None = None,
        background: bool = False,
    ) -> None:
        """Save what `fill` writes into the writer that it is given; every rank has to call this.

        `then` is called by this thread when the checkpoint is durable: before this returns, or in the background by
        `poll`, `wait` or the next `save`. Waits for the save before, and raises its error instead of beginning.
        """
        self.wait()
        if background:
            self._begin(directory, fill, dict(metadata))
            self._then = then
            return
        with Writer(directory, world=self._world) as writer:
            fill(writer)
            writer.commit(metadata)
        if then is not None:
            then()

    def poll(self) -> None:
        """Tell the end of the pending save if it has ended on every rank; every rank has to call this."""
        if self.pending and self._world.agree(self._thread is None or not self._thread.is_alive(), how="all"):
            self.wait()

    def wait(self) -> None:
        """Return when nothing is pending; needs no other rank to call it."""
        if not self.pending:
            return
        if self._thread is not None:
            self._thread.join()
        error, then = self._error, self._then
        self.pending, self._thread, self._error, self._then = False, None, None, None
        if error is not None:
            raise error
        if then is not None:
            then()

    def release(self) -> None:
        """Wait, and let go of the memory that is kept for the next save."""
        try:
            self.wait()
        finally:
            self._buffers = Buffers()

    def _begin(self, directory: str | Path, fill: Callable[[Any], None], metadata: dict[str, Any]) -> None:
        if self._own_world is None:
            self._own_world = self._world.private()
            _finish_at_exit(self)
        world = self._own_world
        with ExitStack() as stack:
            writer = stack.enter_context(Writer(directory, world=world))
            snapshot = Snapshot(writer, self._buffers)
            try:
                fill(snapshot)
                snapshot.take()
            except BaseException:
                world.agree(True)
                raise
            if world.agree(False):
                return  # another rank failed; the writer hears from it why, and raises that here
            open_writer = stack.pop_all()
        # Not a daemon: a process that ends in the meantime waits for it.
        self._thread = threading.Thread(
            target=self._finish, args=(open_writer, snapshot, metadata), name="checkpoint writer"
        )
        self.pending = True
        self._thread.start()

    def _finish(self, open_writer: ExitStack, snapshot: Snapshot, metadata: dict[str, Any]) -> None:
        try:
            with open_writer:
                snapshot.write(metadata)
        except BaseException as error:  # raised where somebody hears it
            self._error = error


class Snapshot:
    """What a save writes, held back: has the methods of the `Writer` that it stands for, copies, and writes later."""

    def __init__(self, writer: Writer, buffers: Buffers) -> None:
        self.directory, self.folder, self.world = writer.directory, writer.folder, writer.world
        self.adopt = writer.adopt  # such a file is written already
        self._writer, self._buffers = writer, buffers
        self._files: list[_File] = []

    def json(self, name: str, tree: Any) -> None:
        """See `Writer.json`."""
        self._files.append(_File(name, json.loads(json.dumps(tree))))

    def tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """See `Writer.tensors`."""
        unique, found = split_aliases(tensors)
        self._files.append(_File(name, tensors=unique, metadata=metadata, aliases={**(aliases or {}), **found}))

    def state(self, stem: str, value: Any) -> None:
        """See `Writer.state`."""
        tree, tensors = encode(value, stem)
        if tensors:
            self.tensors(f"{stem}.safetensors", tensors)
        self._files.append(_File(f"{stem}.json", tree))  # `encode` has made it, so nobody else changes it

    def take(self) -> None:
        """Copy the tensors; from now on they may change. Raises CheckpointError where the disk has no room for them."""
        tensors = [tensor for file in self._files for tensor in (file.tensors or {}).values()]
        require_space(self.folder, data_size(tensors), self.directory.name)
        copies = iter(self._buffers.copies(tensors))
        for file in self._files:
            if file.tensors is not None:
                file.tensors = {name: next(copies) for name in file.tensors}

    def write(self, metadata: Mapping[str, Any]) -> None:
        """Write everything, and commit."""
        for file in self._files:
            if file.tensors is None:
                self._writer.json(file.name, file.tree)
            else:
                self._writer.tensors(file.name, file.tensors, metadata=file.metadata, aliases=file.aliases)
        self._writer.commit(metadata)


class Buffers:
    """Memory on the CPU that takes copies of tensors; page-locked where they come from CUDA, which is quicker.

    The copies are good until the next ones are made. Memory is only allocated when the tensors need more than before.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._views: list[Tensor] = []

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies of tensors on any devices."""
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if layout != self._layout:
            self._arrange(layout, pinned=any(tensor.is_cuda for tensor in tensors))
        with torch.no_grad():
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self._views

    def _arrange(self, layout: list[tuple[torch.Size, torch.dtype]], *, pinned: bool) -> None:
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in layout]
        steps = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._views = []
        if sum(steps) > self._memory.numel() or pinned != self._pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._memory = _allocate(sum(steps))
            self._pinned = pinned
            if pinned:
                _lock_pages(self._memory)
        start = 0
        for (shape, dtype), size, step in zip(layout, sizes, steps, strict=True):
            self._views.append(self._memory[start : start + size].view(dtype).view(shape))
            start += step
        self._layout = layout


@dataclass
class _File:
    """A file to be written: tensors, or where there are none JSON."""

    name: str
    tree: Any = None
    tensors: Mapping[str, Tensor] | None = None
    metadata: Mapping[str, str] | None = None
    aliases: Mapping[str, str] | None = None


def _allocate(size: int) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8)
    if size >= LARGE and sys.platform == "linux":  # touching it for the first time is quicker so
        first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        count = memory.data_ptr() + size - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), _HUGE_PAGES)
    return memory


def _lock_pages(memory: Tensor) -> None:
    """Register memory with CUDA; torch's own pinned memory comes in powers of two, of which half may be wasted."""
    runtime, place = torch.cuda.cudart(), memory.data_ptr()
    code = runtime.cudaHostRegister(place, memory.numel(), 1) if memory.numel() else 0  # 1: for all devices
    if int(code) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, place).atexit = False
    else:
        _log.warning("Checkpoints are copied to pageable memory, which takes longer: CUDA says error %d.", int(code))


def _finish_at_exit(saves: Saves) -> None:
    if not _all:
        atexit.unregister(_finish_all)
        atexit.register(_finish_all)
    _all.add(saves)


def _finish_all() -> None:
    """The process ends, and nobody has waited: an error at least is told."""
    for saves in list(_all):
        try:
            saves.wait()
        except Exception as error:
            _log.error("The last checkpoint was not saved: %s", error)
