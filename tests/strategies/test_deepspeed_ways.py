"""DeepSpeed chosen in different ways, which all give the same run; and values that two of them say differently."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DataModule, DeepSpeedPlugin, DeepSpeedStrategy, Trainer, TrainModule
from drivetrain.strategies import choice, environment
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs
from drivetrain.trainer.cli.main import main

pytestmark = pytest.mark.timeout(600)  # seconds on a machine of its own, minutes on a loaded one
CONTENT = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2}
QUIET = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


@pytest.fixture
def file(tmp_path):
    return runs.written(tmp_path / "ds.json", CONTENT)


class launched:
    """As a launch leaves its variables, for a block; `sources`: who has told it which."""

    def __init__(self, sources=None, **variables):
        self.variables = {f"ACCELERATE_{name}": value for name, value in variables.items()}
        if sources:
            self.variables[environment.SOURCES] = json.dumps({f"ACCELERATE_{k}": v for k, v in sources.items()})

    def __enter__(self):
        self.context = environment.exported(environment.child_environment(self.variables))
        self.context.__enter__()

    def __exit__(self, *details):
        self.context.__exit__(*details)


def fresh():
    GradientState._reset_state()
    PartialState._reset_state()


def test_a_loop_of_ones_own_is_the_same_run_however_it_is_chosen(file):
    def work(rank):
        ways = {
            "deepspeed=": dict(deepspeed=file),
            "deepspeed= and a word": dict(deepspeed=CONTENT, strategy="deepspeed"),
            "word": dict(strategy="deepspeed_stage_1", gradient_accumulation_steps=2),
            "strategy": dict(strategy=DeepSpeedStrategy(config=file)),
            "plugin": dict(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), gradient_accumulation_steps=2),
            "fields": dict(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=2)),
        }
        found = {}
        for way, options in ways.items():
            fresh()
            found[way] = runs.trained(Accelerator(cpu=True, **options), 4)["weights"]
        for way, variables in {
            "file of a launch": dict(DEEPSPEED_CONFIG_FILE=file),
            "fields of a launch": dict(DEEPSPEED_ZERO_STAGE="1", GRADIENT_ACCUMULATION_STEPS="2"),
        }.items():
            fresh()
            with launched(USE_DEEPSPEED="true", **variables):
                found[way] = runs.trained(Accelerator(cpu=True), 4)["weights"]
        return found

    first, second = run(work, 2, timeout=200)
    assert runs.far(first["word"], runs.plain(16)["weights"]) <= 1e-5  # 10 steps of 2 × 2 ranks × 4 samples
    for weights in [*first.values(), *second.values()]:
        assert torch.equal(weights, first["word"])


class Classifier(TrainModule):
    """Leaves its weights in `kept`, also where the command line has made it."""

    kept: dict = {}

    def __init__(self):
        super().__init__()
        self.net = runs.mlp()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_fit_end(self):
        self.kept["weights"] = runs.vector(self.trainer.accelerator.get_state_dict(self.trainer.model))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(runs.data(), batch_size=4, shuffle=True)


def trained(*arguments, **options):
    """By a Trainer of these options, or by these arguments of the command line."""
    fresh()
    if arguments:
        assert main(["fit", *arguments]) == 0
    else:
        Trainer(max_epochs=1, seed=3, enable_checkpointing=False, **QUIET, **options).fit(Classifier(), datamodule=Data())
    return Classifier.kept.pop("weights")


SETTINGS = """
seed_everything: 3
trainer: {{max_epochs: 1, accelerator: cpu, enable_checkpointing: false, logger: false, enable_progress_bar: false,
           enable_model_summary: false, {more}}}
model: {module}.Classifier
data: {module}.Data
"""


def test_trainer_and_command_line_are_the_same_run_however_it_is_chosen(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = Classifier.__module__
    lines = {
        "the command line": f"deepspeed: {file}",
        "inside of its file": f"deepspeed: {json.dumps(CONTENT)}",
        "as a plugin in its file":
            "deepspeed: {class_path: drivetrain.DeepSpeedPlugin, init_args: {zero_stage: 1, gradient_accumulation_steps: 2}}",
        "as a strategy in its file":
            f"strategy: {{class_path: drivetrain.DeepSpeedStrategy, init_args: {{config: {file}}}}}",
        "as a word in its file": "strategy: deepspeed_stage_1, accumulate_grad_batches: 2",
    }  # fmt: skip
    for name, more in lines.items():
        (tmp_path / f"{name}.yaml").write_text(SETTINGS.format(more=more, module=own))
    (tmp_path / "none.yaml").write_text(SETTINGS.format(more="", module=own))

    def work(rank):
        ways = {
            "deepspeed=": dict(deepspeed=file),
            "word": dict(strategy="deepspeed_stage_1", accumulate_grad_batches=2),
            "strategy": dict(strategy=DeepSpeedStrategy(zero_stage=1), accumulate_grad_batches=2),
            "options": dict(strategy=DeepSpeedPlugin(hf_ds_config=file)),
        }
        found = {way: trained(accelerator="cpu", **options) for way, options in ways.items()}
        fresh()
        found["Accelerator"] = trained_on(Accelerator(cpu=True, deepspeed=file, seed=3))
        with launched(USE_DEEPSPEED="true", DEEPSPEED_CONFIG_FILE=file):
            found["launch"] = trained(accelerator="cpu")
            found["launch of the command line"] = trained("--config", str(tmp_path / "none.yaml"))
        for name in lines:
            found[name] = trained("--config", str(tmp_path / f"{name}.yaml"))
        return found

    first, second = run(work, 2, timeout=300)
    assert len(first) == 12
    for way, weights in [*first.items(), *second.items()]:
        assert torch.equal(weights, first["word"]), way


def trained_on(accelerator):
    Trainer(accelerator=accelerator, max_epochs=1, enable_checkpointing=False, **QUIET).fit(Classifier(), datamodule=Data())
    return Classifier.kept.pop("weights")


# What two say differently


@pytest.mark.parametrize("what", ["trainer", "accelerator"])
def test_F1_one_message_shows_what_file_launch_and_script_say(file, what):
    """Nothing is started: this is told when the object is made."""
    content = {**CONTENT, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    steps = {"GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps in run.yaml"}
    with launched(steps, GRADIENT_ACCUMULATION_STEPS="4"), pytest.raises(ValueError) as error:
        if what == "trainer":
            Trainer(deepspeed=content, accelerator="cpu", accumulate_grad_batches=3, gradient_clip_val=0.5, precision="16-mixed")
        else:
            Accelerator(cpu=True, deepspeed=content, gradient_accumulation_steps=3, mixed_precision="fp16")
    lines = str(error.value).splitlines()
    said = ("accumulate_grad_batches", "16-mixed", "precision") if what == "trainer" else (
        "gradient_accumulation_steps", "fp16", "mixed_precision")  # fmt: skip
    assert (
        "- gradient_accumulation_steps: 2 in the configuration, 4 in ACCELERATE_GRADIENT_ACCUMULATION_STEPS "
        f"(gradient_accumulation_steps in run.yaml), 3 in {said[0]}=3" in lines
    )
    assert f"- bf16.enabled: True in the configuration, False in {said[2]}={said[1]!r}" in lines
    clipping = "- gradient_clipping: 1.0 in the configuration, 0.5 in gradient_clip_val=0.5"
    assert (clipping in lines) == (what == "trainer")


def test_F1_a_launchs_file_and_a_scripts_own_are_compared_key_by_key(tmp_path):
    other = runs.written(tmp_path / "launch.json", {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5})
    with launched(USE_DEEPSPEED="true", DEEPSPEED_CONFIG_FILE=other):
        for make in (lambda: DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}}),
                     lambda: Accelerator(cpu=True, deepspeed={"zero_optimization": {"stage": 3}})):  # fmt: skip
            with pytest.raises(ValueError, match="stage: 3 in the configuration, 1 in launch.json of the launch"):
                make()
        agreed = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": "auto"}, "gradient_clipping": 0.5})
    assert agreed.zero_stage == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(strategy="ddp"), "strategy='ddp', and deepspeed_plugin=DeepSpeedPlugin, which asks for 'deepspeed'"),
        (dict(strategy="deepspeed_stage_3"), "zero_stage. Received: 3 by strategy='deepspeed_stage_3', and 1 in the options"),
        (dict(accelerator=None), "Received beside it: {'deepspeed': '.*ds.json'}"),
        (dict(deepspeed=3), "Expected the path of a JSON file or a dict for DeepSpeed. Received: 3"),
        (dict(deepspeed="absent.json"), "Expected DeepSpeed's configuration. Received: 'absent.json': No such file"),
    ],
)
def test_what_else_stands_beside_it_has_to_agree(file, options, message):
    if "accelerator" in options:
        options = {"accelerator": SimpleNamespace(prepare=None, backward=None)}
    with pytest.raises((ValueError, TypeError), match=message):
        Trainer(**{"deepspeed": file, "accelerator": "cpu", **options})


def test_options_of_a_word_a_plugin_and_a_launch_have_to_agree():
    with pytest.raises(ValueError, match="1 by strategy='deepspeed_stage_1', and 2 in the options"):
        Accelerator(cpu=True, strategy="deepspeed_stage_1", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    with pytest.raises(ValueError, match="options once. Received: deepspeed and deepspeed_plugin"):
        Accelerator(cpu=True, deepspeed={}, deepspeed_plugin=DeepSpeedPlugin())
    with launched(USE_DEEPSPEED="true", DEEPSPEED_ZERO_STAGE="3"):  # of which nobody has told the launch
        assert choice.create("deepspeed_stage_1").plugin.zero_stage == 1
        assert choice.create("deepspeed").plugin.zero_stage == 3
    with launched({"DEEPSPEED_ZERO_STAGE": "--zero_stage"}, USE_DEEPSPEED="true", DEEPSPEED_ZERO_STAGE="3"):
        with pytest.raises(ValueError, match=r"zero_optimization.stage: 1 in DeepSpeedPlugin.*, 3 in ACCELERATE_DEEPSPEED_ZERO"):
            choice.create("deepspeed_stage_1")


def test_batch_normalization_over_all_ranks_is_refused_where_the_engine_has_none():
    """It was left out in silence."""
    def work(rank):
        with pytest.raises(ValueError, match="sync_batchnorm=True, strategy='deepspeed'"):
            Trainer(deepspeed={}, accelerator="cpu", sync_batchnorm=True, **QUIET)

    run(work, 2)
