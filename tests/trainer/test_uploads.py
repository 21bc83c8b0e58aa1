"""Checkpoints copied to S3 (moto's server on this machine) while a fit goes on, and fits that go on from there."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from moto.server import ThreadedMotoServer

from drivetrain import CheckpointUpload, ModelCheckpoint, Trainer
from drivetrain.strategies.checkpoint import CheckpointError, complete
from drivetrain.strategies.checkpoint.folders import hidden_folders
from drivetrain.strategies.checkpoint.remote import (
    checkpoints_at, complete_at, download, manifest_at, remove_at, upload, verify_at,
)  # fmt: skip
from drivetrain.tests.distributed import run
from drivetrain.tests.loop.models import Line, loader, quiet
from drivetrain.tests.strategies.checkpoint.samples import check, save

FOLDER = Path("runs/run-0001/checkpoints")


class Store:
    """A bucket on a server that can stop and start; what it holds stays."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]
        self.options = {
            "key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{self.port}", "use_listings_cache": False,
            "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 5, "read_timeout": 20},
        }  # fmt: skip
        self.system = fsspec.filesystem("s3", **self.options)

    def start(self) -> None:
        self.server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self.server.start()

    def new(self, name: str) -> str:
        """Make a bucket; return its URL."""
        self.system.mkdir(name)
        return f"s3://{name}"


@pytest.fixture(scope="module")
def store():
    found = Store()
    yield found
    found.server.stop()


@pytest.fixture
def bucket(store, request):
    return store.new(f"b{abs(hash(request.node.name))}")


def fit(url, store, steps=3, *, resume=None, model=None, **options):
    """Train so many steps, each saved and copied; return module and trainer."""
    module = model or Line()
    callbacks = [
        ModelCheckpoint(every_n_train_steps=1, **options),
        CheckpointUpload(url, storage_options=store.options),
    ]
    trainer = quiet(max_steps=steps, seed=1, callbacks=callbacks, enable_checkpointing=None)
    trainer.fit(module, loader(24, shuffle=True), resume=resume)
    return module, trainer


def weights(module):
    return [tensor.clone() for tensor in module.state_dict().values()]


def test_there_and_back(store, bucket, tmp_path):
    options = {"storage_options": store.options}
    save(tmp_path / "one", 1)
    url = f"{bucket}/runs/checkpoint-1"
    assert not complete_at(url, **options)
    upload(tmp_path / "one", url, **options)
    assert complete_at(url, **options) and verify_at(url, **options) == []
    check(download(url, tmp_path / "back", **options), 1)
    store.system.rm_file(f"{url}/manifest.json")
    assert not complete_at(url, **options) and checkpoints_at(f"{bucket}/runs", **options) == []
    upload(tmp_path / "one", url, **options)
    data = store.system.cat_file(f"{url}/model.safetensors")
    store.system.pipe_file(f"{url}/model.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    assert "model.safetensors: is damaged" in verify_at(url, **options)[0]
    remove_at(url, **options)
    assert store.system.find(bucket) == []
    remove_at(url, **options)


def test_a_new_machine_goes_on_from_the_copy(store, bucket):
    """What lies here is lost; the same command goes on, and ends as the run that was not interrupted."""
    whole, _ = fit(f"{bucket}/whole", store, 6)
    shutil.rmtree("runs")
    url = f"{bucket}/run"
    fit(url, store, 3)
    assert checkpoints_at(url, storage_options=store.options) == [f"{url}/checkpoint-000003"]
    shutil.rmtree("runs")
    module, trainer = fit(url, store, 6, resume="last")
    assert len(module.seen) == 3 and trainer.global_step == 6
    assert all(map(torch.equal, weights(module), weights(whole)))
    assert checkpoints_at(url, storage_options=store.options) == [f"{url}/checkpoint-000006"]
    assert [path.name for path in FOLDER.iterdir()] == ["checkpoint-000006"] and not hidden_folders(FOLDER)


def test_a_checkpoint_or_its_folder_is_named_by_its_url(store, bucket, monkeypatch):
    fit(f"{bucket}/run", store, 3, save_top_k=-1)
    assert len(checkpoints_at(f"{bucket}/run", storage_options=store.options)) == 3
    for name, value in (("FSSPEC_S3_KEY", "a"), ("FSSPEC_S3_SECRET", "b"), ("AWS_DEFAULT_REGION", "us-east-1"),
                        ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"),
                        ("AWS_ENDPOINT_URL", store.options["endpoint_url"])):  # fmt: skip
        monkeypatch.setenv(name, value)
    shutil.rmtree("runs")
    for place, step in ((f"{bucket}/run", 3), (f"{bucket}/run/checkpoint-000002", 2)):
        trainer = quiet(max_steps=4)
        trainer.fit(Line(), loader(24), ckpt_path=place)
        assert (FOLDER / f"checkpoint-00000{step}").is_dir() and trainer.global_step == 4
    with pytest.raises(FileNotFoundError, match="has no manifest.json"):
        quiet(max_steps=4).fit(Line(), loader(24), ckpt_path=f"{bucket}/nowhere")


def test_what_is_removed_here_is_copied_all_the_same_and_then_removed_there(memory, monkeypatch):
    """Copies that take longer than several saves: the last one is complete, none went too early, none piles up."""
    first, go, order = threading.Event(), threading.Event(), []
    put, remove = memory.put_file, memory.rm_file

    def slow(lpath, rpath, **options):
        order.append(("put", rpath.split("/")[-2:]))
        first.set()
        assert go.wait(200)
        put(lpath, rpath, **options)

    def noted(path):
        order.append(("rm", path.split("/")[-2:]))
        remove(path)

    monkeypatch.setattr(type(memory), "put_file", lambda self, *args, **options: slow(*args, **options))
    monkeypatch.setattr(type(memory), "rm_file", lambda self, path: noted(path))

    class Watching(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step == 4:
                assert first.wait(200) and not (FOLDER / "checkpoint-000001").exists()
                go.set()

    callbacks = [ModelCheckpoint(every_n_train_steps=1), CheckpointUpload("memory://run")]
    quiet(max_steps=4, callbacks=callbacks, enable_checkpointing=None).fit(Watching(), loader(24))
    assert checkpoints_at("memory://run") == ["memory://run/checkpoint-000004"]
    manifests = [(kind, names[0]) for kind, names in order if names[1] == "manifest.json"]
    assert manifests[0] == ("put", "checkpoint-000001") and ("put", "checkpoint-000002") not in manifests
    assert manifests.index(("put", "checkpoint-000004")) < len(manifests) and not hidden_folders(FOLDER)
    copied = [name for kind, name in manifests if kind == "put"]
    for name in copied[:-1]:
        assert manifests.index(("put", copied[copied.index(name) + 1])) < manifests.index(("rm", name))


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def closed():
    """Options of a server that is not there."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
        options = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{port}",
                   "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2}}  # fmt: skip
        yield options


class Slow(Line):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def test_a_failure_is_raised_at_a_later_step(closed):
    module = Slow()
    callbacks = [ModelCheckpoint(every_n_train_steps=1), CheckpointUpload("s3://away/run", storage_options=closed)]
    trainer = quiet(max_steps=3000, callbacks=callbacks, enable_checkpointing=None)
    with pytest.raises(CheckpointError, match="Could not copy .*checkpoint-0.* to s3://away/run"):
        trainer.fit(module, loader(24))
    assert 1 <= trainer.global_step < 3000 and not hidden_folders(FOLDER)
    assert complete(trainer.checkpoint_callback.best_model_path)  # what was saved here stays


def test_a_failure_of_the_last_copy_is_raised_by_fit(closed):
    callbacks = [ModelCheckpoint(every_n_train_steps=1), CheckpointUpload("s3://away/run", storage_options=closed)]
    with pytest.raises(CheckpointError, match="Could not copy .*checkpoint-000001 to s3://away/run"):
        quiet(max_steps=1, callbacks=callbacks, enable_checkpointing=None).fit(Line(), loader(24))


def test_a_server_that_dies_in_the_middle_leaves_the_copy_before(store, bucket, tmp_path, monkeypatch):
    options = {"storage_options": {**store.options, "skip_instance_cache": True}}
    save(tmp_path / "one", 1)
    save(tmp_path / "two", 2)
    upload(tmp_path / "one", f"{bucket}/one", **options)
    count, put = [0], type(store.system)._put_file

    async def dying(self, *args, **kwargs):
        count[0] += 1
        if count[0] == goal:
            store.server.stop()
        return await put(self, *args, **kwargs)

    monkeypatch.setattr(type(store.system), "_put_file", dying)
    for goal in (3, 4):
        count[0] = 0
        with pytest.raises(CheckpointError, match="Could not copy .*two to s3://"):
            upload(tmp_path / "two", f"{bucket}/two", **options)
        with pytest.raises(CheckpointError, match="Could not list"):
            checkpoints_at(bucket, **options)
        store.start()
        assert checkpoints_at(bucket, **options) == [f"{bucket}/one"]
        assert not complete_at(f"{bucket}/two", **options)
    count[0] = goal = 10
    upload(tmp_path / "two", f"{bucket}/two", **options)
    assert checkpoints_at(bucket, **options) == [f"{bucket}/two", f"{bucket}/one"]


def test_wrong_credentials_are_told(store, bucket, tmp_path, monkeypatch):
    """moto knows no users, so what a server says to a wrong key is said here by its client."""
    save(tmp_path / "one", 1)

    async def refused(self, *args, **kwargs):
        raise PermissionError("The AWS Access Key Id you provided does not exist in our records.")

    monkeypatch.setattr(type(store.system), "_call_s3", refused)
    options = {"storage_options": store.options}
    for action in (
        lambda: remove_at(f"{bucket}/one", **options),
        lambda: upload(tmp_path / "one", f"{bucket}/one", **options),
        lambda: download(f"{bucket}/one", tmp_path / "back", **options),
        lambda: checkpoints_at(bucket, **options),
        lambda: manifest_at(f"{bucket}/one", **options),
        lambda: quiet(max_steps=1, callbacks=[CheckpointUpload(bucket, **options)]).fit(
            Line(), loader(4), resume="last"
        ),
    ):
        with pytest.raises(CheckpointError, match="Access Key Id you provided does not exist"):
            action()


def test_two_ranks_copy_once_and_go_on_together(store, bucket):
    def job(rank, steps, resume):
        module, trainer = fit(f"{bucket}/run", store, steps, resume=resume)
        return module.seen, trainer.global_step

    run(job, 2, 2, None)
    shutil.rmtree("runs")
    results = run(job, 2, 4, "last")
    assert [step for _, step in results] == [4, 4] and all(len(seen) == 2 for seen, _ in results)
    assert checkpoints_at(f"{bucket}/run", storage_options=store.options) == [f"{bucket}/run/checkpoint-000004"]


def test_what_is_no_place_is_refused():
    for url in ("run", "s3://", 3):
        with pytest.raises(ValueError, match="Expected a URL"):
            CheckpointUpload(url)
    with pytest.raises(ValueError, match="CheckpointUpload"):
        Trainer(default_root_dir="s3://bucket/run")
    with pytest.raises(CheckpointError, match="a place that fsspec knows"):
        checkpoints_at("nothing://x")
    assert not complete_at("nothing://x") and not os.path.exists("nothing:")


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_fit_that_ends_by_an_exception_has_copied_what_it_saved(memory, error):
    class Failing(Line):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 3:
                raise error
            return super().training_step(batch, batch_idx)

    callbacks = [ModelCheckpoint(every_n_train_steps=1), CheckpointUpload("memory://run")]
    with pytest.raises(error):
        quiet(max_steps=5, callbacks=callbacks, enable_checkpointing=None).fit(Failing(), loader(24))
    assert checkpoints_at("memory://run")[0] == "memory://run/checkpoint-000003"
    assert complete_at("memory://run/checkpoint-000003")


def test_a_state_that_names_other_places_removes_nothing_there(memory):
    """What a checkpoint says that it has copied may have been written by anybody."""
    upload_callback = CheckpointUpload("memory://run")
    upload_callback.load_state_dict({"sent": {"../other/checkpoint-1": "t", "..": "t", "checkpoint-1": "t"}})
    assert list(upload_callback.state_dict()["sent"]) == ["checkpoint-1"]
