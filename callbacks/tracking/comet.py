"""Tracking with Comet: online, or with `online=False` into archives that `comet upload` uploads."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...strategies.environment import live
from . import media
from .base import on_main_process
from .service import ServiceTracker
from .values import array_of, flatten, plain, settle

_QUIET = {
    "log_code": False, "log_git_metadata": False, "log_git_patch": False, "log_env_details": False,
    "auto_output_logging": False, "auto_metric_logging": False, "auto_param_logging": False, "parse_args": False,
    "display_summary_level": 0,
}  # fmt: skip


class CometMLTracker(ServiceTracker):
    """Tracks into a Comet experiment; the native object is its `comet_ml.CometExperiment`.

    `run_name` is the project, `kwargs` are those of `comet_ml.start`. Comet's own logging of everything is off, unless
    the program has imported `comet_ml` before torch or an `experiment_config` says otherwise. Nested values get names
    like "a/b". A run that goes on does so under its own key; offline, each part is an archive of its own.
    """

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        if "comet_ml" not in sys.modules:  # it reads this when it is imported
            live().setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        super().__init__(run_name, **kwargs)

    @on_main_process
    def start(self) -> None:
        """Open the experiment."""
        options = {"project_name": self.run_name, **self._options}
        place = {}
        if self.run_folder is not None:
            place["offline_directory"] = str(self.run_folder / "comet")
            if self._options.get("online") is False:
                (self.run_folder / "comet").mkdir(parents=True, exist_ok=True)
        options.setdefault("experiment_config", self._package.ExperimentConfig(**_QUIET, **place, name=self.run_title))
        if self.run_id is not None:
            options.update(experiment_key=self.run_id, mode="get")
        self.run = self._package.start(**options)
        self.run_id = self.run.get_key()
        self.run.log_other("Created from", "drivetrain")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters by names like "a/b/0"."""
        self.run.log_parameters(flatten(plain(values)))

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it as values "provenance/…", and its files."""
        for name, value in flatten({"provenance": plain(values)}).items():
            self.run.log_other(name, value)
        for path in files:
            self.run.log_asset(str(path), file_name=f"provenance/{Path(path).name}", copy_to_tmp=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, text as text; options are those of `log_metrics`."""
        numbers = {}
        for name, value in flatten(settle(values)).items():
            if isinstance(value, (bool, int, float)):
                numbers[name] = value
            else:
                self.run.log_text(str(value), step=step, metadata={"name": name})
        if numbers:
            epoch = numbers.get("epoch")
            self.run.log_metrics(numbers, **{"step": step, "epoch": epoch, **kwargs})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `dataformats` as for TensorBoard, other options are those of `log_image`."""
        formats = kwargs.pop("dataformats", None)
        for name, value in values.items():
            pictures = media.pictures(value, formats)
            for one, picture in zip(media.numbered(name, len(pictures)), pictures):
                image = media.Image.fromarray(picture)  # Comet drops black arrays
                self.run.log_image(image, name=one, step=step, **kwargs)

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as images."""
        self.log_images(values, step)

    @on_main_process
    def log_audio(self, values: dict[str, Any], step: int | None = None, sample_rate: int = 44100) -> None:
        """Log sound."""
        for name, value in values.items():
            self._log_file(f"{name}.wav", media.wav(value, sample_rate), step, kind="audio")

    @on_main_process
    def log_videos(self, values: dict[str, Any], step: int | None = None, fps: float = 4) -> None:
        """Log video."""
        for name, value in values.items():
            self._log_file(f"{name}.gif", media.gif(value, fps), step, kind="video")

    @on_main_process
    def log_histograms(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log distributions of tensors or arrays; options are those of `log_histogram_3d`."""
        for name, value in values.items():
            self.run.log_histogram_3d(array_of(value), name=name, step=step, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None,
        dataframe: Any = None, step: int | None = None, **kwargs: Any,
    ) -> None:
        """Log a table as a CSV file."""
        names, rows = media.columns_and_rows(columns, data, dataframe)
        self.run.log_table(f"{table_name}.csv", tabular_data=plain(rows), headers=names, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file; `artifact_path` is its name."""
        self.run.log_asset(str(local_path), file_name=artifact_path or Path(local_path).name, copy_to_tmp=True)

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log the files of a folder."""
        for path in sorted(Path(local_dir).rglob("*")):
            if path.is_file():
                place = Path(artifact_path or Path(local_dir).name) / path.relative_to(local_dir)
                self.run.log_asset(str(path), file_name=str(place), copy_to_tmp=True)

    @on_main_process
    def log_checkpoint(
        self, path: str | os.PathLike[str], aliases: Sequence[str] = (), step: int | None = None
    ) -> None:
        """Log a checkpoint as a model, offline as files; the value "checkpoint/<alias>" names it."""
        if hasattr(self.run, "offline_directory"):  # an archive holds no models
            self.log_artifacts(path, f"checkpoints/{Path(path).name}")
        else:
            self.run.log_model(Path(path).name, str(path), metadata={"step": step, "aliases": list(aliases)})
        for alias in aliases:
            self.run.log_other(f"checkpoint/{alias}", Path(path).name)

    @on_main_process
    def logged_steps(self, name: str) -> Collection[int]:
        """Return the steps that earlier parts of the experiment have, on the server or in this machine's archives."""
        if not hasattr(self.run, "offline_directory"):
            found = self._package.API().get_experiment_by_key(self.run_id)
            return {int(row["step"]) for row in found.get_metrics(name) if row.get("step") is not None}
        return super().logged_steps(name)

    def _earlier(self) -> Iterator[tuple[str, int]]:
        for message in messages(Path(self.run.offline_directory), str(self.run_id)):
            metric = message.get("payload", {}).get("metric", {})
            if metric:
                yield metric["metricName"], int(metric.get("step") or 0)

    @on_main_process
    def flush(self) -> None:
        """Send what waits."""
        self.run.flush()

    @on_main_process
    def fail(self, error: str) -> None:
        """Log the error and the status "failed"."""
        self.run.log_other("status", "failed")
        self.run.log_other("error", error)

    @on_main_process
    def preempt(self, reason: str) -> None:
        """Log the reason and the status "preempted"."""
        self.run.log_other("status", "preempted")
        self.run.log_other("error", reason)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self.run.end()

    def _log_file(self, name: str, content: bytes, step: int | None, *, kind: str) -> None:
        self.run._log_asset_data(content, name, step=step, asset_type=kind)


def messages(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield what the archives of an experiment in a folder hold; an archive that is not whole is left out."""
    for path in sorted({*folder.glob(f"{key}.zip"), *folder.glob(f"{key}-*.zip")}):
        try:
            with zipfile.ZipFile(path) as archive, archive.open("messages.json") as file:
                yield from (json.loads(line) for line in file if line.strip())
        except (zipfile.BadZipFile, KeyError):
            continue
