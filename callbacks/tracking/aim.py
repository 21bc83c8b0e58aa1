"""Tracking with Aim: a repository of this machine (a folder `.aim`), or a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import media
from .base import GeneralTracker, needed, on_main_process
from .values import array_of, flatten, plain, settle


class AimTracker(GeneralTracker):
    """Tracks into an Aim run; the native object is its `aim.Run`.

    `run_name` is what the run is called, `logging_dir` the repository, unless `kwargs`, which are those of `aim.Run`,
    name one as `repo`. Hyperparameters are the run's "hparams". A value of a step that is logged again replaces it.
    How the run ended is the run's "status".
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self._aim = needed("aim")
        self.run_name = run_name
        self._options = {"repo": str(logging_dir or "."), **kwargs}
        self._status = {"state": "finished"}

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        if "://" not in str(self._options["repo"]):
            Path(self._options["repo"]).mkdir(parents=True, exist_ok=True)
        again = {"run_hash": self.run_id, "force_resume": True} if self.run_id is not None else {}
        defaults = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        self.run = self._aim.Run(**{**defaults, **self._options, **again})
        self.run_id = self.run.hash
        if self.run_name or self.run_title:
            self.run.name = self.run_name or self.run_title
        self.run["status"] = {"state": "running"}

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, nested as they are."""
        self.run["hparams"] = plain(values)

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it as the run's "provenance", and its files as artifacts."""
        self.run["provenance"] = plain(values)
        for path in files:
            self.log_artifact(path, f"provenance/{Path(path).name}")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text; nested values get names like "a/b"; options are those of `aim.Run.track`."""
        for name, value in flatten(settle(values)).items():
            kept = value if isinstance(value, (bool, int, float)) else self._aim.Text(str(value))
            self.run.track(kept, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None,
        **further: Any,
    ) -> None:
        """Log images; `kwargs` has options for `aim_image` and for `track`; `dataformats` as for TensorBoard."""
        options = kwargs or {}
        for name, value in values.items():
            pictures = media.pictures(value, further.get("dataformats"))
            images = [self._aim.Image(picture, **options.get("aim_image", {})) for picture in pictures]
            self.run.track(images[0] if len(images) == 1 else images, name=name, step=step, **options.get("track", {}))

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as images."""
        self.log_images(values, step)

    @on_main_process
    def log_audio(self, values: dict[str, Any], step: int | None = None, sample_rate: int = 44100) -> None:
        """Log sound."""
        for name, value in values.items():
            sound = self._aim.Audio(media.wav(value, sample_rate), rate=sample_rate, format="wav")
            self.run.track(sound, name=name, step=step)

    @on_main_process
    def log_histograms(self, values: dict[str, Any], step: int | None = None, bins: int = 64) -> None:
        """Log distributions of tensors or arrays."""
        for name, value in values.items():
            self.run.track(self._aim.Distribution(array_of(value).reshape(-1), bin_count=bins), name=name, step=step)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file as an artifact, into the repository's folder `artifacts` unless the run names another place."""
        self._place_artifacts()
        self.run.log_artifact(str(local_path), name=artifact_path or Path(local_path).name, block=True)

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log the files of a folder as artifacts."""
        self._place_artifacts()
        self.run.log_artifacts(str(local_dir), name=artifact_path or Path(local_dir).name, block=True)

    @on_main_process
    def log_checkpoint(
        self, path: str | os.PathLike[str], aliases: Sequence[str] = (), step: int | None = None
    ) -> None:
        """Log a checkpoint's files as artifacts; the run's "checkpoints" names it by alias."""
        name = f"checkpoints/{Path(path).name}"
        self.log_artifacts(path, name)
        known = dict(self.run.get("checkpoints", {}) or {})
        self.run["checkpoints"] = {**known, **{alias: name for alias in aliases}}

    @on_main_process
    def fail(self, error: str) -> None:
        """Mark the run as failed, with the error."""
        self._status = {"state": "failed", "error": error}

    @on_main_process
    def preempt(self, reason: str) -> None:
        """Mark the run as pre-empted, with the reason."""
        self._status = {"state": "preempted", "error": reason}

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run["status"] = self._status
        if self._status["state"] == "finished":
            self.run.report_successful_finish(block=True)
        self.run.close()

    def _place_artifacts(self) -> None:
        if self.run.artifacts_uri is None:
            self.run.set_artifacts_uri((Path(self._options["repo"]).absolute() / "artifacts").as_uri())
