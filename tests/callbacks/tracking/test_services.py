"""Trackers of other packages, offline: all that is written is read back by their own readers, and there once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.callbacks.tracking.trackers import finish_trackers, start_trackers
from drivetrain.tests.callbacks.tracking import readers, session

NAMES = ("mlflow", "comet_ml", "wandb", "trackio", "aim", "dvclive", "swanlab")
RED = np.zeros((4, 6, 3), np.uint8) + np.array([255, 0, 0], np.uint8)
EXPECTED = {
    "epoch": [(step, step // 4) for step in range(1, 9)],
    "loss": [(step, step / 8) for step in range(1, 9)],
    "parts/a": [(step, step * 2.0) for step in range(1, 9)],
    "late": [(4, 0.5)],
}


class Place:
    """Where a tracker of this test keeps its run, and what it needs to be local."""

    def __init__(self, name, folder, database):
        self.name, self.folder, self.run = name, folder, folder / "run"
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.options = {
            "mlflow": {"tracking_uri": self.uri, "logging_dir": str(folder / "artifacts")},
            "comet_ml": {"online": False}, "wandb": {"mode": "offline"}, "swanlab": {"mode": "offline"},
            "dvclive": {"save_dvc_exp": False, "dvcyaml": None},
        }.get(name, {})  # fmt: skip
        (folder / "mlflow.db").write_bytes(database.read_bytes())

    def start(self, config=session.CONFIG, **options):
        return start_trackers(
            self.name, "project", config, run_dir=self.run, init_kwargs={self.name: self.options}, title="run-0001",
            timeout=300, **options,
        )

    def rows(self, run_id):
        further = (self.uri,) if self.name == "mlflow" else ()
        return getattr(readers, self.name)(self.run, run_id, *further)


@pytest.fixture
def place(request, tmp_path, database):
    return Place(request.param, tmp_path, database)


def figure():
    from matplotlib.figure import Figure

    made = Figure(figsize=(2, 1), dpi=50, facecolor="blue")
    return made


def log_media(tracker, folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("hello")
    (folder / "checkpoint-000008" ).mkdir()
    (folder / "checkpoint-000008" / "weights.bin").write_bytes(b"\x00\x01")
    tracker.log({"note": "good"}, step=8)
    tracker.log_images({"digit": torch.tensor(RED).permute(2, 0, 1) / 255}, step=8)
    tracker.log_figures({"figure": figure()}, step=8)
    for method, value in (
        ("log_audio", {"sound": np.linspace(-1, 1, 800)}), ("log_videos", {"video": np.stack([RED, RED // 2])}),
        ("log_histograms", {"weights": torch.arange(10.0)}),
    ):  # fmt: skip
        if hasattr(tracker.wrapped, method):
            getattr(tracker, method)(value, step=8)
    if hasattr(tracker.wrapped, "log_table"):
        tracker.log_table("table", ["x", "y"], [[1, 2.5], [2, 3.5]], step=8)
    tracker.log_artifact(folder / "notes.txt")
    tracker.log_checkpoint(folder / "checkpoint-000008", aliases=["best"], step=8)


@pytest.mark.timeout(600)  # they import much, and start processes
@pytest.mark.parametrize("place", NAMES, indirect=True)
def test_L3_L6_a_killed_run_goes_on_and_all_is_read_back(place, tmp_path):
    """Killed after step 6, with a checkpoint of step 4: nothing is lost, nothing is there twice, steps never go down."""
    command = [sys.executable, session.__file__, place.name, str(place.run), json.dumps(place.options)]
    alone = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # not by this one's service
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)
    assert done.returncode == -9, done.stderr
    run_id = done.stdout.split()[-1]
    trackers = place.start(
        session.CONFIG | {"more": [1, "two"]}, resume_step=4, run_ids={place.name: run_id}, goes_on=True
    )
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    trackers[0].store_provenance({"command": "train.py", "git": {"commit": "abc"}}, [str(notes)])
    trackers[0].log({"late": 0.5}, step=4)
    session.log(trackers, range(5, 9))
    log_media(trackers[0], tmp_path / "files")
    trackers[0].fail("ValueError: no")
    native = trackers[0].tracker
    finish_trackers(trackers)
    assert trackers[0].wrapped.run_id == run_id
    assert not [path for path in place.run.glob("journal*")], [p.read_text()[:500] for p in place.run.glob("journal*")]
    found = place.rows(run_id)
    assert {name: sorted(found[name]) for name in EXPECTED} == EXPECTED
    assert all([step for step, _ in points] == sorted({step for step, _ in points}) for points in found.values())
    CHECKS[place.name](place, run_id, native)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", NAMES, indirect=True)
def test_L3_parts_of_a_run_that_follow_at_once_have_every_row_once(place):
    """Names that packages make of the second in which a part begins may be the same, or have a number behind them."""
    again = {}
    for step in (1, 2, 3):
        trackers = place.start(**again)
        trackers[0].log({"loss": (step - 1) / 8}, step=step - 1)  # what the part before has logged already
        trackers[0].log({"loss": step / 8}, step=step)
        finish_trackers(trackers)
        again = {"resume_step": step, "run_ids": {place.name: trackers[0].wrapped.run_id}, "goes_on": True}
    assert sorted(place.rows(trackers[0].wrapped.run_id)["loss"]) == [(step, step / 8) for step in range(4)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", NAMES, indirect=True)
def test_a_preempted_run_says_so(place):
    trackers = place.start()
    trackers[0].log({"loss": 0.5}, step=1)
    trackers[0].preempt("stopped by SIGTERM")
    finish_trackers(trackers)
    run_id, words = trackers[0].wrapped.run_id, ("preempted", "stopped by SIGTERM")
    if place.name == "mlflow":
        import mlflow

        run = mlflow.MlflowClient(tracking_uri=place.uri).get_run(run_id)
        assert (run.info.status, run.data.tags["error"]) == ("KILLED", words[1])
    elif place.name == "comet_ml":
        from drivetrain.callbacks.tracking.comet import messages

        payloads = [message["payload"] for message in messages(place.run / "comet", run_id)]
        others = {payload["key"]: payload["value"] for payload in payloads if "key" in payload}
        assert (others["status"], others["error"]) == words
    elif place.name == "wandb":
        assert place.rows(run_id)["loss"] == [(1, 0.5)]  # waits for the end of the file
        from drivetrain.callbacks.tracking.wandb import _records

        records = list(_records(next((place.run / "wandb").glob("offline-run-*/*.wandb")).read_bytes()))
        kinds = [record.WhichOneof("record_type") for record in records]
        assert "preempting" in kinds and [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [1]
    elif place.name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        assert words in [(alert["title"], alert["text"]) for alert in SQLiteStorage.get_alerts("project")]
    elif place.name == "aim":
        status = readers.aim_run(place.run, run_id)["status"]
        assert (status["state"], status["error"]) == words
    elif place.name == "dvclive":
        import yaml

        status = yaml.safe_load((place.run / "dvclive" / "params.yaml").read_text())["status"]
        assert (status["state"], status["error"]) == words
    else:
        from drivetrain.callbacks.tracking.swanlab import records

        found = records(next((place.run / "swanlog").rglob("*.swanlab")))
        (end,) = [record["finish"] for record in found if "finish" in record]
        assert (end["state"], end["error"]) == ("RUN_STATE_ABORTED", words[1])


# What else each of them holds


def check_mlflow(place, run_id, native):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=place.uri)
    run = client.get_run(run_id)
    assert native.info.run_id == run_id and run.info.run_name == "run-0001"
    assert client.get_experiment(run.info.experiment_id).name == "project"
    assert (run.info.status, run.data.tags["error"]) == ("FAILED", "ValueError: no")  # L7
    assert run.data.params == {
        "optim/name": "adam", "optim/betas/0": "0.9", "optim/betas/1": "0.999", "layers/0/width": "4",
        "deep/er/x": "True", "more/0": "1", "more/1": "two",
    }  # fmt: skip
    assert run.data.tags["provenance.git/commit"] == "abc"
    assert run.data.tags["checkpoint.best"] == "checkpoints/checkpoint-000008"
    root = Path(place.folder / "artifacts" / run_id / "artifacts")
    assert json.loads((root / "config.json").read_text()) == session.CONFIG | {"more": [1, "two"]}
    assert (root / "notes.txt").read_text() == (root / "provenance" / "notes.txt").read_text() == "hello"
    assert (root / "checkpoints" / "checkpoint-000008" / "weights.bin").read_bytes() == b"\x00\x01"
    assert (root / "text" / "note" / "00000008.txt").read_text() == "good"
    assert_red(root / "images" / "digit" / "00000008.png")
    assert_blue(root / "figures" / "figure" / "00000008.png")
    assert (root / "audio" / "sound" / "00000008.wav").stat().st_size == 44 + 2 * 800
    assert frames(root / "videos" / "video" / "00000008.gif") == 2
    assert json.loads((root / "tables" / "table" / "00000008.json").read_text()) == {
        "columns": ["x", "y"], "data": [[1, 2.5], [2, 3.5]]
    }


def check_comet_ml(place, run_id, native):
    import zipfile

    from drivetrain.callbacks.tracking.comet import messages

    assert native.get_key() == run_id
    found = [message["payload"] for message in messages(place.run / "comet", run_id)]
    parameters = {}
    for payload in found:
        if "param" in payload:
            one = payload["param"]
            parameters[one["paramName"]] = one.get("paramValue", payload.get("params"))
    assert {"optim/name": "adam", "layers/0/width": "4", "more/1": "two"}.items() <= {
        name: str(value) for name, value in parameters.items()
    }.items()
    others = {payload["key"]: payload.get("value") for payload in found if "key" in payload}
    assert (others["status"], others["error"], others["checkpoint/best"]) == ("failed", "ValueError: no", "checkpoint-000008")
    assert others["provenance/git/commit"] == "abc"
    (archive,) = [path for path in (place.run / "comet").glob("*.zip") if zipfile.ZipFile(path).namelist()]
    files = {}
    with zipfile.ZipFile(archive) as opened:
        for payload in found:
            if "file_path" in payload and payload["file_path"] in opened.namelist():
                name = payload["additional_params"].get("fileName") or payload["additional_params"].get("figName")
                files[name] = opened.read(payload["file_path"])
    assert files["notes.txt"] == files["provenance/notes.txt"] == b"hello"
    assert files["checkpoints/checkpoint-000008/weights.bin"] == b"\x00\x01"
    assert len(files["sound.wav"]) == 44 + 2 * 800
    assert any(name and name.startswith("digit") for name in files), list(files)


def check_wandb(place, run_id, native):
    from drivetrain.callbacks.tracking.wandb import _records, files

    assert native.id == run_id
    (path,) = [path for path in files(place.run / "wandb", run_id) if list(path.parent.rglob("digit*"))]
    records = list(_records(path.read_bytes()))
    config, summary, exits = {}, {}, []
    for record in records:
        kind = record.WhichOneof("record_type")
        updates = {"config": record.config, "run": record.run.config}.get(kind)
        for item in updates.update if updates is not None else ():
            config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        for item in record.summary.update if kind == "summary" else ():
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        exits += [record.exit.exit_code] if kind == "exit" else []
    assert {name: config[name] for name in session.CONFIG} == session.CONFIG and config["more"] == [1, "two"]
    assert config["provenance"]["git"]["commit"] == "abc"
    assert exits == [1] and summary["error"] == "ValueError: no"
    media = path.parent / "files" / "media"
    assert_red(next((media / "images").glob("digit*.png")))
    assert_blue(next((media / "images").glob("figure*.png")))
    assert next((media / "audio").glob("sound*.wav")).stat().st_size == 44 + 2 * 800
    assert frames(next((media / "videos").glob("video*.gif"))) == 2
    table = json.loads(next((media / "table").glob("table*.json")).read_text())
    assert table["columns"] == ["x", "y"] and table["data"] == [[1, 2.5], [2, 3.5]]
    rows = place.rows(run_id)
    assert rows["note"] == [(8, "good")] and rows["weights/_type"] == [(8, "histogram")]
    artifacts = [r.request.log_artifact.artifact for r in records if r.request.WhichOneof("request_type") == "log_artifact"]
    artifacts += [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
    assert {(one.name, one.type) for one in artifacts} >= {("notes.txt", "file"), (f"model-{run_id}", "model")}


def test_parts_of_a_wandb_run_that_began_within_one_second(tmp_path):
    from drivetrain.callbacks.tracking.wandb import files

    names = ("offline-run-20261130_151745-abc-1/run-abc", "offline-run-20261130_151745-abc/run-abc")
    for name in (*names, "offline-run-20261130_151745-abc-2/run-abc-2", "offline-run-20261130_151745-xabc/run-xabc"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.wandb").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in files(tmp_path, "abc")] == [
        f"{name}.wandb" for name in reversed(names)
    ]


def check_trackio(place, run_id, native):
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR

    assert native.id == run_id
    config = SQLiteStorage.get_run_config("project", run_id=run_id)
    assert {name: config[name] for name in session.CONFIG} == session.CONFIG and config["more"] == [1, "two"]
    assert config["provenance"]["git"]["commit"] == "abc"
    alerts = [(alert["title"], alert["text"]) for alert in SQLiteStorage.get_alerts("project")]  # of all tests' runs
    assert ("failed", "ValueError: no") in alerts
    rows = {name: values[0][1] for name, values in place.rows(run_id).items() if name not in EXPECTED}
    assert rows["note"] == "good" and rows["table"]["_value"] == [{"x": 1, "y": 2.5}, {"x": 2, "y": 3.5}]
    kept = Path(TRACKIO_DIR) / "media"
    assert_red(kept / rows["digit"]["file_path"])
    assert_blue(kept / rows["figure"]["file_path"])
    assert (kept / rows["sound"]["file_path"]).stat().st_size == 44 + 2 * 800
    assert frames(kept / rows["video"]["file_path"]) == 2
    assert sum(rows["weights"]["values"]) == 10


def check_aim(place, run_id, native):
    run = readers.aim_run(place.run, run_id)
    assert native.hash == run_id and run.name == "run-0001"
    assert run["hparams"] == session.CONFIG | {"more": [1, "two"]}
    assert run["status"] == {"state": "failed", "error": "ValueError: no"}
    assert run["provenance"] == {"command": "train.py", "git": {"commit": "abc"}}
    assert run["checkpoints"] == {"best": "checkpoints/checkpoint-000008"}
    from aim.storage.context import Context

    plain = Context({})
    assert run.get_text_sequence("note", plain).values.first_value().data == "good"
    image = run.get_image_sequence("digit", plain).values.first_value()
    assert np.asarray(image.to_pil_image().convert("RGB")).tolist() == RED.tolist()
    assert run.get_image_sequence("figure", plain).values.first_value().size == (100, 50)
    assert run.get_distribution_sequence("weights", plain).values.first_value().weights.sum() == 10
    assert run.get_audio_sequence("sound", plain).values.first_value().json()["format"] == "wav"
    files = {name: Path(artifact.uri.removeprefix("file://")) for name, artifact in run.artifacts.items()}
    assert files["notes.txt"].read_text() == "hello"
    assert files["checkpoints/checkpoint-000008/weights.bin"].read_bytes() == b"\x00\x01"


def check_dvclive(place, run_id, native):
    import yaml

    folder = place.run / "dvclive"
    parameters = yaml.safe_load((folder / "params.yaml").read_text())
    assert Path(native.dir) == folder and {name: parameters[name] for name in session.CONFIG} == session.CONFIG
    assert parameters["more"] == [1, "two"] and parameters["provenance"]["git"]["commit"] == "abc"
    assert parameters["status"] == {"state": "failed", "error": "ValueError: no"}
    assert json.loads((folder / "metrics.json").read_text())["loss"] == 1.0
    assert place.rows(run_id)["note"] == [(8, "good")]
    assert_red(folder / "plots" / "images" / "digit" / "8.png")
    assert_blue(folder / "plots" / "images" / "figure" / "8.png")
    assert json.loads((folder / "plots" / "custom" / "table.json").read_text()) == [{"x": 1, "y": 2.5}, {"x": 2, "y": 3.5}]
    assert (folder / "artifacts" / "notes" / "notes.txt").read_text() == "hello"
    assert (folder / "artifacts" / "checkpoint-000008" / "weights.bin").read_bytes() == b"\x00\x01"


def check_swanlab(place, run_id, native):
    import yaml

    from drivetrain.callbacks.tracking.swanlab import records

    assert native.id == run_id
    folder = Path(native.dir)
    config = yaml.safe_load((folder / "files" / "config.yaml").read_text())
    values = {name: config[name]["value"] if "value" in config[name] else config[name] for name in (*session.CONFIG, "more")}
    assert values == session.CONFIG | {"more": [1, "two"]}
    found = list(records(next(folder.glob("*.swanlab"))))
    (end,) = [record["finish"] for record in found if "finish" in record]
    assert (end["state"], end["error"]) == ("RUN_STATE_CRASHED", "ValueError: no")
    assert {record["media"]["key"] for record in found if "media" in record} >= {"note", "digit", "figure", "video", "table"}
    assert (folder / "saved" / "notes.txt").read_text() == "hello"
    assert (folder / "saved" / "checkpoints" / "checkpoint-000008" / "weights.bin").read_bytes() == b"\x00\x01"
    assert (folder / "saved" / "audio" / "sound" / "00000008.wav").stat().st_size == 44 + 2 * 800


CHECKS = {name: globals()[f"check_{name}"] for name in NAMES}


def assert_red(path):
    from PIL import Image

    assert np.asarray(Image.open(path).convert("RGB")).tolist() == RED.tolist()


def assert_blue(path):
    from PIL import Image

    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert pixels.shape == (50, 100, 3) and (pixels == [0, 0, 255]).all()


def frames(path):
    from PIL import Image

    return Image.open(path).n_frames
