"""Every damaged byte is refused: each bit of a small checkpoint, truncation at each length, and random mutations."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer, complete, load_weights, newest
from drivetrain.tests.strategies.checkpoint.samples import same, save

CK = Path("runs/checkpoint-2")
STATE = {"lr": 0.1, "moments": {0: torch.arange(5.0)}, "name": "x"}


def make(directory: Path = CK, step: int = 2) -> dict[str, bytes]:
    """Write a tiny checkpoint; return its files."""
    with Writer(directory) as writer:
        writer.tensors("model.safetensors", {"w": torch.arange(7.0), "b": torch.ones(3, dtype=torch.int8)})
        writer.state("training", STATE)
        writer.commit({"step": step, "samples": 17})
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def load(directory: Path, verify: bool) -> tuple:
    """Return everything in a checkpoint."""
    checkpoint = Checkpoint.open(directory, verify=verify)
    return checkpoint.manifest, load_weights(checkpoint), checkpoint.state("training")


def refused(name: str) -> None:
    """Assert that CK is refused, by the name of the damaged file, however it is read."""
    for verify in (True, False):
        with pytest.raises(CheckpointError) as error:
            load(CK, verify)
        assert name in str(error.value)


def test_C3_every_flipped_bit_is_found():
    """One bit of each byte, and all bits of some."""
    files = make()
    tried = 0
    for name, good in files.items():
        for position in range(len(good)):
            for bit in range(8) if position % 32 == 0 else [position % 8]:
                bad = bytearray(good)
                bad[position] ^= 1 << bit
                (CK / name).write_bytes(bad)
                with pytest.raises(CheckpointError) as error:
                    load(CK, verify=False)
                assert name in str(error.value)
                tried += 1
        (CK / name).write_bytes(good)
    load(CK, verify=True)
    assert tried > 1000
    print(f"{tried} flipped bits, all found")


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "training.json", "training.safetensors"])
def test_C3_truncated_lengthened_missing_or_something_else(name):
    good = make()[name]
    for length in range(len(good)):
        (CK / name).write_bytes(good[:length])
        refused(name)
        assert not complete(CK)
    for more in (b"\0", b"\n", b" " * 100, good):
        (CK / name).write_bytes(good + more)
        refused(name)
    (CK / name).unlink()
    refused(name)
    (CK / name).mkdir()
    refused(name)


def test_C3_resuming_takes_the_one_before(caplog):
    make(CK.with_name("checkpoint-1"), 1)
    files = make()
    for name, good in files.items():
        for damage in (good[:-1], good[:-1] + bytes([good[-1] ^ 4]), None):
            (CK / name).unlink() if damage is None else (CK / name).write_bytes(damage)
            caplog.clear()
            assert newest(CK.parent) == CK.with_name("checkpoint-1")
            assert len(caplog.records) == 1 and name in caplog.text
            (CK / name).write_bytes(good)
    assert newest(CK.parent) == CK


def test_C3_random_mutations_are_refused_or_change_nothing():
    make()
    manifest, weights, state = load(CK, verify=True)
    spare, draw, counts = Path("spare"), random.Random(0), {"refused": 0, "unchanged": 0}
    shutil.copytree(CK, spare)
    for _ in range(1000):
        shutil.rmtree(CK)
        shutil.copytree(spare, CK)
        for _ in range(draw.choice([1, 1, 1, 3])):
            mutate(CK, draw)
        try:
            found = load(CK, verify=draw.random() < 0.5)
        except CheckpointError:
            counts["refused"] += 1
            continue
        assert same(found, (manifest, weights, state))
        counts["unchanged"] += 1
    assert counts["refused"] > 900
    print(counts)


def mutate(directory: Path, draw: random.Random) -> None:
    """Do something to a file of a checkpoint that disks, copies and people do."""
    paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    if not paths:
        return
    path, other = draw.choice(paths), draw.choice(paths)
    data = bytearray(path.read_bytes())
    position = draw.randrange(len(data) or 1)
    kind = draw.randrange(13)
    if kind == 0 and data:
        data[position] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[position:]
    elif kind == 2:
        data += draw.randbytes(draw.randrange(1, 50))
    elif kind == 3:
        data[position : position + 16] = bytes(len(data[position : position + 16]))  # a hole
    elif kind == 4:
        data[position : position + 8] = draw.randbytes(len(data[position : position + 8]))
    elif kind == 5:
        del data[position : position + draw.randrange(1, 9)]
    elif kind == 6:
        data[position:position] = data[position : position + 5]  # a piece twice
    elif kind == 7:
        data = bytearray(other.read_bytes())
    elif kind == 8:
        data = bytearray(draw.randbytes(len(data)))
    elif kind == 9 and len(data) > 4:
        data[position], data[-position] = data[-position], data[position]
    elif kind == 10:
        path.unlink()
        return
    elif kind == 11:
        path.rename(directory / "elsewhere")
        return
    elif kind == 12:
        path.unlink()
        path.symlink_to(other.name)
        return
    path.write_bytes(data)


def test_files_of_two_checkpoints_do_not_mix():
    """Every file whole, but not of one save: a copy that was interrupted and gone on with."""
    files = make()
    other = make(Path("runs/checkpoint-3"), 3)
    changed = [name for name in files if files[name] != other[name]]
    assert changed == ["manifest.json"]  # same content otherwise: nothing to be mixed up
    save(Path("runs/checkpoint-4"), 4)
    for name in ("model.safetensors", "training.json"):
        shutil.copy(Path("runs/checkpoint-4") / name, CK / name)
        refused(name)
        (CK / name).write_bytes(files[name])


def test_hostile_files_with_right_hashes_run_nothing():
    """Somebody who knows the format can sign anything; loading it still only makes plain values, or raises."""
    for content in (b"\x80\x04\x95", b'{"$tensor": "x"}', b'{"$reduce": ["os.system", "touch owned"]}', b"[" * 50_000,
                    b"1e999", b'{"$device": "cpu", "$path": "x"}', b"\xff\xfe"):  # fmt: skip
        with Writer(CK) as writer:
            (writer.folder / "training.json").write_bytes(content)
            writer.adopt("training.json")
            (writer.folder / "model.safetensors").write_bytes(content)
            writer.adopt("model.safetensors")
            writer.commit()
        checkpoint = Checkpoint.open(CK)
        with pytest.raises(CheckpointError, match="model.safetensors"):
            checkpoint.tensors("model.safetensors")
        try:
            value = checkpoint.state("training")
        except CheckpointError:
            continue
        assert value == json.loads(content)
    assert not os.path.exists("owned")
