"""`drivetrain checkpoint`: inspect, verify, diff, convert, prune."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from drivetrain import ModelCheckpoint
from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer, load_weights, save_weights
from drivetrain.strategies.checkpoint.remote import upload
from drivetrain.strategies.checkpoint.sharded import save_sharded, save_sharded_state
from drivetrain.strategies.world import current
from drivetrain.tests.distributed import run
from drivetrain.tests.loop.models import Line, loader, quiet
from drivetrain.tests.strategies.checkpoint.samples import forked
from drivetrain.trainer.cli.main import main
from safetensors.torch import load_file

C = Path("runs/run-0001/checkpoints")


class Kept(Line):
    """A line whose hyperparameters are saved."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


def trained(steps: int = 3) -> Kept:
    """Train so many steps, and keep a checkpoint of each."""
    module = Kept(lr=0.25)
    saves = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    quiet(max_steps=steps, callbacks=[saves], enable_checkpointing=None).fit(module, loader(12))
    return module


def told(capsys: pytest.CaptureFixture, *args: object, code: int = 0) -> str:
    """Run `drivetrain checkpoint ARGS`, assert its status, return what it printed."""
    assert main(["checkpoint", *map(str, args)]) == code
    out, err = capsys.readouterr()
    return out + err


def damage(path: Path, position: int = -1) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_inspect_tells_counters_hyperparameters_files_and_tensors(capsys):
    trained()
    text = told(capsys, "inspect", C / "checkpoint-000002")
    words = " ".join(text.split())
    for said in ("step 2", "epoch 0", "samples 4", "strategy single", "world size 1", "run run-0001", "lr 0.25"):
        assert said in words, said
    assert "layer.weight float32 [1, 1] 4 B" in words and "layer.bias float32 [1] 4 B" in words
    assert "model.safetensors: 2 tensors, 2 elements" in text and "training.json" in text
    assert "words" not in text  # the random states' tensors are listed with --all only
    assert "rank-00000.random.python.words" in told(capsys, "inspect", "--all", C / "checkpoint-000002")


def test_inspect_as_json(capsys):
    trained(1)
    found = json.loads(told(capsys, "inspect", "--json", C / "checkpoint-000001"))
    assert (found["step"], found["hparams"], found["world_size"]) == (1, {"lr": 0.25}, 1)
    assert found["tensors"]["model.safetensors"]["layer.weight"] == {"dtype": "float32", "shape": [1, 1], "bytes": 4}


def test_inspect_lists_a_folder_with_damaged_ones(capsys):
    trained()
    damage(C / "checkpoint-000002" / "manifest.json", 40)
    lines = told(capsys, "inspect", C).splitlines()
    assert [" step 1," in lines[0], "damaged" in lines[1], " step 3," in lines[2]] == [True] * 3


def test_verify_names_the_file_of_every_damaged_byte(capsys):
    trained(1)
    folder = C / "checkpoint-000001"
    assert "whole" in told(capsys, "verify", folder)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for position in range(0, len(good), 1 if len(good) < 500 else 97):
            damage(path, position)
            assert path.name in told(capsys, "verify", folder, code=1), position
            path.write_bytes(good)
        path.unlink()
        assert path.name in told(capsys, "verify", folder, code=1)
        path.write_bytes(good)
    assert "whole" in told(capsys, "verify", folder)


def test_verify_a_folder_names_all_damage(capsys):
    trained()
    damage(C / "checkpoint-000001" / "model.safetensors")
    (C / "checkpoint-000003" / "training.json").unlink()
    text = told(capsys, "verify", C, code=1)
    assert "checkpoint-000002: whole" in text and text.count(": damaged\n") == 2
    assert "checkpoint-000001/model.safetensors" in text and "checkpoint-000003/training.json: is missing" in text


def test_diff_tells_tensors_and_counters_by_name_and_amount(capsys):
    for name, weight, step in (("a", 1.0, 1), ("b", 1.5, 2)):
        with Writer(name) as writer:
            save_weights(writer, {"w": torch.tensor([1.0, 2.0, weight]), "same": torch.ones(2), name: torch.ones(1)})
            writer.state("training", {"schedulers": [{"last_epoch": step}], "elapsed": float(step)})
            writer.commit({"step": step})
    assert told(capsys, "diff", "a", "b", code=1).splitlines() == [
        "step: 1 → 2",
        "model: w: 1 of 3 elements differ, by 0.5 at most (0.25 of the largest)",
        "model: a: only in the first",
        "model: b: only in the second",
        "training: schedulers[0].last_epoch: 1 → 2",
    ]
    assert told(capsys, "diff", "a", "a") == "no difference\n"


def test_diff_of_one_step(capsys):
    trained()
    text = told(capsys, "diff", C / "checkpoint-000001", C / "checkpoint-000002", code=1)
    assert "model: layer.weight: 1 of 1 elements differ" in text and "progress.step: 1 → 2" in text


def test_convert_to_a_plain_folder(capsys):
    module = trained(2)
    told(capsys, "convert", C / "checkpoint-000002", "plain")
    assert [path.name for path in Path("plain").iterdir()] == ["model.safetensors"]
    weights = load_file("plain/model.safetensors")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        name: tensor.tolist() for name, tensor in module.state_dict().items()
    }
    damage(C / "checkpoint-000002" / "model.safetensors")
    assert "model.safetensors" in told(capsys, "convert", C / "checkpoint-000002", "other", code=1)
    assert not Path("other").exists()


def test_convert_in_shards(capsys):
    with Writer("large") as writer:
        save_weights(writer, {f"w{i}": torch.full((300,), float(i)) for i in range(3)})
        writer.commit()
    told(capsys, "convert", "large", "plain", "--max-shard-size", "2KB")
    found = load_weights("plain", foreign=True)
    assert len(list(Path("plain").glob("*.safetensors"))) == 3
    assert [found[f"w{i}"][0].item() for i in range(3)] == [0.0, 1.0, 2.0]


def test_convert_from_lightning_starts_a_fit(capsys):
    wanted = {"layer.weight": torch.tensor([[2.5]]), "layer.bias": torch.tensor([0.5])}
    content = {"state_dict": wanted, "epoch": 3, "global_step": 40, "pytorch-lightning_version": "2.5.0",
               "hyper_parameters": {"lr": 0.125}, "callbacks": {}}  # fmt: skip
    torch.save(content, "epoch=3.ckpt")
    assert "2 tensors" in told(capsys, "convert", "epoch=3.ckpt", "imported", "--from", "lightning")
    manifest = Checkpoint.open("imported").manifest
    assert (manifest["step"], manifest["epoch"], manifest["hparams"]) == (40, 3, {"lr": 0.125})
    assert Kept.load_from_checkpoint("imported").lr == 0.125
    module = Kept(lr=0.0)
    quiet(max_steps=1).fit(module, loader(4), ckpt_path="imported")
    assert module.layer.weight.item() == 2.5


class Dangerous:
    """Runs code when it is unpickled by pickle itself."""

    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("kind", ["lightning", "accelerate"])
def test_convert_runs_nothing_of_a_hostile_file(capsys, kind):
    Path("state").mkdir()
    source = Path("x.ckpt" if kind == "lightning" else "state/pytorch_model.bin")
    torch.save({"state_dict": {"w": torch.ones(1)}, "callbacks": Dangerous()}, source)
    text = told(capsys, "convert", source if kind == "lightning" else "state", "out", "--from", kind, code=1)
    assert "Expected tensors and plain values" in text and not Path("ran").exists() and not Path("out").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_convert_from_accelerate(capsys, safe):
    Path("state").mkdir()
    for name, value in (("", 2.0), ("_1", 3.0)):
        weights = {"w": torch.full((2,), value)}
        if safe:
            save_weights("state", weights, name=f"model{name}")
        else:
            torch.save(weights, f"state/pytorch_model{name}.bin")
    Path("state/sampler.bin").write_bytes(b"not read")
    told(capsys, "convert", "state", "imported", "--from", "accelerate")
    checkpoint = Checkpoint.open("imported")
    assert [load_weights(checkpoint, name=n)["w"].tolist() for n in ("model", "model_1")] == [[2.0] * 2, [3.0] * 2]


def test_convert_says_what_it_was_given(capsys):
    Path("empty").mkdir()
    Path("junk.ckpt").write_bytes(b"junk")
    assert "--from lightning" in told(capsys, "convert", "junk.ckpt", "out", code=1)
    assert "junk.ckpt" in told(capsys, "convert", "junk.ckpt", "out", "--from", "lightning", code=1)
    assert "neither model.safetensors" in told(capsys, "convert", "empty", "out", "--from", "accelerate", code=1)
    assert "--from accelerate" in told(capsys, "convert", "empty", "out", code=1)
    assert not Path("out").exists()


def test_prune_keeps_the_newest_whole_ones_and_what_links_point_to(capsys):
    trained(6)
    damage(C / "checkpoint-000006" / "model.safetensors")
    (C / "mine").symlink_to("checkpoint-000002")
    before = sorted(path.name for path in C.iterdir())
    assert told(capsys, "prune", "--keep", 2, "--dry-run", C).count("would be removed") == 2
    assert sorted(path.name for path in C.iterdir()) == before
    assert "checkpoint-000006: damaged" in told(capsys, "prune", "--keep", 2, C)
    left = sorted(path.name for path in C.iterdir())
    assert left == [f"checkpoint-00000{n}" for n in (2, 4, 5, 6)] + ["mine"]
    assert "--keep 0" in told(capsys, "prune", "--keep", 0, C, code=1)


@pytest.mark.parametrize("action", ["inspect", "verify", "diff", "prune"])
def test_nothing_there_is_one_clear_line(capsys, action):
    rest = {"diff": ["nowhere"], "prune": ["--keep", 1]}.get(action, [])
    text = told(capsys, action, "nowhere", *rest, code=1)
    assert text.startswith("drivetrain checkpoint: error: ") and "nowhere" in text and text.count("\n") == 1


def test_wrong_usage_is_status_2_and_help_needs_no_torch():
    with pytest.raises(SystemExit) as wrong:
        main(["checkpoint", "mend", "x"])
    assert wrong.value.code == 2
    script = "import sys; sys.modules['torch'] = None; from drivetrain.trainer.cli.main import main; main(['checkpoint', '--help'])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0 and "inspect" in shown.stdout, shown.stderr


def test_a_checkpoint_of_another_version_is_an_error_not_a_crash(capsys):
    trained(1)
    path = C / "checkpoint-000001" / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(CheckpointError):
        Checkpoint.open(path.parent)
    assert "format_version" in told(capsys, "inspect", path.parent, code=1)


def test_an_unfinished_save_is_told_and_pruned(capsys):
    """What a killed process left: half written beside its place, half removed, held for a copy."""
    trained(2)

    def unfinished():
        from drivetrain.strategies.checkpoint import folders

        for kind in ("writing", "removing", "copying"):
            folders.claim(C / f"checkpoint-{kind}", kind).mkdir()
            next(path for path in C.iterdir() if kind in path.name).joinpath("model.safetensors").write_bytes(b"half")

    assert forked(unfinished) == 0
    text = told(capsys, "inspect", C)
    assert text.count("whose process has ended") == 3 and "an unfinished save of checkpoint-writing" in text
    left = next(path for path in C.iterdir() if "writing" in path.name)
    for action in ("inspect", "verify"):
        assert "an unfinished save of checkpoint-writing, whose process has ended" in told(capsys, action, left, code=1)
    assert "whole" in told(capsys, "verify", C)
    assert told(capsys, "prune", C, "--keep", 5, "--dry-run").count("would be removed") == 3 and left.exists()
    assert told(capsys, "prune", C, "--keep", 5).count(": removed, ") == 3
    assert sorted(path.name for path in C.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def test_copies_at_another_place_are_dealt_with_by_their_url(capsys, memory):
    trained(3)
    for path in sorted(C.iterdir()):
        upload(path, f"memory://run/{path.name}")
    here, there = C / "checkpoint-000002", "memory://run/checkpoint-000002"
    for options in ((), ("--all",)):
        assert told(capsys, "inspect", there, *options).splitlines()[1:] == told(
            capsys, "inspect", here, *options
        ).splitlines()[1:]  # fmt: skip
    assert told(capsys, "inspect", "memory://run").count(" step ") == 3
    assert "whole" in told(capsys, "verify", there) and told(capsys, "diff", here, there) == "no difference\n"
    told(capsys, "convert", there, "plain")
    assert set(load_file("plain/model.safetensors")) == {"layer.weight", "layer.bias"}
    data = bytearray(memory.cat_file("/run/checkpoint-000001/training.json"))
    data[5] ^= 1
    memory.pipe_file("/run/checkpoint-000001/training.json", bytes(data))
    text = told(capsys, "verify", "memory://run", code=1)
    assert text.count(": whole\n") == 2 and "memory://run/checkpoint-000001/training.json: is damaged" in text
    assert "checkpoint-000001: damaged" in told(capsys, "prune", "memory://run", "--keep", 1)
    assert sorted(memory.ls("/run", detail=False)) == ["/run/checkpoint-000001", "/run/checkpoint-000003"]
    for action in ("inspect", "verify"):
        assert "memory://nowhere: has no manifest.json" in told(capsys, action, "memory://nowhere", code=1)


def test_parts_by_rank_are_told_compared_and_converted_as_whole_tensors(capsys):
    """What a sharded strategy writes, beside the same state whole."""
    weight, moment = torch.arange(12.0).reshape(4, 3), torch.ones(4, 3)

    def job(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        part = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in (("w", weight), ("m", moment))}
        with Writer("parts", world=current()) as writer:
            save_sharded(writer, {"w": part["w"]}, stem="model")
            save_sharded_state(writer, "optimizer-0", {"state": {"w": {"exp_avg": part["m"]}}})
            writer.commit({"step": 3, "world_size": 2})

    run(job, 2)
    with Writer("whole") as writer:
        save_weights(writer, {"w": weight})
        writer.state("optimizer-0", {"state": {"w": {"exp_avg": moment}}})
        writer.commit({"step": 3, "world_size": 2})
    words = " ".join(told(capsys, "inspect", "parts", "--all").split())
    assert "w float32 [4, 3] 48 B" in words and "optimizer-0.state.w.exp_avg float32 [4, 3] 48 B" in words
    assert told(capsys, "diff", "parts", "whole") == "no difference\n" and "whole" in told(capsys, "verify", "parts")
    told(capsys, "convert", "parts", "plain")
    assert torch.equal(load_file("plain/model.safetensors")["w"], weight)
    damage(Path("parts/model.shard-00001.safetensors"))
    for command in (("verify", "parts"), ("diff", "parts", "whole"), ("convert", "parts", "other")):
        assert "model.shard-00001.safetensors: is damaged" in told(capsys, *command, code=1)
