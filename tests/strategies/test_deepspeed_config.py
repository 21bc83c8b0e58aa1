"""DeepSpeed's configuration: its "auto" values, and everybody who has a say in it; no engine runs here."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain import DeepSpeedPlugin, DeepSpeedStrategy, DummyOptim, DummyScheduler, HfDeepSpeedConfig
from drivetrain.strategies import choice, environment
from drivetrain.strategies.deepspeed_config import Said, settle
from drivetrain.strategies.deepspeed_engine import settled


def config(**content):
    return HfDeepSpeedConfig(content)


def fill(wanted, *, optimizer=None, scheduler=None, samples=4, micro_batches=2, ranks=2, precision="32-true", model=None,
         spread=1):
    settled(
        wanted, model or nn.Linear(2, 2), optimizer=optimizer, scheduler=scheduler, samples=samples,
        micro_batches=micro_batches, ranks=ranks, precision=precision, spread=spread,
    )
    return wanted.config


def dummy(**options):
    return DummyOptim(nn.Linear(2, 2).parameters(), **options)


# The configuration itself


def test_keys_are_asked_by_dots(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "a": 0}))
    found = HfDeepSpeedConfig(str(path))
    assert found.source == "ds.json" and found.get_value("zero_optimization.offload_param.device") == "cpu"
    assert found.is_zero3() and not found.is_zero2() and found.is_offload()
    assert found.is_false("a") and not found.is_true("a") and found.get_value("b.c", 7) == 7
    found.del_config_sub_tree("zero_optimization.offload_param")
    assert not found.is_offload()
    with pytest.raises(ValueError, match="Expected x.y in ds.json"):
        found.del_config_sub_tree("x.y", must_exist=True)


def test_a_dict_is_copied_and_another_kind_refused():
    given = {"zero_optimization": {"stage": 1}}
    HfDeepSpeedConfig(given).set_value("zero_optimization.stage", 2)
    assert given["zero_optimization"]["stage"] == 1
    with pytest.raises(TypeError, match="Received: 3"):
        HfDeepSpeedConfig(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "Expected a JSON object"), ("{", "Expected JSON"), ('{"a": 1, "a": 2}', "the key 'a' twice")],
)
def test_broken_files_are_told_by_name(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        DeepSpeedPlugin(hf_ds_config=str(path))
    assert "broken.json" in str(error.value)
    with pytest.raises(ValueError, match="No such file"):
        DeepSpeedPlugin(hf_ds_config=str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("key", "near"),
    [("gradient_acumulation_steps", "gradient_accumulation_steps"), ("zero_optimisation", "zero_optimization"),
     ("gradient_cliping", "gradient_clipping"), ("optimiser", "optimizer")],
)  # fmt: skip
def test_F3_a_misspelled_key_is_an_error_with_the_nearest_name(key, near):
    """DeepSpeed itself leaves it unread; a key that is like none is handed on."""
    with pytest.raises(ValueError, match=f"Received: '{key}' in the configuration.*Did you mean '{near}'"):
        DeepSpeedPlugin(hf_ds_config={key: 1})
    assert DeepSpeedPlugin(hf_ds_config={"a_new_one": 1}).get_value("a_new_one") == 1


# Filled from the run


def test_autos_are_filled_from_the_run():
    class Model(nn.Linear):
        config = type("Settings", (), {"hidden_size": 64})

    wanted = config(
        train_batch_size="auto", train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto",
        gradient_clipping="auto", bf16={"enabled": "auto"}, fp16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        zero_optimization={
            "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"},
    )  # fmt: skip
    optimizer = dummy(lr=0.02, weight_decay=0.1, betas=(0.8, 0.9))
    scheduler = DummyScheduler(optimizer, total_num_steps=101, warmup_num_steps=7)
    found = fill(wanted, optimizer=optimizer, scheduler=scheduler, precision="bf16-mixed", model=Model(2, 2), spread=2)
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (16, 4)
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (2, 0.0)
    assert found["bf16"] == {"enabled": True} and found["fp16"] == {"enabled": False}
    assert found["optimizer"]["params"] == {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}
    assert found["scheduler"]["params"] == {
        "warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 7, "total_num_steps": 51,
    }  # fmt: skip
    assert found["zero_optimization"] == {
        "stage": 3, "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640, "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip


def test_nobody_clips_where_nobody_has_said_so():
    """DeepSpeed's own default clips to 1."""
    assert fill(config())["gradient_clipping"] == 0.0
    assert fill(config(gradient_clipping=0.5))["gradient_clipping"] == 0.5


def test_batch_sizes_follow_from_what_is_known():
    assert fill(config(train_batch_size=24), samples=None)["train_micro_batch_size_per_gpu"] == 6
    assert "train_batch_size" not in fill(config(train_batch_size="auto"), samples=None)
    assert fill(config(gradient_accumulation_steps=3), micro_batches=1)["train_batch_size"] == 24


def test_every_disagreement_is_in_one_message():
    wanted = HfDeepSpeedConfig({
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    })  # fmt: skip
    wanted.source = "ds.json"
    before = json.dumps(wanted.config)
    with pytest.raises(ValueError) as error:
        fill(wanted, optimizer=dummy(lr=0.1), precision="16-mixed")
    text = str(error.value)
    assert json.dumps(wanted.config) == before
    assert "gradient_accumulation_steps: 1 in ds.json, 2 in Accelerator(gradient_accumulation_steps=2)" in text
    assert "bf16.enabled: True in ds.json, False in precision='16-mixed'" in text
    assert "train_micro_batch_size_per_gpu: 8 in ds.json, 4 in the loader's batch_size" in text
    assert "train_batch_size: 64 in ds.json, 8 in the run (4 samples × 1 micro-batches × 2 ranks)" in text
    assert "optimizer.params.lr: 0.5 in ds.json, 0.1 in DummyOptim" in text


def test_autos_that_nobody_fills_are_listed_with_what_to_do():
    wanted = config(
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto"},
    )
    scheduler = DummyScheduler(None)
    with pytest.raises(ValueError, match="total_num_steps, zero_optimization.reduce_bucket_size.*DummyScheduler.*hidden"):
        fill(wanted, scheduler=scheduler)


@pytest.mark.parametrize(
    ("content", "optimizer", "scheduler", "message"),
    [
        ({}, "dummy", None, "Received: none in .*DummyOptim"),
        ({"optimizer": {"type": "Adam"}}, "real", None, "Received: optimizer in .*SGD"),
        ({}, "real", "dummy", "Expected one scheduler. Received: none"),
        ({"scheduler": {"type": "WarmupLR"}}, "real", "called", "Expected one scheduler. Received: "),
    ],
)
def test_an_optimizer_and_a_scheduler_come_from_one_place(content, optimizer, scheduler, message):
    optimizer = dummy() if optimizer == "dummy" else torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    made = {"dummy": DummyScheduler(optimizer), "called": DummyScheduler(optimizer, lr_scheduler_callable=lambda o: o)}
    with pytest.raises(ValueError, match=message):
        fill(config(**content), optimizer=optimizer, scheduler=made.get(scheduler))


def test_one_voice_that_only_suggests_gives_way():
    wanted = config(a="auto", b=3)
    settle(wanted, [Said("a", 1, "x", firm=False), Said("a", 2, "y"), Said("b", 4, "z", firm=False)])
    assert wanted.config == {"a": 2, "b": 3}


# The plugin


def test_plugin_without_a_configuration():
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2 and not plugin.zero3_init_flag
    assert (plugin.offload_optimizer_device, plugin.offload_param_device) == ("none", "none")
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 2}


def test_every_field_goes_into_the_configuration():
    plugin = DeepSpeedPlugin(
        gradient_accumulation_steps=4, gradient_clipping=0.7, zero_stage=3, offload_optimizer_device="nvme",
        offload_param_device="cpu", offload_optimizer_nvme_path="/nvme", zero3_init_flag=True, zero3_save_16bit_model=True,
        transformer_moe_cls_names="Experts", is_train_batch_min=False,
    )  # fmt: skip
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}, "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    assert plugin.get_value("gradient_accumulation_steps") == 4 and plugin.get_value("gradient_clipping") == 0.7
    assert plugin.is_zero3_init_enabled() and plugin.transformer_moe_cls_names == "Experts"


def test_fields_and_a_configuration_must_agree():
    with pytest.raises(ValueError) as error:
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}, zero_stage=2,
                        gradient_clipping=0.5)  # fmt: skip
    assert "stage: 1 in the configuration, 2 in DeepSpeedPlugin(zero_stage=2)" in str(error.value)
    assert "gradient_clipping: 1.0 in the configuration, 0.5 in DeepSpeedPlugin(gradient_clipping=0.5)" in str(error.value)
    assert DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": "auto"}}, zero_stage=3).zero_stage == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 5}, "from 0 to 3.*zero_stage=5"),
        ({"offload_optimizer_device": "disk"}, "one of none, cpu, nvme"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "a stage of ZeRO from 3 on.*zero_stage=2"),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "a stage of ZeRO from 1 on"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "offload_param_nvme_path"),
        ({"enable_msamp": True}, "Expected no MS-AMP"),
    ],
)
def test_values_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DeepSpeedPlugin(**options)


def test_a_launch_speaks_through_its_variables(monkeypatch, tmp_path):
    for name, value in {
        "ZERO_STAGE": "3", "OFFLOAD_OPTIMIZER_DEVICE": "cpu", "OFFLOAD_PARAM_DEVICE": "nvme",
        "OFFLOAD_PARAM_NVME_PATH": "/nvme", "ZERO3_INIT": "true", "ZERO3_SAVE_16BIT_MODEL": "true",
        "MOE_LAYER_CLS_NAMES": "A,B",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"ACCELERATE_DEEPSPEED_{name}", value)
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.25")
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 3 and plugin.offload_optimizer_device == "cpu" and plugin.zero3_init_flag
    assert plugin.offload_param_nvme_path == "/nvme" and plugin.zero3_save_16bit_model is True
    assert plugin.gradient_clipping == 0.25 and plugin.transformer_moe_cls_names == "A,B"
    assert DeepSpeedPlugin(zero_stage=1, offload_param_device="none").zero_stage == 1  # nobody has said otherwise


def test_what_somebody_told_the_launch_must_agree(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv(environment.SOURCES, json.dumps({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage in run.yaml"}))
    with pytest.raises(ValueError, match=r"3 in ACCELERATE_DEEPSPEED_ZERO_STAGE \(zero_stage in run.yaml\)"):
        DeepSpeedPlugin(zero_stage=2)


def test_a_launched_file_is_read(monkeypatch, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    strategy = choice.create()
    assert isinstance(strategy, DeepSpeedStrategy) and strategy.plugin.zero_stage == 1


def test_filling_as_accelerate_does():
    plugin = DeepSpeedPlugin(hf_ds_config={"a": "auto", "b": 2, "optimizer": {"params": {"lr": "auto"}}})
    assert plugin.is_auto("a")
    plugin.fill_match("a", a=5)
    mismatches = []
    plugin.fill_match("b", mismatches, b=3)
    assert plugin.get_value("a") == 5 and mismatches == ["b: 2 in the configuration, 3 in the script"]
    with pytest.raises(ValueError, match="Expected a value for optimizer.params.lr"):
        plugin.fill_match("optimizer.params.lr")
    plugin.deepspeed_config_process(must_match=False, **{"optimizer.params.lr": 0.1, "b": 9})
    assert plugin.get_value("optimizer.params.lr") == 0.1 and plugin.get_value("b") == 2
    with pytest.raises(ValueError, match="b: 2 in"):
        plugin.deepspeed_config_process(b=9)
    plugin = DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"]["enabled"] and not plugin.deepspeed_config["fp16"]["enabled"]


# The strategy


@pytest.mark.parametrize(
    ("word", "stage", "offloads"),
    [("deepspeed", 2, "none"), ("deepspeed_stage_1", 1, "none"), ("deepspeed_stage_3_offload", 3, "cpu")],
)
def test_words(word, stage, offloads):
    strategy = choice.create(word)
    assert isinstance(strategy, DeepSpeedStrategy) and strategy.plugin.zero_stage == stage
    assert strategy.plugin.offload_optimizer_device == offloads


def test_options_come_once():
    with pytest.raises(ValueError, match="options once. Received: plugin and .'zero_stage'"):
        DeepSpeedStrategy(plugin=DeepSpeedPlugin(), zero_stage=3)
    plugin = DeepSpeedPlugin(zero_stage=1)
    assert choice.create("deepspeed", plugins=[plugin]).plugin is plugin
    with pytest.raises(ValueError, match="which asks for 'deepspeed'"):
        choice.create("ddp", plugins=[plugin])


@pytest.mark.parametrize(
    ("content", "sizes", "message"),
    [
        ({"sequence_parallel_size": 2}, None, "sequence_parallel_size=2 in .*Use ParallelismConfig.sp_size"),
        ({}, {"cp_size": 2}, "Received: cp_size=2 in the ParallelismConfig"),
        ({}, {"sp_size": 2, "ep_size": 2}, "Received: ep_size=2 in the ParallelismConfig"),
    ],
)
def test_ranks_without_data_of_their_own_are_refused(content, sizes, message):
    parallelism = None if sizes is None else drivetrain.ParallelismConfig(**sizes)
    with pytest.raises(NotImplementedError, match=message):
        DeepSpeedStrategy(config=content, parallelism=parallelism)


def test_stand_ins_do_not_step_themselves():
    optimizer = dummy()
    with pytest.raises(RuntimeError, match="DummyOptim, which stands for the optimizer"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="DummyScheduler"):
        DummyScheduler(optimizer).step()


def test_names_of_another_engine_say_what_runs():
    with pytest.raises(ValueError, match="Expected DeepSpeed to run"):
        drivetrain.get_active_deepspeed_plugin(object())
    model = nn.Linear(2, 2)
    with drivetrain.GatheredParameters(model.parameters(), modifier_rank=0):
        pass  # nothing is partitioned
