"""Tracking with Trackio: a database of this machine (`TRACKIO_DIR`), a server of one's own, or a Space."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import media
from .base import on_main_process
from .service import ServiceTracker
from .values import array_of, flatten, plain, settle


class TrackioTracker(ServiceTracker):
    """Tracks into a run of Trackio; the native object is its `trackio.Run`.

    `run_name` is the project, `kwargs` are those of `trackio.init`. Nested values get names like "a/b". A run that goes
    on does so under its own id. Trackio has no states of runs: that one failed is an alert, with the error.
    """

    name = "trackio"

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        options = {"name": self.run_title, **quiet, **self._options}
        self.run = self._package.init(project=self.run_name, **options)
        if self.run_id is not None:
            self.run.id = self.run_id  # names of runs are not unique, so they cannot be gone on with by name
        self.run_id = self.run.id

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, nested as they are; Trackio writes them with the next row."""
        given = {f"config{name}" if str(name).startswith("_") else name: value for name, value in plain(values).items()}
        self.run.config.update(given)
        self.run._config_logged = False

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it in the configuration, below "provenance", and its files as artifacts."""
        self.store_init_configuration({"provenance": values})
        for path in files:
            self.run.log_artifact(str(path), name=f"provenance-{Path(path).name}", type="provenance")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text; nested values get names like "a/b"."""
        self.run.log({name: plain(value) for name, value in flatten(settle(values)).items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `dataformats` as for TensorBoard, other options are those of `trackio.Image`."""
        formats = kwargs.pop("dataformats", None)
        found: dict[str, Any] = {}
        for name, value in values.items():
            pictures = media.pictures(value, formats)
            found |= {
                one: self._package.Image(picture, **kwargs)
                for one, picture in zip(media.numbered(name, len(pictures)), pictures)
            }
        self.run.log(found, step=step)

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as images."""
        self.run.log({name: self._package.Image(media.pictures(value)[0]) for name, value in values.items()}, step=step)

    @on_main_process
    def log_audio(self, values: dict[str, Any], step: int | None = None, sample_rate: int = 44100) -> None:
        """Log sound."""
        self._log_files({name: ("wav", media.wav(value, sample_rate)) for name, value in values.items()}, step)

    @on_main_process
    def log_videos(self, values: dict[str, Any], step: int | None = None, fps: float = 4) -> None:
        """Log video."""
        self._log_files({name: ("gif", media.gif(value, fps)) for name, value in values.items()}, step)

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
        self.run.log({table_name: self._package.Table(columns=names, data=plain(rows))}, step=step)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file as an artifact; `artifact_path` is its name."""
        self.run.log_artifact(str(local_path), name=artifact_path, type="file")

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a folder as an artifact; `artifact_path` is its name."""
        self.run.log_artifact(str(local_dir), name=artifact_path, type="folder")

    @on_main_process
    def log_checkpoint(
        self, path: str | os.PathLike[str], aliases: Sequence[str] = (), step: int | None = None
    ) -> None:
        """Log a checkpoint as a version of the artifact `model-<run id>`, with aliases."""
        self.run.log_artifact(str(path), name=f"model-{self.run_id}", type="model", aliases=list(aliases))

    @on_main_process
    def flush(self) -> None:
        """Write what waits into the database of this machine."""
        if self.run._is_local:
            with self.run._client_lock:
                self.run._flush_queues_inline()

    @on_main_process
    def fail(self, error: str) -> None:
        """Raise an alert with the error."""
        self.run.alert("failed", text=error, level=self._package.AlertLevel.ERROR)

    @on_main_process
    def preempt(self, reason: str) -> None:
        """Raise an alert with the reason."""
        self.run.alert("preempted", text=reason, level=self._package.AlertLevel.WARN)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()

    def _earlier(self) -> Iterator[tuple[str, int]]:
        rows = self._package.sqlite_storage.SQLiteStorage.get_logs(self.run_name, run_id=self.run_id)
        return ((name, int(row["step"])) for row in rows for name in row)

    def _log_files(self, contents: dict[str, tuple[str, bytes]], step: int | None) -> None:
        kinds = {"wav": self._package.Audio, "gif": self._package.Video}
        with tempfile.TemporaryDirectory() as folder:
            values = {}
            for number, (name, (kind, content)) in enumerate(contents.items()):
                path = Path(folder) / f"{number}.{kind}"
                path.write_bytes(content)
                values[name] = kinds[kind](str(path))
            self.run.log(values, step=step)
