"""What each tracker's own reader says of a run: name → [(step, value)], in the order in which it is kept."""

from __future__ import annotations

import csv
import time
from pathlib import Path


def mlflow(folder, run_id, uri):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    names = client.get_run(run_id).data.metrics
    history = {name: client.get_metric_history(run_id, name) for name in names}
    return {name: [(metric.step, metric.value) for metric in found] for name, found in history.items()}


def wandb(folder, run_id):
    from drivetrain.callbacks.tracking.wandb import files, history

    paths = files(folder / "wandb", run_id)
    deadline = time.monotonic() + 60
    while not _ended(paths[-1]) and time.monotonic() < deadline:
        time.sleep(0.1)  # another process writes it
    rows = [row for path in paths for row in history(path)]
    return _by_name((row["_step"], {name: value for name, value in row.items() if name[0] != "_"}) for row in rows)


def comet_ml(folder, run_id):
    from drivetrain.callbacks.tracking.comet import messages

    found = [m["payload"]["metric"] for m in messages(folder / "comet", run_id) if "metric" in m.get("payload", {})]
    return _by_name((metric["step"], {metric["metricName"]: metric["metricValue"]}) for metric in found)


def trackio(folder, run_id):
    from trackio.sqlite_storage import SQLiteStorage

    return _by_name((row["step"], {k: v for k, v in row.items() if k not in ("step", "timestamp")})
                    for row in SQLiteStorage.get_logs("project", run_id=run_id))  # fmt: skip


def aim(folder, run_id):
    return {
        metric.name: [(int(step), value) for step, value in zip(*_columns(metric))]
        for metric in aim_run(folder, run_id).metrics()
    }


def aim_run(folder, run_id):
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager

    repo = Repo(str(folder))
    RepoIndexManager.get_index_manager(repo).index(run_id)  # a finished run is seen once it is indexed
    return repo.get_run(run_id)


def dvclive(folder, run_id):
    found = {}
    place = folder / "dvclive" / "plots" / "metrics"
    for path in sorted(place.rglob("*.tsv")):
        name = str(path.relative_to(place).with_suffix(""))
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        found[name] = [(int(row["step"]), _number(row[Path(name).name])) for row in rows]
    return found


def swanlab(folder, run_id):
    from drivetrain.callbacks.tracking.swanlab import files, records

    found = []
    for path in files(folder / "swanlog", run_id):
        found += [record["scalar"] for record in records(path) if "scalar" in record]
    return _by_name((int(one.get("step", 0)), {one["key"]: one.get("value", {}).get("number", 0.0)}) for one in found)


def _ended(path):
    from drivetrain.callbacks.tracking.wandb import _records

    return any(record.WhichOneof("record_type") == "exit" for record in _records(path.read_bytes()))


def _columns(metric):
    steps, columns = metric.data.numpy()
    return steps, columns[0]


def _by_name(rows):
    found = {}
    for step, values in rows:
        for name, value in values.items():
            found.setdefault(name, []).append((int(step), value))
    return found


def _number(text):
    try:
        return float(text)
    except ValueError:
        return text
