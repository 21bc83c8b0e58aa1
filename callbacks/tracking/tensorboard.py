"""Tracking into TensorBoard's event files.

Events are written by the writer's own thread and flushed every 30 seconds, before a checkpoint and at the end; never at
each call.
"""

from __future__ import annotations

import inspect
import os
import struct
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.config_pb2 import RunMetadata
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from . import media
from .base import GeneralTracker, on_main_process
from .values import array_of, flatten, plain, settle

FLUSH_SECONDS = 30

_FILES = "events.out.tfevents.*"


class TensorBoardTracker(GeneralTracker):
    """Tracks into event files in `logging_dir/run_name`; the native object is torch's `SummaryWriter`.

    `kwargs` are the writer's. Hyperparameters appear in the HPARAMS tab, nested ones as "a/b/0", beside the last values
    of all scalars, or of those that `hparam_metrics` names. With `resume_step`, what was logged after that step is
    hidden, and what the step has already is not logged twice.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], *, hparam_metrics: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__()
        self._metrics = tuple(hparam_metrics)
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._options = {"flush_secs": FLUSH_SECONDS, **kwargs}
        inspect.signature(SummaryWriter).bind(str(self.logging_dir), **self._options)  # a wrong name is an error now
        self._logged: set[str] = set()  # tags that the step has at which a run goes on
        self._end: Any = None  # what closes the session in the HPARAMS tab
        self._refused: set[str] = set()

    @on_main_process
    def start(self) -> None:
        """Open an event file."""
        if self.resume_step is not None and any(self.logging_dir.glob(_FILES)):
            self._logged = _tags(self.logging_dir, self.resume_step)
            self._options.setdefault("purge_step", self.resume_step + 1)
            _wait_for_a_later_name(self.logging_dir)
        self.writer = SummaryWriter(str(self.logging_dir), **self._options)

    @property
    def tracker(self) -> SummaryWriter:
        """The writer."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters; other values than numbers, strings and booleans as text."""
        simple = {name: _simple(value) for name, value in flatten(plain(values)).items()}
        experiment, start, self._end = hparams(simple, dict.fromkeys(self._metrics, 0.0))
        writer = self.writer._get_file_writer()  # add_hparams would make a folder of its own for it
        if self._metrics:
            writer.add_summary(experiment)  # without it the tab shows every scalar that the runs have
        writer.add_summary(start)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, strings as text, a dict of numbers as curves of one chart."""
        kwargs.setdefault("walltime", self.logged_at)
        again = self._logged if step is not None and step == self.resume_step else ()
        for name, value in values.items():
            if name not in again and f"{name}/text_summary" not in again:
                self._log_one(name, settle(value), step, kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images; `dataformats` and other options are those of `SummaryWriter.add_images`."""
        for name, value in values.items():
            self.writer.add_images(name, value, global_step=step, **kwargs)

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as images."""
        for name, value in values.items():
            self.writer.add_image(name, media.pictures(value)[0][..., :3], global_step=step, dataformats="HWC")

    @on_main_process
    def log_audio(self, values: dict[str, Any], step: int | None = None, sample_rate: int = 44100) -> None:
        """Log sound, of several channels the first."""
        for name, value in values.items():
            sound = media.samples(value)
            first = sound if sound.ndim == 1 else sound[:, 0]
            self.writer.add_audio(name, first, global_step=step, sample_rate=sample_rate)

    @on_main_process
    def log_videos(self, values: dict[str, Any], step: int | None = None, fps: float = 4) -> None:
        """Log video as animated images."""
        for name, value in values.items():
            frames = media.frames(value)
            image = Summary.Image(
                height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=media.gif(frames, fps)
            )
            summary = Summary(value=[Summary.Value(tag=name, image=image)])
            self.writer._get_file_writer().add_summary(summary, step)

    @on_main_process
    def log_histograms(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log distributions of tensors or arrays; options are those of `SummaryWriter.add_histogram`."""
        for name, value in values.items():
            self.writer.add_histogram(name, array_of(value), global_step=step, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None,
        dataframe: Any = None, step: int | None = None, **kwargs: Any,
    ) -> None:
        """Log a table as text."""
        self.writer.add_text(table_name, media.markdown(*media.columns_and_rows(columns, data, dataframe)), step)

    @on_main_process
    def log_graph(self, graph: bytes) -> None:
        """Log a model's graph (see graph.py)."""
        self.writer._get_file_writer().add_graph((GraphDef.FromString(graph), RunMetadata()))

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it as text "provenance"."""
        rows = [[name, value] for name, value in flatten(plain(values)).items()]
        self.writer.add_text("provenance", media.markdown(["", ""], rows))

    @on_main_process
    def flush(self) -> None:
        """Write out what the writer holds."""
        self.writer.flush()

    @on_main_process
    def fail(self, error: str) -> None:
        """Mark the session as failed and write the error as text."""
        if self._end is not None:
            end = next(value for value in self._end.value if value.tag == hparams_metadata.SESSION_END_INFO_TAG)
            data = HParamsPluginData.FromString(end.metadata.plugin_data.content)
            data.session_end_info.status = Status.Value("STATUS_FAILURE")
            end.metadata.plugin_data.content = data.SerializeToString()
        self.writer.add_text("error", error)

    @on_main_process
    def finish(self) -> None:
        """Close the writer."""
        if self._end is not None:
            self.writer._get_file_writer().add_summary(self._end)
        self.writer.close()

    def _log_one(self, name: str, value: Any, step: int | None, options: dict[str, Any]) -> None:
        if isinstance(value, str):
            self.writer.add_text(name, value, global_step=step, **options)
        elif isinstance(value, (int, float)):
            self.writer.add_scalar(name, value, global_step=step, **options)
        elif isinstance(value, dict) and _numbers(flat := flatten(value)):
            self.writer.add_scalars(name, flat, global_step=step, **options)
        elif isinstance(value, (list, tuple)) and _numbers(flat := flatten({name: value})):
            for key, item in flat.items():
                self.writer.add_scalar(key, item, global_step=step, **options)
        elif name not in self._refused:
            self._refused.add(name)
            warnings.warn(
                f"Expected numbers, strings, or dicts or lists of numbers to log to TensorBoard. Received: {name} of "
                f"type {type(value).__name__}, which is left out. Use the writer itself, or log_images.",
                RuntimeWarning,
                stacklevel=2,
            )


def _numbers(values: dict[str, Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values.values())


def _simple(value: Any) -> float | int | str | bool:
    return value if isinstance(value, (int, float, str)) else str(value)


def _wait_for_a_later_name(folder: Path) -> None:
    """Let the second pass in which the newest file was made: readers order files by name, which begins with it."""
    newest = max(path.name.split(".")[3] for path in folder.glob(_FILES))
    while newest.isdigit() and int(newest) - 1 <= time.time() < int(newest) + 1:
        time.sleep(max(0.001, int(newest) + 1 - time.time()))  # which may wake a moment too early by this clock


def _tags(folder: Path, step: int) -> set[str]:
    """Return the tags that a step has in a folder's event files, without what a later session has hidden."""
    tags: set[str] = set()
    for path in sorted(folder.glob(_FILES)):
        for event in _events(path):
            if event.session_log.status == SessionLog.START and event.step <= step:
                tags.clear()
            elif event.step == step:
                tags.update(value.tag for value in event.summary.value)
    return tags


def _events(path: Path) -> Iterator[Event]:
    """Yield a file's events up to a torn one, or to what is none.

    A record is its length (8 bytes, little-endian), 4 bytes of checksum, the data, 4 bytes of checksum
    (tensorflow.org/tutorials/load_data/tfrecord). TensorBoard's own reader computes the checksums in Python.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack_from("<Q", header)
            if length > size or len(data := file.read(length + 4)) < length + 4:
                return
            try:
                event = Event.FromString(data[:length])
            except DecodeError:
                return
            yield event
