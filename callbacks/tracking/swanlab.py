"""Tracking with SwanLab: online, or with `mode="offline"` into files that `swanlab sync` uploads."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import media
from .base import on_main_process
from .service import ServiceTracker
from .values import flatten, plain, settle


class SwanLabTracker(ServiceTracker):
    """Tracks into a run of SwanLab; the native object is its `swanlab.Run`.

    `run_name` is the project, `kwargs` are those of `swanlab.init`. Nested values get names like "a/b". A run that goes
    on does so under its own id; offline, its parts are in folders of their own. What is printed is not taken, unless
    `settings` say otherwise.
    """

    name = "swanlab"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._end: dict[str, Any] = {}

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        quiet = self._package.Settings(interactive=False, terminal={"proxy_type": "none"})
        options = {"project": self.run_name, "name": self.run_title, "settings": quiet, **self._options}
        if self.run_folder is not None and "log_dir" not in options and "logdir" not in options:
            options["log_dir"] = str(self.run_folder / "swanlog")
        if self.run_id is not None:
            options.update(id=self.run_id, resume="allow")
        self.run = self._package.init(**options)
        self.run_id = self.run.id

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, nested as they are."""
        self.run.config.update(plain(values))

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it in the configuration, below "provenance", and its files."""
        self.run.config.update({"provenance": plain(values)})
        for path in files:
            self.log_artifact(path, "provenance")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text; of two values for one name and step SwanLab keeps the first."""
        found = flatten(settle(values))
        for name, value in found.items():
            if not isinstance(value, (int, float)):
                found[name] = self._package.Text(str(value))
        self.run.log(found, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `dataformats` as for TensorBoard, other options are those of `swanlab.Image`."""
        formats = kwargs.pop("dataformats", None)
        self.run.log(
            {name: [self._package.Image(picture, **kwargs) for picture in media.pictures(value, formats)]
             for name, value in values.items()},
            step=step,
        )  # fmt: skip

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as images."""
        self.log_images(values, step)

    @on_main_process
    def log_audio(self, values: dict[str, Any], step: int | None = None, sample_rate: int = 44100) -> None:
        """Log sound; without the package soundfile, which SwanLab needs for that, as files."""
        heard = importlib.util.find_spec("soundfile") is not None
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for number, (name, value) in enumerate(values.items()):
                path = Path(folder) / f"{number}.wav"
                path.write_bytes(media.wav(value, sample_rate))
                if heard:
                    found[name] = self._package.Audio(str(path), sample_rate=sample_rate)
                else:
                    self._save(path, Path("audio") / name / f"{step or 0:08d}.wav")
            if found:
                self.run.log(found, step=step)

    @on_main_process
    def log_videos(self, values: dict[str, Any], step: int | None = None, fps: float = 4) -> None:
        """Log video."""
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for number, (name, value) in enumerate(values.items()):
                path = Path(folder) / f"{number}.gif"
                path.write_bytes(media.gif(value, fps))
                found[name] = self._package.Video(str(path))
            self.run.log(found, step=step)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None,
        dataframe: Any = None, step: int | None = None, **kwargs: Any,
    ) -> None:
        """Log a table."""
        table = self._package.echarts.Table()
        table.add(*media.columns_and_rows(columns, data, dataframe))
        self.run.log({table_name: table}, step=step)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file; `artifact_path` is the folder that it goes to."""
        self._save(Path(local_path), Path(artifact_path or "") / Path(local_path).name)

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log the files of a folder."""
        for path in sorted(Path(local_dir).rglob("*")):
            if path.is_file():
                self._save(path, Path(artifact_path or Path(local_dir).name) / path.relative_to(local_dir))

    @on_main_process
    def log_checkpoint(
        self, path: str | os.PathLike[str], aliases: Sequence[str] = (), step: int | None = None
    ) -> None:
        """Log a checkpoint's files; the configuration's "checkpoints" names it by alias."""
        self.log_artifacts(path, f"checkpoints/{Path(path).name}")
        self.run.config.update({"checkpoints": {alias: Path(path).name for alias in aliases}})

    @on_main_process
    def fail(self, error: str) -> None:
        """Let the run end as crashed, with the error."""
        self._end = {"state": "crashed", "error": error}

    @on_main_process
    def preempt(self, reason: str) -> None:
        """Let the run end as aborted, with the reason."""
        self._end = {"state": "aborted", "error": reason}

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish(**self._end)

    def _earlier(self) -> Iterator[tuple[str, int]]:
        here = Path(self.run.dir).resolve()
        for path in files(here.parent, str(self.run_id)):
            if path.parent.resolve() != here:
                yield from steps(path)

    def _save(self, path: Path, name: Path) -> None:
        """Save a file under a name: SwanLab keeps a link to it, so it lies in the run's folder first."""
        place = Path(self.run.dir) / "saved" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
        self.run.save(str(place), base_path=str(Path(self.run.dir) / "saved"), policy="now")


def files(folder: Path, run_id: str) -> list[Path]:
    """Return the files of a run's parts, in their order: each is in a folder whose name begins with its second."""
    return sorted(folder.glob(f"*run-*/run-{glob.escape(run_id)}.swanlab"))


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of an offline run's file as dicts, in which zeros are missing; a torn end is left out."""
    from google.protobuf.json_format import MessageToDict
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    try:
        reader.open(str(path))
        for data in reader:
            record = record_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(data)
            yield MessageToDict(record, preserving_proto_field_name=True)
    except Exception:  # whatever a damaged end makes of it
        return
    finally:
        reader.close()


def steps(path: Path) -> Iterator[tuple[str, int]]:
    """Yield names and steps of the values in an offline run's file."""
    for record in records(path):
        content = record.get("scalar") or record.get("media")
        if content:
            yield str(content["key"]), int(content.get("step", 0))
