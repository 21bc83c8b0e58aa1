"""Tracking with MLflow: a server, or a database of this machine, as `MLFLOW_TRACKING_URI` says.

Rows go in batches, each one request and one transaction. All calls name the run by its id, so that the program's own
use of `mlflow` is not touched.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...strategies.environment import live
from . import media
from .base import GeneralTracker, Row, needed, on_main_process
from .values import flatten, plain, settle

LONGEST_PARAMETER = 6000
"""Characters of a parameter's value that MLflow keeps; the whole value is in the artifact `config.json`."""
_AT_ONCE = 100  # parameters or tags of one request
_METRICS_AT_ONCE = 1000
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # the feed tries again itself
_OTHER = re.compile(r"[^\w\-. :/]", re.ASCII)  # what names may not hold


class MLflowTracker(GeneralTracker):
    """Tracks into an MLflow run; the native object is its `mlflow.entities.Run`, `client` an `MlflowClient`.

    The arguments are those of `mlflow.create_experiment` and `mlflow.start_run`; `logging_dir` is where the artifacts
    of a new experiment go, `tracking_uri` overrides the environment. Hyperparameters are parameters by names like
    "a/b/0", and as they are in the artifact `config.json`; text, tables, pictures and sound are artifacts. Unless the
    environment says otherwise, a request fails after seconds instead of minutes, since it is tried again later.
    """

    name = "mlflow"
    requires_logging_directory = False
    takes_batches = True

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
        *,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__()
        self._mlflow = mlflow = needed("mlflow")
        self._entities = mlflow.entities
        self.experiment_name, self.logging_dir, self.run_name = experiment_name, logging_dir, run_name
        self.run_id = run_id or live().get("MLFLOW_RUN_ID") or None
        self.tags = dict(json.loads(tags) if isinstance(tags, str) else tags or {})
        if description is not None:
            self.tags["mlflow.note.content"] = description
        if nested_run and (parent := mlflow.active_run()) is not None:
            self.tags["mlflow.parentRunId"] = parent.info.run_id
        for variable, value in _PATIENCE.items():  # here: no other thread may change the environment
            live().setdefault(variable, value)
        self.tracking_uri = tracking_uri or mlflow.get_tracking_uri()
        self._error: tuple[str, str] | None = None  # status and what is said

    @on_main_process
    def start(self) -> None:
        """Open the run, or a new one."""
        self.client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is not None:
            self.client.update_run(self.run_id, status="RUNNING")
            self.run = self.client.get_run(self.run_id)
            return
        known = self._mlflow.tracking.context.registry.resolve_tags(self.tags)
        tags = {name: str(value) for name, value in known.items()}
        name = self.run_name or self.run_title
        self.run = self.client.create_run(self._experiment(), tags=tags, run_name=name)
        self.run_id = self.run.info.run_id

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters; one that has another value in the run already becomes a tag "changed.<name>"."""
        values = plain(values)
        has = self.client.get_run(self._id).data.params
        flat = {_name(name): str(value)[:LONGEST_PARAMETER] for name, value in flatten(values).items()}
        self._in_parts([self._entities.Param(name, value) for name, value in flat.items() if name not in has], "params")
        changed = {name: value for name, value in flat.items() if has.get(name, value) != value}
        self._in_parts([self._entities.RunTag(f"changed.{name}", value) for name, value in changed.items()], "tags")
        self.client.log_dict(self._id, values, "config.json")

    @on_main_process
    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store it as tags "provenance.…", long values only as the files, which are artifacts."""
        flat = {f"provenance.{_name(name)}": str(value) for name, value in flatten(plain(values)).items()}
        short = {name: value for name, value in flat.items() if len(value) <= 5000}
        self._in_parts([self._entities.RunTag(name, value) for name, value in short.items()], "tags")
        for path in files:
            self.client.log_artifact(self._id, str(path), "provenance")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, text as files `text/<name>/<step>.txt`."""
        self._log([(values, step, self.logged_at or time.time())])

    @on_main_process
    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log several rows by one request."""
        self._log([(row.values, row.step, row.time) for row in rows])

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images as files `images/<name>/<step>.png`; `dataformats` as for TensorBoard."""
        for name, value in values.items():
            pictures = media.pictures(value, kwargs.get("dataformats"))
            for one, picture in zip(media.numbered(name, len(pictures)), pictures):
                self._put_file(f"images/{_name(one)}/{step or 0:08d}.png", media.png(picture))

    @on_main_process
    def log_figures(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures as files `figures/<name>/<step>.png`."""
        for name, value in values.items():
            self._put_file(f"figures/{_name(name)}/{step or 0:08d}.png", media.png(media.pictures(value)[0]))

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a matplotlib figure, or its picture, under a file name of its own."""
        if isinstance(figure, np.ndarray):
            self.client.log_image(self._id, figure, artifact_file)
        else:
            self.client.log_figure(self._id, figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_audio(self, values: dict[str, Any], step: int | None = None, sample_rate: int = 44100) -> None:
        """Log sound as files `audio/<name>/<step>.wav`."""
        for name, value in values.items():
            self._put_file(f"audio/{_name(name)}/{step or 0:08d}.wav", media.wav(value, sample_rate))

    @on_main_process
    def log_videos(self, values: dict[str, Any], step: int | None = None, fps: float = 4) -> None:
        """Log video as files `videos/<name>/<step>.gif`."""
        for name, value in values.items():
            self._put_file(f"videos/{_name(name)}/{step or 0:08d}.gif", media.gif(value, fps))

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None,
        dataframe: Any = None, step: int | None = None, **kwargs: Any,
    ) -> None:
        """Log a table as a file `tables/<name>/<step>.json`, in the form that MLflow shows."""
        names, rows = media.columns_and_rows(columns, data, dataframe)
        content = json.dumps({"columns": names, "data": plain(rows)}).encode()
        self._put_file(f"tables/{_name(table_name)}/{step or 0:08d}.json", content)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file as an artifact."""
        self.client.log_artifact(self._id, str(local_path), artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log the files of a folder as artifacts."""
        self.client.log_artifacts(self._id, str(local_dir), artifact_path)

    @on_main_process
    def log_checkpoint(
        self, path: str | os.PathLike[str], aliases: Sequence[str] = (), step: int | None = None
    ) -> None:
        """Log a checkpoint below `checkpoints/`; each alias is a tag "checkpoint.<alias>" that names it."""
        self.log_artifacts(path, f"checkpoints/{Path(path).name}")
        for alias in aliases:
            self.client.set_tag(self._id, f"checkpoint.{_name(alias)}", f"checkpoints/{Path(path).name}")

    @on_main_process
    def logged_steps(self, name: str) -> Collection[int]:
        """Ask for the steps that a metric has."""
        return {metric.step for metric in self.client.get_metric_history(self._id, _name(name))}

    @on_main_process
    def fail(self, error: str) -> None:
        """Let the run end as FAILED, with a tag "error"."""
        self._error = ("FAILED", error)

    @on_main_process
    def preempt(self, reason: str) -> None:
        """Let the run end as KILLED, with a tag "error"."""
        self._error = ("KILLED", reason)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        status, error = self._error or ("FINISHED", None)
        if error is not None:
            self.client.set_tag(self._id, "error", error[:LONGEST_PARAMETER])
        self.client.set_terminated(self._id, status)

    @property
    def _id(self) -> str:
        assert self.run_id is not None, "start comes first"
        return self.run_id

    def _experiment(self) -> str:
        """Return the id of the experiment, made where there is none."""
        name = live().get("MLFLOW_EXPERIMENT_NAME") or self.experiment_name or "Default"
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        place = None if self.logging_dir is None else Path(self.logging_dir).absolute().as_uri()
        try:
            return str(self.client.create_experiment(name, artifact_location=place))
        except self._mlflow.exceptions.MlflowException:  # another process was quicker
            found = self.client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _log(self, rows: list[tuple[dict[str, Any], int | None, float]]) -> None:
        metrics, texts = [], []
        for values, step, at in rows:
            for name, value in flatten(settle(values)).items():
                if isinstance(value, (bool, int, float)):
                    metrics.append(self._entities.Metric(_name(name), float(value), int(at * 1000), int(step or 0)))
                elif value is not None:
                    texts.append((f"text/{_name(name)}/{int(step or 0):08d}.txt", str(value)))
        self._in_parts(metrics, "metrics")
        for path, content in texts:
            self._put_file(path, content.encode())

    def _in_parts(self, items: list[Any], kind: str) -> None:
        size = _METRICS_AT_ONCE if kind == "metrics" else _AT_ONCE
        for start in range(0, len(items), size):
            self.client.log_batch(self._id, **{kind: items[start : start + size]}, synchronous=True)

    def _put_file(self, path: str, content: bytes) -> None:
        folder, _, file_name = path.rpartition("/")
        with tempfile.TemporaryDirectory() as place:
            local = Path(place) / file_name
            local.write_bytes(content)
            self.client.log_artifact(self._id, str(local), folder)


def _name(name: str) -> str:
    """Return a name as MLflow takes it."""
    return _OTHER.sub("_", name).strip("/") or "_"
