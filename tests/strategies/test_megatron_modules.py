"""Models of transformers trained by Megatron on ranks: the losses and weights of a plain loop over the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

from drivetrain import MegatronBert, MegatronGPT, MegatronStrategy, MegatronT5, Trainer  # noqa: E402
from drivetrain.tests.distributed import run  # noqa: E402
from drivetrain.tests.docs.pages import ROOT, blocks  # noqa: E402
from drivetrain.tests.strategies import megatron_families as families  # noqa: E402
from drivetrain.tests.strategies import megatron_runs as runs  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # seconds on a machine of its own, minutes on a loaded one
KINDS = {"bert": MegatronBert, "megatron-bert": MegatronBert, "t5": MegatronT5}
SAMPLES, BATCH, LR = 24, 4, 1e-2
FILES = {block.file: block.code for block in blocks(ROOT / "docs" / "megatron-models.md") if block.file}


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()
    families.model("llama")


def samples(name):
    """Dicts with labels, of which some are not to be predicted."""
    found, generator = families.batch(name, SAMPLES), torch.Generator().manual_seed(5)
    if found.pop("decoder_input_ids", None) is not None:
        found["labels"] = torch.randint(3, families.VOCABULARY, (SAMPLES, 6), generator=generator)
        found["labels"][::2, 4:] = -100
    else:
        found["labels"] = found["input_ids"].clone()
        found["labels"][::2, 4:] = -100
    if name in ("bert", "megatron-bert"):
        found["next_sentence_label"] = torch.randint(0, 2, (SAMPLES,), generator=generator)
    return [{key: value[number] for key, value in found.items()} for number in range(SAMPLES)]


def plain(rank, name):
    """Losses of two epochs by torch and transformers alone, and the weights after them."""
    model = families.model(name).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR), []
    for batch in [*DataLoader(samples(name), BATCH), *DataLoader(samples(name), BATCH)]:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


@cache
def expected(name):
    return run(plain, 1, name)[0]


def trained(name, options):
    """The same by Megatron; the batch is that of all ranks."""
    with OnCPU():
        losses = []

        class Module(KINDS.get(name.split()[0], MegatronGPT)):
            def on_train_batch_end(self, outputs, batch, batch_idx):
                both = torch.stack([outputs["loss"] * outputs["weight"], torch.as_tensor(outputs["weight"]).float()])
                world = self.trainer.accelerator.strategy.loss_world
                both = world.all_reduce(both.detach()) if world.size > 1 else both
                losses.append(float(both[0] / both[1]))

        trainer = Trainer(strategy=MegatronStrategy(**options), max_epochs=2, **runs.QUIET)
        module = Module.from_pretrained(families.model(name), lr=LR)
        each = BATCH // trainer.accelerator.strategy.data_world.size
        trainer.fit(module, DataLoader(samples(name), each))
        return losses, module.state_of_transformers()


# The gradients of keys' biases are 0 but for rounding, which Adam makes as large as any other.
NOISE = ("c_attn.bias", "k_proj.bias", "key.bias")
TENSOR, STAGES = {"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}
PARTS = {"tp_degree": 2, "sequence_parallelism": True}
SEQUENCE = {**PARTS, "recompute_activations": True}
VIRTUAL = {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 4}
EXPERTS = {"expert_model_parallel_size": 2}
FULL = {"tp_degree": 2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RUNS = [
    ("llama", TENSOR), ("llama", SEQUENCE), ("llama", VIRTUAL), ("llama with biases, tied", STAGES),
    ("mistral with a window", TENSOR), ("qwen2", SEQUENCE), ("qwen3", SEQUENCE), ("gpt2", {}), ("gpt2", STAGES),
    ("gpt2", FULL), ("mixtral", SEQUENCE), ("mixtral", EXPERTS), ("bert", STAGES),
    ("bert without a second head", TENSOR), ("megatron-bert", {}), ("t5", TENSOR), ("t5 v1.1", PARTS), ("t5", {}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", RUNS)
def test_training_equals_a_plain_loop_over_the_model_of_transformers(name, options):
    losses, weights = expected(name)
    for found, state in run(lambda rank: trained(name, options), 2, group=False, timeout=240):
        assert len(found) == 12 and found == pytest.approx(losses, rel=1e-5)
        for key, tensor in state.items():
            if not key.endswith(NOISE):
                assert float((tensor - weights[key]).norm() / weights[key].norm()) < 1e-3, key
    assert losses[-1] != pytest.approx(losses[5], rel=1e-2)  # it learns


def test_kinds_and_configs_have_to_agree():
    def work(rank):
        with OnCPU():
            trainer = Trainer(strategy="megatron", max_epochs=1, **runs.QUIET)
            with pytest.raises(ValueError, match="Expected a config of 'gpt' for MegatronGPT. Received: one of 't5'"):
                trainer.fit(MegatronGPT.from_pretrained(families.model("t5")), DataLoader(samples("t5"), 4))

    run(work, 1, group=False)


@pytest.mark.parametrize("name, options, message", [
    ("t5", STAGES, "Expected T5 without a pipeline"),
    ("t5", SEQUENCE, "Expected T5 without recomputation"),
    ("bert", SEQUENCE, "Expected BERT without sequence parallel"),
])  # fmt: skip
def test_what_the_package_lacks_is_refused(name, options, message):
    def work(rank):
        with OnCPU(), pytest.raises(ValueError, match=message):
            trainer = Trainer(strategy=MegatronStrategy(**options), max_epochs=1, **runs.QUIET)
            trainer.fit(KINDS[name].from_pretrained(families.model(name)), DataLoader(samples(name), 4))

    run(work, 2, group=False)


def test_padding_on_the_left_is_not_seen():
    """Logits of what is not padding are those of transformers, with positions counted from the left as there."""
    model, ids = families.model("llama"), families.batch("llama")["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(8).expand(3, -1)).logits

    def work(rank):
        with OnCPU():
            trainer = Trainer(strategy="megatron", **runs.QUIET)
            data = [{"input_ids": row, "attention_mask": seen} for row, seen in zip(ids, mask)]
            return trainer.predict(MegatronGPT.from_pretrained(model), DataLoader(data, 3))[0]

    found = run(work, 1, group=False)[0][..., : families.VOCABULARY]
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], atol=1e-5, rtol=0)


def program(name):
    names = {"__name__": name}
    exec(compile(FILES[name], name, "exec"), names)
    return names


def quiet():
    return {name: value for name, value in runs.QUIET.items() if name != "logger"}


def test_the_pages_program_of_a_config_runs():
    def work(rank):
        with OnCPU():
            trainer = program("gpt.py")["main"](devices=2, **quiet())
            return trainer.global_step, float(trainer.callback_metrics["train_loss"])

    found = run(work, 2, group=False)
    assert found[0] == found[1] and found[0][0] == 4 and 4 < found[0][1] < 5.5  # ln 100 is 4.6


def test_the_pages_program_of_transformers_runs(tmp_path):
    ids = torch.randint(0, 100, (16, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def work(rank):
        with OnCPU():
            program("llama.py")["main"](str(tmp_path / f"{rank}"), data, devices=2, **quiet())

    run(work, 2, group=False)
    given, trained = (transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict()
                      for name in ("0", "0-trained"))  # fmt: skip
    assert given.keys() == trained.keys() and not torch.equal(given["lm_head.weight"], trained["lm_head.weight"])


def test_the_pages_program_of_indexed_data_runs(tmp_path):
    program("indexed.py")["write"](str(tmp_path / "documents"))

    def work(rank):
        with OnCPU():
            trainer = program("indexed.py")["main"](str(tmp_path / "documents"), devices=2, **quiet())
            return trainer.global_step, float(trainer.callback_metrics["val_loss"])

    found = run(work, 2, group=False)
    assert found[0] == found[1] and found[0][0] == 6 and 4 < found[0][1] < 5.5


def test_a_run_file_names_a_module(tmp_path, monkeypatch):
    """`drivetrain fit --config`, in a process where Megatron runs on the CPU."""
    (tmp_path / "data.py").write_text(
        "import torch\nfrom drivetrain import DataModule\n"
        "class Tokens(DataModule):\n    def train_dataloader(self):\n"
        "        degree = self.trainer.strategy.plugin.tp_degree\n"
        "        told = open(f'told-{self.trainer.global_rank}', 'w')\n"
        "        told.write(f'{type(self.trainer.module).__name__} {degree}')\n"
        "        told.close()\n"
        "        return torch.utils.data.DataLoader(torch.arange(64).reshape(8, 8) % 32, batch_size=4)\n"
    )
    (tmp_path / "run.yaml").write_text(f"""
model:
  class_path: drivetrain.MegatronGPT
  init_args:
    config: {{num_layers: 2, hidden_size: 16, num_attention_heads: 4, vocab_size: 32, sequence_length: 8}}
    lr: 0.001
data:
  class_path: data.Tokens
trainer:
  strategy: megatron
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  enable_checkpointing: false
  default_root_dir: {tmp_path}
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")  # as a launch says it

    def work(rank):
        from drivetrain.trainer.cli.main import main

        with OnCPU():
            return main(["fit", "--config", str(Path("run.yaml"))])

    assert run(work, 2, group=False) == [0, 0]
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == ["MegatronGPT 2"] * 2
