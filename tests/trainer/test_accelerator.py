"""The Accelerator on one process: what it accepts and refuses, what it prepares, saves, restores and lets go of."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    load_checkpoint_in_model,
)
from drivetrain.callbacks.tracking.base import GeneralTracker
from drivetrain.strategies.checkpoint import CheckpointError
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.optimizer import AcceleratedOptimizer
from drivetrain.strategies.scheduler import AcceleratedScheduler
from drivetrain.strategies.settings import DynamoBackend, InitProcessGroupKwargs
from drivetrain.strategies.state import PartialState


@pytest.fixture(autouse=True)
def _fresh():
    GradientState._reset_state()
    PartialState._reset_state()
    yield
    GradientState._reset_state()
    PartialState._reset_state()


def toy(count=8, batch=2):
    """Item i is the number i; one weight that starts at 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    loader = DataLoader(TensorDataset(torch.arange(float(count)).unsqueeze(1)), batch_size=batch)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), loader


def prepared(accelerator=None, **options):
    accelerator = accelerator or Accelerator(cpu=True, **options)
    model, optimizer, loader = accelerator.prepare(*toy())
    return accelerator, model, optimizer, loader


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps=0"),
        ({"gradient_accumulation_steps": 1.5}, ValueError, "whole number"),
        ({"mixed_precision": "fp17"}, ValueError, "Received: precision='fp17'. Did you mean 'fp16'"),
        ({"mixed_precision": "transformer-engine"}, NotImplementedError, "Use precision='fp8-mixed' .torchao. instead"),
        ({"strategy": "dddp"}, ValueError, "Did you mean 'ddp'"),
        ({"fsdp_plugin": object()}, TypeError, "Expected a FullyShardedDataParallelPlugin for fsdp_plugin"),
        ({"deepspeed_plugin": object()}, TypeError, "Expected a DeepSpeedPlugin"),
        ({"megatron_lm_plugin": object()}, TypeError, "Expected a MegatronLMPlugin"),
        ({"torch_tp_plugin": object()}, TypeError, "Expected a TorchTensorParallelPlugin"),
        ({"parallelism_config": object()}, TypeError, "parallelism_config to be a ParallelismConfig"),
        ({"strategy": object()}, TypeError, "a strategy, its name, or an engine's options"),
        ({"device": "cuda", "cpu": True}, ValueError, "cpu=True, device='cuda'"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ValueError, "one AutocastKwargs"),
        ({"kwargs_handlers": ["autocast"]}, TypeError, "Received: 'autocast'"),
        ({"kwargs_handlers": [GradientAccumulationPlugin()]}, TypeError, "kwargs_handlers to hold AutocastKwargs"),
        ({"dynamo_backend": "inductor", "dynamo_plugin": TorchDynamoPlugin()}, ValueError, "dynamo_backend or"),
        ({"rng_types": ["torch", "gpu"]}, ValueError, "Received: 'gpu'"),
        ({"dynamo_backend": "inducter"}, ValueError, "INDUCTOR"),
        (
            {"split_batches": True, "dataloader_config": DataLoaderConfiguration()},
            ValueError,
            "split_batches once",
        ),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
            ValueError,
            "gradient_accumulation_steps=2, gradient_accumulation_plugin.num_steps=3",
        ),
        ({"project_dir": "a", "project_config": ProjectConfiguration(project_dir="b")}, ValueError, "project's folder"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Accelerator(**{"cpu": "device" not in arguments, **arguments})


def test_defaults():
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1 and accelerator.process_index == accelerator.local_process_index == 0
    assert accelerator.is_main_process and accelerator.is_local_main_process and accelerator.is_last_process
    assert accelerator.device == torch.device("cpu") and accelerator.distributed_type.value == "NO"
    assert accelerator.mixed_precision == "no" and accelerator.precision.name == "32-true" and accelerator.scaler is None
    assert accelerator.gradient_accumulation_steps == 1 and accelerator.sync_gradients
    assert not accelerator.use_distributed and accelerator.should_save_model and accelerator.project_dir is None
    assert not accelerator.split_batches and accelerator.even_batches and accelerator.dispatch_batches is None
    assert accelerator.save_iteration == 0 and accelerator.fp8_backend.value == "NO"
    assert accelerator.strategy.name == "single" and accelerator.world.size == 1
    assert accelerator.deepspeed_plugin is accelerator.parallelism_config is None
    with pytest.raises(RuntimeError, match="a mesh with a dimension 'tp'"):
        accelerator.tensor_parallel_rank


def test_a_handler_may_be_portable():
    """A script for several processes also runs on one: DDP's options are then simply not needed."""
    Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(), InitProcessGroupKwargs()])


def test_variables_of_a_launcher_are_read_and_contradictions_shown(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16" and accelerator.gradient_accumulation_steps == 4
    assert accelerator.dynamo_plugin.backend is DynamoBackend.AOT_EAGER and accelerator.device.type == "cpu"
    assert Accelerator(mixed_precision="no").mixed_precision == "no"
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2, ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4"):
        Accelerator(gradient_accumulation_steps=2)


def test_users_settings_are_not_changed():
    config, project = DataLoaderConfiguration(), ProjectConfiguration()
    accelerator = Accelerator(cpu=True, dataloader_config=config, project_config=project, project_dir="somewhere")
    accelerator.even_batches = False
    assert config.even_batches and project.project_dir is None
    assert accelerator.project_dir == accelerator.logging_dir == "somewhere"


# Preparing


def test_prepare_keeps_the_order_and_wraps_each_kind():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = toy()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = object()
    out = accelerator.prepare(scheduler, loader, other, optimizer, model)
    assert out[4] is model and out[2] is other
    assert isinstance(out[3], AcceleratedOptimizer) and out[3].optimizer is optimizer
    assert isinstance(out[0], AcceleratedScheduler) and out[0].optimizers == [out[3]]
    assert isinstance(out[1], DataLoader) and len(out[1]) == 4
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(*out) == out


def test_scheduler_follows_its_own_optimizer():
    accelerator = Accelerator(cpu=True)
    first, second = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    schedule = torch.optim.lr_scheduler.StepLR(second, 1)
    _, prepared_second, scheduler = accelerator.prepare(first, second, schedule)
    assert scheduler.optimizers == [prepared_second]


def test_device_placement_for_each_object():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="each of 2 objects. Received: 1 values"):
        accelerator.prepare(*toy()[:2], device_placement=[True])
    accelerator.prepare(*toy()[:2], device_placement=[False, True])


def test_full_precision_leaves_the_model_alone():
    model = nn.Linear(1, 1)
    before = set(vars(model))
    assert Accelerator(cpu=True).prepare(model) is model and set(vars(model)) - before == {"_is_accelerate_prepared"}


def test_mixed_precision_model_and_its_unwrapping():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    assert model(torch.ones(1, 2)).dtype is torch.float32
    assert accelerator.unwrap_model(model) is model and "forward" in vars(model)
    assert "forward" not in vars(accelerator.unwrap_model(model, keep_fp32_wrapper=False))


def test_C6_compiled_model_keeps_its_type_and_names():
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = accelerator.prepare(nn.Linear(2, 2))
    assert type(model) is nn.Linear and sorted(accelerator.get_state_dict(model)) == ["bias", "weight"]
    assert model(torch.ones(1, 2)).shape == (1, 2)
    own = Accelerator(cpu=True).prepare(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert type(accelerator.unwrap_model(own)) is not nn.Linear
    assert type(accelerator.unwrap_model(own, keep_torch_compile=False)) is nn.Linear
    assert sorted(accelerator.get_state_dict(own)) == ["bias", "weight"]


def test_compiled_model_in_mixed_precision():
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True)
    model = Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin).prepare(nn.Linear(2, 2))
    torch.manual_seed(0)
    x = torch.rand(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.linear(x, model.weight, model.bias).float()
    assert torch.equal(model(x), expected) and model(x).dtype is torch.float32


def test_regional_compilation_compiles_repeated_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Model())
    assert model._compiled_call_impl is None and all(block._compiled_call_impl for block in model.blocks)
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_entry_is_the_bound_method_itself_on_one_device():
    class Model(nn.Linear):
        def training_step(self, batch):
            return batch

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Model(1, 1))
    assert accelerator.entry(model, "training_step") == model.training_step
    with pytest.raises(AttributeError):
        accelerator.entry(model, "training_stp")


def test_spread_models_are_refused_by_several_processes_only():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    assert accelerator.verify_device_map(model) is False
    accelerator.world.size = 2
    with pytest.raises(ValueError, match="device map over 2 devices in 2 processes"):
        accelerator.verify_device_map(model)


# A step


def test_a_new_run_does_not_begin_inside_of_a_window_that_an_earlier_one_left():
    accelerator, model, optimizer, loader = prepared(gradient_accumulation_steps=4)
    with pytest.raises(KeyError), accelerator.accumulate(model):
        raise KeyError
    assert not accelerator.sync_gradients
    accelerator, model, optimizer, loader = prepared()
    accelerator.backward(model.weight.sum())
    optimizer.step()
    assert model.weight.item() == -1.0


def test_G1_five_batches_accumulated_by_four():
    for plugin, expected in ((None, [-1.0, -1.25]), (GradientAccumulationPlugin(4, scale_last_window=True), [-1, -2])):
        options = {"gradient_accumulation_plugin": plugin} if plugin else {"gradient_accumulation_steps": 4}
        accelerator = Accelerator(cpu=True, **options)
        model, optimizer, loader = accelerator.prepare(*toy(5, batch=1))
        weights = []
        for _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model.weight.sum())
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    weights.append(model.weight.item())
        assert weights == pytest.approx(expected, abs=1e-6)
        assert accelerator.step == 0


def test_accumulate_is_one_object_for_the_same_models():
    accelerator, model, *_ = prepared(gradient_accumulation_steps=2)
    assert accelerator.accumulate(model) is accelerator.accumulate(model)
    assert accelerator.accumulate() is not accelerator.accumulate(model)


def test_number_of_steps_can_be_set_and_is_checked():
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3
    with pytest.raises(ValueError, match="whole number"):
        accelerator.gradient_accumulation_steps = 0


def test_losses_that_cannot_be_differentiated():
    accelerator, model, *_ = prepared()
    with pytest.raises(TypeError, match="Received: NoneType"):
        accelerator.backward(None)
    with pytest.raises(ValueError, match="loss with a graph"):
        accelerator.backward(torch.ones(()))
    with pytest.raises(ValueError, match=r"scalar loss. Received: shape \(3, 1\)"):
        accelerator.backward(model(torch.ones(3, 1)))
    accelerator.backward(model(torch.ones(3, 1)), gradient=torch.ones(3, 1))
    assert model.weight.grad.item() == 3.0


def test_errors_of_a_backward_that_are_not_the_losss_come_through():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("mine")

    accelerator, model, *_ = prepared()
    with pytest.raises(RuntimeError, match="mine"):
        accelerator.backward(Broken.apply(model.weight).sum())


def test_backward_via_another_function_gets_the_scaled_loss():
    accelerator, model, *_ = prepared(gradient_accumulation_steps=4)
    seen = []
    accelerator.backward(model.weight.sum() + 8, via=lambda loss, extra: seen.append((loss.item(), extra)), extra=1)
    assert seen == [(2.0, 1)]


def half(init_scale=1024.0):
    return Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=init_scale)],
    )  # fmt: skip


def test_G4_clipping_sees_true_gradients():
    accelerator = half()
    model, optimizer, _ = accelerator.prepare(*toy())
    accelerator.backward((model.weight * 0.5).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(0.5)
    assert accelerator.grad_norm.item() == pytest.approx(0.5)
    optimizer.step()
    assert model.weight.item() == -0.5


def test_clipping_twice_and_by_value_unscales_once():
    accelerator = half()
    model, optimizer, _ = accelerator.prepare(*toy())
    accelerator.backward((model.weight * 0.5).sum())
    accelerator.unscale_gradients(optimizer)
    accelerator.clip_grad_norm_(model.weight, 1.0)
    accelerator.clip_grad_value_(model.parameters(), 0.25)
    optimizer.step()
    assert model.weight.item() == -0.25


def test_clipping_leaves_other_optimizers_scaled():
    """The second optimizer's gradients come later in the step: unscaling it with the first would spoil them."""
    accelerator = half()
    first, first_optimizer, _ = toy()
    second, second_optimizer, _ = toy()
    first, first_optimizer, second, second_optimizer = accelerator.prepare(
        first, first_optimizer, second, second_optimizer
    )
    accelerator.backward((first.weight * 0.5).sum())
    accelerator.clip_grad_norm_(first.parameters(), 1.0)
    first_optimizer.step()
    accelerator.backward((second.weight * 0.5).sum())
    accelerator.clip_grad_norm_(second.parameters(), 1.0)
    second_optimizer.step()
    assert first.weight.item() == second.weight.item() == -0.5


def test_nothing_is_clipped_inside_a_window():
    accelerator, model, optimizer, loader = prepared(gradient_accumulation_steps=2)
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward((model.weight * 8).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    assert norms == [4.0, 8.0] and accelerator.grad_norm.item() == 8.0
    assert model.weight.item() == pytest.approx(-1.0, abs=1e-5)


def test_G5_overflows_skip_optimizer_and_scheduler_and_are_counted():
    accelerator = half()
    model, optimizer, _ = toy()
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    )
    for _ in range(3):
        accelerator.backward((model.weight * float("inf")).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped
    assert model.weight.item() == 0.0 and scheduler.get_last_lr() == [1.0]
    assert accelerator.skipped_steps == 3 and accelerator.scaler.get_scale() == 128.0
    accelerator.backward((model.weight * 0.5).sum())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped and model.weight.item() == -0.5


def test_autocast_context():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    a = torch.ones(2, 2)
    with accelerator.autocast():
        assert (a @ a).dtype is torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (a @ a).dtype is torch.float32
    with Accelerator(cpu=True).autocast():
        assert (a @ a).dtype is torch.float32


def test_trigger_is_seen_once():
    accelerator = Accelerator(cpu=True)
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


def test_contexts_that_one_process_does_not_need():
    accelerator, model, *_ = prepared()
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model), accelerator.maybe_context_parallel():
        pass
    accelerator.even_batches = True
    with accelerator.join_uneven_inputs([model], even_batches=False):
        pass


def test_collectives_of_one_process():
    accelerator = Accelerator(cpu=True)
    data = {"x": torch.arange(3), "y": [torch.ones(2, 2)]}
    assert torch.equal(accelerator.gather(data)["x"], data["x"])
    assert torch.equal(accelerator.reduce(data["x"].float(), "mean", scale=2.0), data["x"] * 2.0)
    assert torch.equal(accelerator.pad_across_processes(data)["y"][0], data["y"][0])
    assert accelerator.gather_for_metrics(["a", "b"], use_gather_object=True) == ["a", "b"]
    with accelerator.split_between_processes([1, 2, 3]) as mine:
        assert mine == [1, 2, 3]
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pass
    accelerator.wait_for_everyone()


def test_seed_fixes_weights_and_order():
    def order(seed):
        accelerator = Accelerator(cpu=True, seed=seed)
        drawn = torch.rand(1).item()
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(32)), batch_size=4, shuffle=True))
        return drawn, [item for (batch,) in loader for item in batch.tolist()]

    first, again, other = order(3), order(3), order(4)
    assert first == again and first[0] != other[0] and first[1] != other[1]
    assert sorted(first[1]) == list(range(32))


# State


def train(accelerator, model, optimizer, loader, scheduler=None, skip=0):
    seen = []
    for (x,) in accelerator.skip_first_batches(loader, skip) if skip else loader:
        with accelerator.accumulate(model):
            seen += x.flatten().tolist()
            accelerator.backward((model(x) * (x + torch.rand(1))).mean())
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return seen


def full_set(seed=0, **options):
    accelerator = Accelerator(cpu=True, seed=seed, **options)
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.arange(12.0).unsqueeze(1)), batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("stateful", [False, True])
def test_R1_raw_loop_goes_on_bit_for_bit(tmp_path, stateful):
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator, model, optimizer, loader, scheduler = full_set(dataloader_config=config)
    train(accelerator, model, optimizer, loader, scheduler)
    rest = []
    for index, (x,) in enumerate(loader):
        if index == 3:
            accelerator.save_state(tmp_path / "here")
        rest += x.flatten().tolist() if index >= 3 + stateful else []
        accelerator.backward((model(x) * (x + torch.rand(1))).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    rest += train(accelerator, model, optimizer, loader, scheduler)
    expected = weights(model), scheduler.get_last_lr()

    accelerator, model, optimizer, loader, scheduler = full_set(seed=99, dataloader_config=config)
    manifest = accelerator.load_state(tmp_path / "here")
    assert manifest["strategy"] == "single" and manifest["precision"] == "32-true"
    if stateful:  # the batch in hand when it was saved counts as seen: the rest of its step is for the user to redo
        return_to = train_one(accelerator, model, optimizer, scheduler, loader)
        assert return_to == rest[: len(return_to)]
        return
    seen = train(accelerator, model, optimizer, loader, scheduler, skip=3)
    seen += train(accelerator, model, optimizer, loader, scheduler)
    assert seen == rest
    assert torch.equal(weights(model), expected[0]) and scheduler.get_last_lr() == expected[1]


def train_one(accelerator, model, optimizer, scheduler, loader):
    (x,) = next(iter(loader))
    return x.flatten().tolist()


def test_files_of_a_checkpoint_and_its_manifest(tmp_path):
    accelerator, model, optimizer, loader, scheduler = full_set()
    train(accelerator, model, optimizer, loader, scheduler)
    path = accelerator.save_state(tmp_path / "here", metadata={"step": 6, "note": "six"})
    assert path == str(tmp_path / "here")
    names = {file.name for file in (tmp_path / "here").iterdir()}
    assert names == {
        "manifest.json", "model.safetensors", "optimizer-0.json", "optimizer-0.safetensors", "training.json",
        "rank-00000.json", "rank-00000.safetensors",
    }  # fmt: skip
    manifest = json.loads((tmp_path / "here" / "manifest.json").read_text())
    assert manifest["step"] == 6 and manifest["world_size"] == 1 and manifest["note"] == "six"


def test_weights_alone(tmp_path):
    accelerator, model, optimizer, loader, scheduler = full_set()
    train(accelerator, model, optimizer, loader, scheduler)
    accelerator.save_state(tmp_path / "all")
    accelerator.save_state(tmp_path / "weights", weights_only=True)
    assert {f.name for f in (tmp_path / "weights").iterdir()} == {"manifest.json", "model.safetensors"}
    for name in ("all", "weights"):
        accelerator2, model2, optimizer2, *_ = full_set(seed=1)
        accelerator2.load_state(tmp_path / name, weights_only=True)
        assert torch.equal(weights(model2), weights(model)) and not optimizer2.state


def test_other_objects_than_were_saved_are_an_error(tmp_path):
    accelerator, *_ = full_set()
    accelerator.save_state(tmp_path / "here")
    other = Accelerator(cpu=True)
    other.prepare(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)))
    with pytest.raises(ValueError, match="'optimizers': 1.*Received: {'optimizers': 0"):
        other.load_state(tmp_path / "here")


def test_strict_and_lenient_loading_of_weights(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Sequential(nn.Linear(1, 1)))
    accelerator.save_state(tmp_path / "here")
    other = Accelerator(cpu=True)
    other.prepare(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    with pytest.raises(RuntimeError, match="1.weight"):
        other.load_state(tmp_path / "here")
    other.load_state(tmp_path / "here", strict=False)


def test_options_of_loading(tmp_path):
    """Options that matter to pickles only hold anyway; others are refused."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Sequential(nn.Linear(1, 1)))
    accelerator.save_state(tmp_path / "here")
    accelerator.load_state(tmp_path / "here", load_kwargs={"weights_only": True, "map_location": "cpu", "strict": False})
    with pytest.raises(TypeError, match="Received: strickt=True"):
        accelerator.load_state(tmp_path / "here", load_kwargs={"strickt": True})


def test_saving_inside_a_window_is_warned_of(tmp_path, caplog):
    accelerator, model, optimizer, loader = prepared(gradient_accumulation_steps=2)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model.weight.sum())
            accelerator.save_state(tmp_path / "here")
    assert [record.args for record in caplog.records if "accumulation window" in record.message] == [(1,)]
    with accelerator.accumulate(model):
        accelerator.load_state(tmp_path / "here")
    assert accelerator.step == 0


class Counter:
    def __init__(self, value, per_rank=False):
        self.value, self.per_rank = value, per_rank

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_registered_objects(tmp_path):
    accelerator = Accelerator(cpu=True)
    shared, own = Counter({"a": [1, torch.ones(2)]}), Counter(7, per_rank=True)
    accelerator.register_for_checkpointing(shared, own)
    accelerator.save_state(tmp_path / "here")
    shared.value, own.value = None, None
    accelerator.load_state(tmp_path / "here")
    assert shared.value["a"][0] == 1 and shared.value["a"][1].tolist() == [1.0, 1.0] and own.value == 7
    with pytest.raises(ValueError, match="Item at index 0 .Half. without load_state_dict"):
        accelerator.register_for_checkpointing(type("Half", (), {"state_dict": lambda self: {}})())


def test_scaler_is_restored(tmp_path):
    accelerator = half()
    model, optimizer, _ = accelerator.prepare(*toy())
    accelerator.backward((model.weight * float("inf")).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "here")
    again = half()
    again.prepare(*toy())
    again.load_state(tmp_path / "here")
    assert again.scaler.get_scale() == 512.0 and again.skipped_steps == 1


def test_hooks_before_saving_and_loading(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(1, 1), nn.Linear(2, 2))
    calls = []

    def save_hook(models, weights, output_dir):
        calls.append((list(models), [sorted(state) for state in weights]))
        weights.pop()
        with open(f"{output_dir}/own.txt", "w") as file:
            file.write("mine")

    def load_hook(models, input_dir):
        calls.append((list(models), input_dir))
        models.pop()

    saving = accelerator.register_save_state_pre_hook(save_hook)
    loading = accelerator.register_load_state_pre_hook(load_hook)
    accelerator.save_state(tmp_path / "here")
    assert calls[0] == ([first, second], [["bias", "weight"]] * 2)
    assert (tmp_path / "here" / "own.txt").read_text() == "mine"
    assert not (tmp_path / "here" / "model_1.safetensors").exists()
    accelerator.load_state(tmp_path / "here")
    assert calls[1] == ([first, second], str(tmp_path / "here"))
    saving.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "there")
    assert (tmp_path / "there" / "model_1.safetensors").exists() and len(calls) == 2


def test_automatic_naming_keeps_the_newest(tmp_path):
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    counter = Counter(0)
    accelerator.register_for_checkpointing(counter)
    for value in range(12):
        counter.value = value
        accelerator.save_state()
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_10", "checkpoint_11"]
    assert accelerator.save_iteration == 12
    again = Accelerator(cpu=True, project_config=config)
    found = Counter(None)
    again.register_for_checkpointing(found)
    again.load_state()
    assert found.value == 11 and again.save_iteration == 12
    again.project_configuration.iteration = 11
    with pytest.raises(ValueError, match="checkpoint_11. Continue the numbers"):
        again.save_state()


def test_damaged_newest_is_reported_and_the_one_before_it_taken(tmp_path, caplog):
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    counter = Counter("old")
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state()
    counter.value = "new"
    accelerator.save_state()
    damaged = tmp_path / "checkpoints" / "checkpoint_1" / "training.json"
    damaged.write_text(damaged.read_text().replace("new", "wen"))
    accelerator.load_state()
    assert counter.value == "old" and "training.json" in caplog.text
    with pytest.raises(CheckpointError, match="training.json"):
        accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_1")


def test_places_have_to_be_known():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="output_dir, or automatic_checkpoint_naming"):
        accelerator.save_state()
    with pytest.raises(ValueError, match="input_dir, or automatic_checkpoint_naming"):
        accelerator.load_state()
    with pytest.raises(ValueError, match="Expected a checkpoint. Received: input_dir='nowhere', which is not there"):
        accelerator.load_state("nowhere")


def test_torchs_own_format_where_it_is_asked_for(tmp_path, caplog):
    accelerator, model, *_ = prepared()
    accelerator.save_model(model, tmp_path / "one", safe_serialization=False)
    assert torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True)["weight"].item() == 0.0
    large = accelerator.prepare(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))
    accelerator.save_model(large, tmp_path / "many", max_shard_size=450, safe_serialization=False)
    index = json.loads((tmp_path / "many" / "pytorch_model.bin.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    again = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    load_checkpoint_in_model(again, tmp_path / "many")
    assert torch.equal(again[1].weight, large[1].weight)
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert "safetensors and JSON in any case" in caplog.text and (tmp_path / "state" / "model.safetensors").exists()


def test_save_model_as_hugging_face_reads_it(tmp_path):
    from safetensors.torch import load_file

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight
            self.other = nn.Linear(100, 100)

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path / "one")
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert len({"embed.weight", "head.weight"} & set(stored)) == 1 and "other.weight" in stored
    accelerator.save_model(model, tmp_path / "many", max_shard_size="10KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


def test_C6_tied_weights_load_strictly(tmp_path):
    def tied():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[1].weight = net[0].weight
        return net

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tied())
    accelerator.save_state(tmp_path / "here")
    other = Accelerator(cpu=True)
    again = other.prepare(tied())
    other.load_state(tmp_path / "here")
    assert torch.equal(again[1].weight, model[0].weight) and again[1].weight is again[0].weight


def test_C6_module_compiled_inside_shows_no_wrapper_in_the_file(tmp_path):
    from safetensors.torch import load_file

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.compile(nn.Linear(2, 2), backend="eager")

    accelerator = Accelerator(cpu=True)
    model, optimizer = Outer(), None
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path / "here")
    assert sorted(load_file(tmp_path / "here" / "model.safetensors")) == ["net.bias", "net.weight"]
    assert "_orig_mod" not in (tmp_path / "here" / "optimizer-0.json").read_text()
    accelerator.load_state(tmp_path / "here")


def test_save(tmp_path):
    from safetensors.torch import load_file

    accelerator = Accelerator(cpu=True)
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1.0, 1.0]
    accelerator.save({"epoch": 3}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"epoch": 3}
    with pytest.raises(TypeError, match="Received: Counter"):
        accelerator.save(Counter(1), tmp_path / "x", safe_serialization=True)


# Letting go


@pytest.mark.parametrize("name", ["free_memory", "clear"])
def test_everything_prepared_is_let_go_of(name):
    accelerator, model, optimizer, loader = prepared(gradient_accumulation_steps=2, mixed_precision="bf16")
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).mean())
    dead = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(loader)]
    model, optimizer, loader = getattr(accelerator, name)(model, optimizer, loader)
    assert model is optimizer is loader is None
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3


def test_an_accelerator_itself_is_let_go_of():
    accelerator = Accelerator(cpu=True)
    dead = weakref.ref(accelerator)
    del accelerator
    gc.collect()
    assert dead() is None


# Trackers and profiles


class Notebook(GeneralTracker):
    name = "notebook"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.rows, self.config, self.finished = [], None, False

    @property
    def tracker(self):
        return self.rows

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **kwargs):
        self.rows.append((step, values, kwargs))

    def finish(self):
        self.finished = True


def test_trackers():
    notebook = Notebook()
    accelerator = Accelerator(cpu=True, log_with=notebook)
    accelerator.init_trackers("project", config={"lr": 0.1, "net": {"width": [3, 4]}})
    assert accelerator.get_tracker("notebook", unwrap=True) is notebook.rows
    with pytest.raises(ValueError, match="'notebook'"):
        accelerator.get_tracker("notebok")
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.log({"loss": 2.0}, step=4, log_kwargs={"notebook": {"commit": False}})
    accelerator.end_training()
    assert notebook.config == {"lr": 0.1, "net": {"width": [3, 4]}} and notebook.finished
    assert notebook.rows == [(3, {"loss": 1.0}, {}), (4, {"loss": 2.0}, {"commit": False})]


def test_unknown_trackers_are_told_at_once():
    with pytest.raises(ValueError, match="Received: log_with='tensorbord'. Did you mean 'tensorboard'"):
        Accelerator(cpu=True, log_with=["csv", "tensorbord"])


def test_profile_writes_a_trace(tmp_path):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"])])
    with accelerator.profile() as profiler:
        torch.ones(2) + 1
    assert profiler.key_averages()
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))):
        torch.ones(2) + 1
    assert "traceEvents" in json.loads((tmp_path / "traces" / "profile_0.json").read_text())


def test_without_engines_that_come_later():
    accelerator = Accelerator(cpu=True)
    loader = object()
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, None) is loader


def test_an_optimizer_that_steps_within_backward():
    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss, lr):
            loss.backward()
            for parameter in self.param_groups[0]["params"]:
                parameter.data -= lr * parameter.grad

    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="Expected a LOMO optimizer"):
        accelerator.lomo_backward(torch.ones(()), 0.5)
    weight = torch.nn.Parameter(torch.ones(1))
    accelerator.prepare(Lomo([weight], lr=1.0))
    accelerator.lomo_backward((3 * weight).sum(), 0.5)
    assert weight.item() == 1 - 0.5 * 3


def test_the_older_word_for_half_precision():
    assert Accelerator(cpu=True, fp16=True).mixed_precision == "fp16"
    assert Accelerator(cpu=True, fp16=False).mixed_precision == "no"
    with pytest.raises(ValueError, match="mixed_precision='bf16', fp16='fp16'"):
        Accelerator(cpu=True, mixed_precision="bf16", fp16=True)
