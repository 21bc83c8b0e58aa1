"""Checkpoints that somebody made to do harm: signed rightly, as anybody can who knows the format. None runs anything.

Each case would leave the file `ran` if code of its choice ran. Damaged ones are in test_damage.py, other people's pickles
in tests/trainer/cli/test_imports.py, hostile indexes of torch's sharded checkpoints in test_merging.py.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import struct
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_64_hexdigest

from drivetrain import ModelCheckpoint
from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer, complete, decode, newest, save_weights
from drivetrain.strategies.checkpoint.state import _KINDS
from drivetrain.tests.loop.models import Line, loader, quiet
from drivetrain.tests.strategies.checkpoint.samples import forked, save

CK = Path("runs/checkpoint-1")


class Attack:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def signed(files: dict[str, bytes], **metadata: object) -> None:
    """Write a checkpoint of these files with a right manifest."""
    with Writer(CK) as writer:
        for name, data in files.items():
            (writer.folder / name).write_bytes(data)
            writer.adopt(name)
        writer.commit(metadata)


def resigned(change) -> None:
    """Change the manifest's text, and put the right checksum below it."""
    text = change((CK / "manifest.json").read_text())
    body = text.rpartition('"checksum"')[0].encode()
    (CK / "manifest.json").write_bytes(body + f'"checksum": "{xxh3_64_hexdigest(body)}"\n}}\n'.encode())


@pytest.mark.parametrize("name", ["model.safetensors", "training.json", "optimizer-0.safetensors", "rank-00000.json"])
def test_a_pickle_under_any_name_is_no_more_than_a_wrong_file(name):
    module = Line()
    callbacks = [ModelCheckpoint(dirpath="good", every_n_train_steps=1)]
    trainer = quiet(max_steps=1, callbacks=callbacks, enable_checkpointing=None)
    trainer.fit(module, loader(4))
    good = Path(callbacks[0].best_model_path)
    files = {path.name: path.read_bytes() for path in good.iterdir() if path.name != "manifest.json"}
    for pickled in (pickle.dumps(Attack()), pickle.dumps(Attack(), 0)):
        manifest = Checkpoint.open(good).manifest
        signed({**files, name: pickled}, run_id=manifest["run_id"], step=1, epoch=0, samples=2, world_size=1)
        fresh = Line()
        with pytest.raises(CheckpointError, match=name.partition(".")[0]):
            quiet(max_steps=2).fit(fresh, loader(4), ckpt_path=str(CK))
        assert not Path("ran").exists() and fresh.layer.weight.item() == 0.5  # and nothing of it was taken


def test_a_key_that_stands_twice_is_refused():
    """Two readers might take different ones: what one has verified the other would not load."""
    save(CK, 1)
    name = '"training.json"'
    resigned(lambda text: text.replace(f" {name}", f' {name}: {{"size": 1, "xxh3_64": "0"}},\n  {name}', 1))
    with pytest.raises(CheckpointError, match="stands twice"):
        Checkpoint.open(CK)
    record = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f"{{{record},{record}}}".encode()
    signed({"model.safetensors": struct.pack("<Q", len(header)) + header + b"\0"})
    with pytest.raises(CheckpointError, match="stands twice"):
        Checkpoint.open(CK).tensors("model.safetensors")


@pytest.mark.parametrize("place", ["/etc/passwd", "../outside", "a/../../outside", "..", "a//b", ".hidden", "a\\b", "", "a/."])
def test_names_that_lead_out_of_the_folder_are_refused(place):
    Path("runs").mkdir()
    Path("runs/outside").write_bytes(b"secret")
    save(CK, 1)
    record = {"size": 6, "xxh3_64": xxh3_64_hexdigest(b"secret")}
    resigned(lambda text: text.replace('"files": {', f'"files": {{{json.dumps(place)}: {json.dumps(record)},', 1))
    with pytest.raises(CheckpointError, match="lists .* wrongly"):
        Checkpoint.open(CK)
    assert not complete(CK) and newest(CK.parent) is None


def test_numbers_that_are_absurd_take_no_memory_and_no_time():
    """In a process that may have 3 GB: a header that tells of more is refused, not believed."""
    texts = {
        "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
        "a header as long as it may be": struct.pack("<Q", 100_000_000) + b"{}",
        "a tensor of 2**62 bytes": _file({"a": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}}),
        "a tensor of 8 GB": _file({"a": {"dtype": "U8", "shape": [2**33], "data_offsets": [0, 2**33]}}),
        "nothing, 2**60 times": _file({"a": {"dtype": "U8", "shape": [2**60, 0], "data_offsets": [0, 0]}}),
        "depth": _file(b'{"a":' + b"[" * 200_000),
        "digits": _file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,1]}}'),
    }

    def read():
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[0],) * 2)
        for name, data in texts.items():
            signed({"model.safetensors": data})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                found = Checkpoint.open(CK).tensors("model.safetensors")
                assert all(tensor.numel() == 0 for tensor in found.values()), name
            except CheckpointError:
                pass
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, name  # kB

    assert forked(read) == 0


def _file(header: dict | bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def test_random_trees_of_state_give_plain_values_or_an_error():
    draw, refused = random.Random(1), 0
    leaves = [None, True, 0, -1, 2**63, 2**70, 1.5, 1e308, "", "x", "nan", "0x00", "0x" + "f" * 16, "../..", "cpu", "load",
              "cuda:99", "float32", "os", "<O8", "<f4", "<U1000000000", "(2,", "{", "1[", "YQ==", "!!!", "2020-01-01", "T",
              "\0", [], {}, [1, 2], [[1]], ["a", "<f4", [2]], ["<f4", "AAAAAA=="], [1e30, 0, 0], [2**70, 1], [-1, -1]]  # fmt: skip

    def tree(depth: int) -> object:
        if depth == 0 or draw.random() < 0.5:
            return draw.choice(leaves)
        kind = draw.random()
        if kind < 0.6:
            return {draw.choice([*_KINDS, "$reduce", "$object"]): tree(depth - 1)}
        return [tree(depth - 1), tree(depth - 1)] if kind < 0.8 else {"a": tree(depth - 1), "$tensor": tree(depth - 1)}

    tensors = {"a": torch.ones(2), "x": torch.ones(2, dtype=torch.bfloat16), "": torch.ones(1) * 1j}
    for _ in range(8000):
        try:
            decode({draw.choice([*_KINDS]): tree(3)}, tensors)
        except CheckpointError:
            refused += 1
    assert refused > 4000 and not Path("ran").exists()


def test_a_run_s_name_leads_nowhere_else(caplog):
    """The run that goes on writes into the folder of this name."""
    with Writer(CK) as writer:
        save_weights(writer, Line().state_dict())
        writer.commit({"run_id": "../../up", "step": 1})
    trainer = quiet(max_steps=1, logger="csv", default_root_dir="here/root")
    trainer.fit(Line(), loader(4), ckpt_path=str(CK))
    assert trainer.run_id == "run-0001" and "no name of a folder" in caplog.text
    assert sorted(os.listdir(".")) == ["here", "runs"] and os.listdir("here") == ["root"]


def test_what_a_callback_is_told_to_remove_is_its_own():
    """A checkpoint names what it replaced: only folders beside it count, and only checkpoints."""
    save(Path("elsewhere/checkpoint-5"), 5)
    callback = ModelCheckpoint(dirpath=CK.parent)
    state = callback.state_dict() | {"dirpath": str(CK.parent)}
    path = str(Path("elsewhere/checkpoint-5").absolute())
    state["kept"] = {**state["kept"], "doomed": {path: 1.0, "..": 1.0}, "scores": {path: 1.0}}
    callback.load_state_dict(state)
    assert callback._kept.doomed == {} and complete("elsewhere/checkpoint-5")
