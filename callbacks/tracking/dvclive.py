"""Tracking with DVCLive: files in a folder, which DVC and its extensions show."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from . import media
from .base import GeneralTracker, needed, on_main_process
from .files import replace
from .values import flatten, plain, settle


class DVCLiveTracker(GeneralTracker):
    """Tracks by DVCLive; the native object is its `dvclive.Live`: `live`, or a new one of `kwargs`.

    Without a `dir` the files go to `dvclive` in the run's folder. Nested values get names like "a/b". When a run goes
    on, rows after the restored step are dropped from the files. How it ended is the parameter "status" where it failed.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self._dvclive = needed("dvclive")
        self.run_name = run_name
        self.live = live
        self._options = kwargs

    @on_main_process
    def start(self) -> None:
        """Make the folder, or continue it."""
        if self.live is not None:
            return
        folder = Path(self._options.get("dir") or (self.run_folder or Path(".")) / "dvclive")
        goes_on = self.run_id is not None or self.resume_step is not None
        if goes_on and self.resume_step is not None:
            for path in (folder / "plots" / "metrics").rglob("*.tsv"):
                _cut(path, self.resume_step)
        self.live = self._dvclive.Live(**{**self._options, "dir": str(folder), "resume": goes_on or self._resumes()})
        self.run_id = str(folder)

    @property
    def tracker(self) -> Any:
        """The `Live` object."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, nested as they are."""
        self.live.log_params(plain(values))

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it as the parameter "provenance"."""
        self.live.log_params({"provenance": plain(values)})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text; options are those of `Live.log_metric`."""
        if step is not None:
            self.live.step = step
        for name, value in flatten(settle(values)).items():
            self.live.log_metric(name, value if isinstance(value, (bool, int, float)) else str(value), **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images as `<name>/<step>.png`; `dataformats` as for TensorBoard."""
        for name, value in values.items():
            pictures = media.pictures(value, kwargs.get("dataformats"))
            for one, picture in zip(media.numbered(name, len(pictures)), pictures):
                self.live.log_image(f"{one}/{step or 0}.png", picture)

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as images."""
        self.log_images(values, step)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None,
        dataframe: Any = None, step: int | None = None, **kwargs: Any,
    ) -> None:
        """Log a table as a plot of its second column over its first; options are those of `Live.log_plot`."""
        names, rows = media.columns_and_rows(columns, data, dataframe)
        points = [dict(zip(names, plain(row))) for row in rows]
        self.live.log_plot(table_name, points, **{"x": names[0], "y": names[-1], **kwargs})

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file or a folder as an artifact; outside of a DVC repository, a copy of it."""
        self._artifact(local_path, name=_artifact_name(artifact_path or Path(local_path).stem))

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a folder as an artifact; outside of a DVC repository, a copy of it."""
        self.log_artifact(local_dir, artifact_path)

    @on_main_process
    def log_checkpoint(
        self, path: str | os.PathLike[str], aliases: Sequence[str] = (), step: int | None = None
    ) -> None:
        """Log a checkpoint as an artifact of type "model", with labels; outside of a DVC repository, a copy."""
        self._artifact(path, name=_artifact_name(Path(path).name), type="model", labels=list(aliases))

    @on_main_process
    def logged_steps(self, name: str) -> Collection[int]:
        """Return the steps that a metric's file has."""
        path = Path(self.live.plots_dir) / "metrics" / f"{name}.tsv"
        if not path.exists():
            return ()
        with open(path, newline="") as file:
            return {int(row["step"]) for row in csv.DictReader(file, delimiter="\t")}

    @on_main_process
    def flush(self) -> None:
        """Write the summary, `metrics.json`."""
        self.live.make_summary()

    @on_main_process
    def fail(self, error: str) -> None:
        """Store the error as the parameter "status"."""
        self.live.log_params({"status": {"state": "failed", "error": error}})

    @on_main_process
    def preempt(self, reason: str) -> None:
        """Store the reason as the parameter "status"."""
        self.live.log_params({"status": {"state": "preempted", "error": reason}})

    @on_main_process
    def finish(self) -> None:
        """Write the summary and end."""
        self.live.end()

    def _resumes(self) -> bool:
        return bool(self._options.get("resume", False))

    def _artifact(self, path: str | os.PathLike[str], name: str, **options: Any) -> None:
        if self.live._dvc_repo is not None:
            self.live.log_artifact(str(path), name=name, copy=False, **options)
            return
        place = Path(self.live.artifacts_dir) / name
        place.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            shutil.copytree(path, place, dirs_exist_ok=True)
        else:
            shutil.copy(path, place)


def _cut(path: Path, step: int) -> None:
    """Leave out the rows of a metric's file after a step, and a torn last one."""
    text = path.read_text()
    header, *rows = text[: text.rfind("\n") + 1].splitlines(keepends=True) or [""]
    place = header.rstrip("\n").split("\t").index("step") if "step" in header else 0
    replace(path, [header, *(row for row in rows if int(row.rstrip("\n").split("\t")[place]) <= step)])


def _artifact_name(name: str) -> str:
    kept = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return kept.strip("-") or "artifact"
