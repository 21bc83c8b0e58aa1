"""Tracking with Weights & Biases: online, or with `mode="offline"` into files that `wandb sync` uploads."""

from __future__ import annotations

import glob
import json
import os
import re
import struct
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...strategies.environment import live
from . import media
from .base import on_main_process
from .service import ServiceTracker
from .values import array_of, plain, settle

_BLOCK = 32768  # bytes of a block in a run's file
_OTHER = re.compile(r"[^\w\-.]", re.ASCII)


class WandBTracker(ServiceTracker):
    """Tracks into a run of Weights & Biases; the native object is its `wandb.Run`.

    `run_name` is the project, `kwargs` are those of `wandb.init`. A run that goes on does so under its own id; offline,
    its parts are in folders of their own, which `wandb sync` puts together.
    """

    name = "wandb"
    _exit_code = 0

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        options = {"project": self.run_name, "name": self.run_title, **self._options}
        if self.run_folder is not None and "WANDB_DIR" not in live() and "dir" not in options:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(self.run_folder)
        if self.run_id is not None:
            options.update(id=self.run_id, resume="allow")
        self.run = self._package.init(**options)
        self.run_id = self.run.id

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, nested as they are."""
        self.run.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it in the configuration, below "provenance", and its files."""
        self.run.config.update({"provenance": plain(values)}, allow_val_change=True)
        for path in files:
            self.run.save(str(path), base_path=str(Path(path).parent), policy="now")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, nested as they are; options are those of `wandb.Run.log`. Steps must not go down."""
        self.run.log({name: _taken(value) for name, value in settle(values).items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `dataformats` as for TensorBoard, other options are those of `wandb.Image`."""
        formats = kwargs.pop("dataformats", None)
        self.run.log(
            {name: [self._package.Image(picture, **kwargs) for picture in media.pictures(value, formats)]
             for name, value in values.items()},
            step=step,
        )  # fmt: skip

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as images."""
        self.run.log({name: self._package.Image(media.pictures(value)[0]) for name, value in values.items()}, step=step)

    @on_main_process
    def log_audio(self, values: dict[str, Any], step: int | None = None, sample_rate: int = 44100) -> None:
        """Log sound."""
        with tempfile.TemporaryDirectory() as folder:
            files = {name: _put(folder, "wav", media.wav(value, sample_rate)) for name, value in values.items()}
            self.run.log({name: self._package.Audio(path, sample_rate) for name, path in files.items()}, step=step)

    @on_main_process
    def log_videos(self, values: dict[str, Any], step: int | None = None, fps: float = 4) -> None:
        """Log video."""
        with tempfile.TemporaryDirectory() as folder:
            files = {name: _put(folder, "gif", media.gif(value, fps)) for name, value in values.items()}
            self.run.log({name: self._package.Video(path, format="gif") for name, path in files.items()}, step=step)

    @on_main_process
    def log_histograms(self, values: dict[str, Any], step: int | None = None, bins: int = 64) -> None:
        """Log distributions of tensors or arrays."""
        kind = self._package.Histogram
        found = {name: kind(array_of(value).reshape(-1), num_bins=bins) for name, value in values.items()}
        self.run.log(found, step=step)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None,
        dataframe: Any = None, step: int | None = None, **kwargs: Any,
    ) -> None:
        """Log a table."""
        names, rows = media.columns_and_rows(columns, data, dataframe)
        self.run.log({table_name: self._package.Table(columns=names, data=plain(rows))}, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file as an artifact; `artifact_path` is its name."""
        artifact = self._package.Artifact(_OTHER.sub("-", artifact_path or Path(local_path).name), type="file")
        artifact.add_file(str(local_path))
        self.run.log_artifact(artifact)

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a folder as an artifact; `artifact_path` is its name."""
        artifact = self._package.Artifact(_OTHER.sub("-", artifact_path or Path(local_dir).name), type="folder")
        artifact.add_dir(str(local_dir))
        self.run.log_artifact(artifact)

    @on_main_process
    def log_checkpoint(
        self, path: str | os.PathLike[str], aliases: Sequence[str] = (), step: int | None = None
    ) -> None:
        """Log a checkpoint as a version of the artifact `model-<run id>`, with aliases."""
        artifact = self._package.Artifact(f"model-{self.run_id}", type="model", metadata={"step": step})
        artifact.add_dir(str(path))
        self.run.log_artifact(artifact, aliases=list(aliases))

    @on_main_process
    def logged_steps(self, name: str) -> Collection[int]:
        """Return the steps that earlier parts of the run have; online, all before the one where the run goes on."""
        if not self.run.offline:
            return range(self.run.starting_step) if self.run.resumed else ()
        return super().logged_steps(name)

    def _earlier(self) -> Iterator[tuple[str, int]]:
        here = Path(self.run.dir).parent.resolve()
        for path in files(here.parent, str(self.run_id)):
            if path.parent.resolve() != here:
                yield from ((name, int(row.get("_step", 0))) for row in history(path) for name in row)

    @on_main_process
    def fail(self, error: str) -> None:
        """Let the run end as failed, with the error in its summary."""
        self.run.summary["error"] = error
        self._exit_code = 1

    @on_main_process
    def preempt(self, reason: str) -> None:
        """Let the run end as pre-empted."""
        self.run.mark_preempting()
        self.fail(reason)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish(exit_code=self._exit_code)


def files(folder: Path, run_id: str) -> list[Path]:
    """Return the files of a run's parts, in their order; a folder's name ends with a number if its second had one."""
    return sorted(folder.glob(f"*run-*/run-{glob.escape(run_id)}.wandb"))


def history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an offline run's file: name → value, nested names with "/"; "_step" is the step."""
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "request" and record.request.WhichOneof("request_type") == "partial_history":
            items = record.request.partial_history.item
        elif kind == "history":
            items = record.history.item
        else:
            continue
        yield {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    """Yield the records of a run's file: blocks of LevelDB's log format behind 7 bytes of a header.

    A piece is its checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last) and content
    (github.com/google/leveldb/blob/main/doc/log_format.md). A torn end is left out.
    """
    from wandb.proto import wandb_internal_pb2  # there already: wandb itself needs it

    position, parts = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + 7 : position + 7 + length]
        position += 7 + length
        if not kind or len(piece) < length:
            return
        parts = piece if kind in (1, 2) else parts + piece
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(parts)
            yield record


def _taken(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _put(folder: str, kind: str, content: bytes) -> str:
    descriptor, path = tempfile.mkstemp(suffix=f".{kind}", dir=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path
