"""What else DeepSpeed offers, really run on two ranks; and what it cannot, with its exact error."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DeepSpeedPlugin, DummyOptim, DummyScheduler, GatheredParameters
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import AcceleratorState, PartialState
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs

pytestmark = pytest.mark.timeout(600)  # seconds on a machine of its own, minutes on a loaded one


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


def fresh(**arguments):
    GradientState._reset_state()
    PartialState._reset_state()
    return Accelerator(cpu=True, **arguments)


# Precision


def test_bf16_keeps_ranks_together_and_resumes_bit_for_bit(tmp_path):
    """The engine trains float32 weights beside those in bfloat16, and a checkpoint holds them."""

    def work(rank):
        found = []
        for stage, word in ((0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (2, "bf16-true")):
            accelerator = runs.accelerator(stage, precision=word)
            first = runs.trained(accelerator, 4, count=80)
            model, optimizer, loader = first["prepared"]
            assert next(accelerator.unwrap_model(model).parameters()).dtype is torch.bfloat16
            folder = str(tmp_path / f"{stage}-{word}")
            accelerator.save_state(folder)
            found.append((first["weights"], first["losses"], more(accelerator, model, optimizer), again(stage, word, folder)))
        return found

    def again(stage, word, folder):
        accelerator = runs.accelerator(stage, precision=word)
        model = runs.mlp()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        model, optimizer, loader = accelerator.prepare(
            model, runs.adamw(model), DataLoader(runs.data(80), batch_size=4)
        )
        accelerator.load_state(folder)
        return more(accelerator, model, optimizer)

    def more(accelerator, model, optimizer):
        x, y = runs.data(240).tensors
        for start in range(160, 200, 8):
            part = slice(start + 4 * accelerator.process_index, start + 4 * accelerator.process_index + 4)
            accelerator.backward(F.cross_entropy(model(x[part]).float(), y[part]))
            optimizer.step()
            optimizer.zero_grad()
        return runs.vector(accelerator.get_state_dict(model))

    expected = runs.plain(8, count=80)
    first, second = run(work, 2, timeout=200)
    for (weights, losses, after, resumed), (others, *_) in zip(first, second):
        assert torch.equal(weights, others) and torch.equal(after, resumed)
        assert losses == pytest.approx(expected["losses"], rel=0.1)


def test_float16_where_the_package_computes_in_it_on_this_processor_and_its_error_elsewhere():
    """From a scale of 2**20 some steps overflow; they are skipped and not counted."""

    def work(rank):
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            with pytest.raises(ValueError, match="Type fp16 is not supported on your device.*bf16-mixed"):
                runs.accelerator(2, precision="fp16")
            return None
        found = []
        for stage in (1, 2, 3):
            content = {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True, "initial_scale_power": 20}}
            accelerator = fresh(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content))
            first = runs.trained(accelerator, 4, max_norm=0.5)
            state = accelerator.precision.state_dict()
            found.append((first["losses"][-1], accelerator.skipped_steps, state["scale"], first["weights"]))
        return found

    first, second = run(work, 2, timeout=200)
    for (loss, skipped, scale, weights), (*_, others) in zip(first or [], second or []):
        assert loss < 1.3 and skipped > 0 and scale < 2**20
        assert torch.equal(weights, others)


def test_words_that_the_engine_cannot_compute_in_name_another():
    def work(rank):
        with pytest.raises(ValueError, match="64-true.*ddp"):
            runs.accelerator(2, precision="64-true")
        with pytest.raises(ValueError, match="bf16.enabled: True in .*, False in precision='32-true'"):
            fresh(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": True}}), mixed_precision="no")
        assert fresh(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": True}})).mixed_precision == "bf16"

    run(work, 1)


# Optimizers and schedulers


def test_optimizer_and_schedule_of_the_configuration():
    """A linear warm-up to 0.05 in 4 steps, which DeepSpeed begins at its second one; AdamW by torch, as DeepSpeed's own needs a compiler."""
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}},
        "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.5, "zero_optimization": {"stage": 2},
    }  # fmt: skip

    def work(rank):
        accelerator = fresh(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content))
        model = runs.mlp()
        optimizer = DummyOptim(model.parameters(), lr=0.05, weight_decay=0.01)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, DataLoader(runs.data(), batch_size=4), scheduler
        )
        rates = []
        for x, y in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return rates, runs.vector(accelerator.get_state_dict(model)), model.train_batch_size(), scheduler.state_dict()

    rates = [0.05 * min(max(step - 1, 0), 4) / 4 for step in range(20)]
    expected = runs.plain(
        8, max_norm=0.5, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(max(step - 1, 0), 4) / 4),
    )  # fmt: skip
    for found, weights, batch, state in run(work, 2, timeout=200):
        assert found == pytest.approx(rates) and batch == 8
        assert runs.far(weights, expected["weights"]) <= 1e-5
        assert state


def test_schedulers_of_the_script_and_of_a_callable_step_as_in_torch():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def work(rank, called):
        accelerator = fresh(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), step_scheduler_with_optimizer=False)
        model = runs.mlp()
        optimizer = runs.adamw(model)
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=schedule) if called else schedule(optimizer)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, DataLoader(runs.data(), batch_size=4)
        )
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return runs.vector(accelerator.get_state_dict(model)), scheduler.get_last_lr()[0]

    expected = runs.plain(8, schedule=schedule)["weights"]
    for found in run(lambda rank: [work(rank, False), work(rank, True)], 2, timeout=200):
        for weights, rate in found:
            assert runs.far(weights, expected) <= 1e-5 and rate == pytest.approx(0.05 * 0.9**20)


# Offload


def test_states_and_weights_offloaded_to_the_host():
    """With torch's optimizer, which DeepSpeed accepts where its own is not insisted on."""

    def work(rank):
        found = []
        for stage, weights in ((1, "none"), (2, "none"), (3, "cpu")):
            content = {
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
            }
            if weights == "cpu":
                content["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": False}
            accelerator = fresh(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content), gradient_accumulation_steps=2
            )
            found.append(runs.result(runs.trained(accelerator, 2, max_norm=0.5)))
        return found

    expected = runs.plain(8, max_norm=0.5)
    for stages in run(work, 2, timeout=200):
        for found in stages:
            assert runs.far(found["weights"], expected["weights"]) <= 1e-5
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def test_offload_to_a_disk_without_what_the_package_needs_for_it(tmp_path):
    def work(rank):
        import deepspeed

        deepspeed.ops.__compatible_ops__["async_io"] = False  # as it is without libaio
        options = dict(offload_optimizer_device="nvme", offload_optimizer_nvme_path=str(tmp_path))
        with pytest.raises(RuntimeError, match="Expected libaio.*async_io.*offload to 'cpu'"):
            runs.trained(runs.accelerator(3, **options), 4)

    run(work, 1)


# What two say differently (more in test_deepspeed_ways.py)


def test_accumulation_that_two_say_differently_is_refused():
    def work(rank):
        with pytest.raises(ValueError, match="Received: 4 in .*, 2 in the Accelerator"):
            fresh(deepspeed_plugin=DeepSpeedPlugin(gradient_accumulation_steps=4), gradient_accumulation_steps=2)
        accelerator = fresh(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 8}))
        with pytest.raises(ValueError, match="8 in the configuration, 4 in the loader's batch_size"):
            runs.trained(accelerator, 4)

    run(work, 1)


# Several models and several sets of options


def test_several_models_each_by_its_own_options():
    def work(rank):
        accelerator = fresh(deepspeed_plugins={"small": DeepSpeedPlugin(zero_stage=1), "big": DeepSpeedPlugin(zero_stage=3)})
        state = AcceleratorState()
        assert accelerator.deepspeed_plugin is state.get_deepspeed_plugin("small")
        student = runs.mlp()
        student, one, loader = accelerator.prepare(
            student, runs.adamw(student), DataLoader(runs.data(), batch_size=4)
        )
        state.select_deepspeed_plugin("big")
        assert accelerator.deepspeed_plugin.selected and not state.get_deepspeed_plugin("small").selected
        other = runs.mlp()
        other, two = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
        teacher = accelerator.prepare_model(runs.mlp(), evaluation_mode=True)
        with pytest.raises(ValueError, match="Pass accelerator.backward.loss, model=model."):
            accelerator.backward(other(torch.zeros(2, 6)).sum())
        for x, y in loader:
            with torch.no_grad():
                soft = teacher(x).softmax(-1)
            for model, optimizer in ((student, one), (other, two)):
                loss = F.cross_entropy(model(x), y) + 0 * soft.sum()
                accelerator.backward(loss, model=model)
                optimizer.step()
                optimizer.zero_grad()
        stages = [model.zero_optimization_stage() for model in (student, other)]
        return stages, [runs.vector(accelerator.get_state_dict(model)) for model in (student, other, teacher)]

    adamw = runs.plain(8)["weights"]
    sgd = runs.plain(8, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))["weights"]
    for stages, (student, other, teacher) in run(work, 2, timeout=200):
        assert stages == [1, 3]
        assert runs.far(student, adamw) <= 1e-5 and runs.far(other, sgd) <= 1e-5
        assert torch.equal(teacher, runs.vector(runs.mlp().state_dict()))


# Models


def test_hugging_face_model_is_partitioned_as_it_is_loaded_and_saved_whole(tmp_path):
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32, n_positions=16)
    torch.manual_seed(0)
    source = transformers.GPT2LMHeadModel(config)
    source.save_pretrained(tmp_path / "hub")
    content = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                     "stage3_param_persistence_threshold": "auto"}}  # fmt: skip
    tokens = torch.randint(0, 32, (8, 12), generator=torch.Generator().manual_seed(3))

    def plainly():
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hub").train(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return runs.vector(model.state_dict())

    def work(rank):
        accelerator = fresh(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content))
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hub")
        partitioned = [parameter.numel() for parameter in model.parameters()]
        with GatheredParameters(model.transformer.wte.weight):
            assert torch.equal(model.transformer.wte.weight, source.transformer.wte.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        accelerator.unwrap_model(model).train(False)
        own = tokens[4 * rank : 4 * rank + 4]
        for _ in range(3):
            accelerator.backward(model(input_ids=own, labels=own).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, tmp_path / "saved")
        return partitioned, runs.vector(accelerator.get_state_dict(model)), model.zero_optimization_stage()

    expected = plainly()
    for partitioned, weights, stage in run(work, 2, timeout=200):
        assert set(partitioned) == {0} and stage == 3
        assert runs.far(weights, expected) <= 1e-5
    from safetensors.torch import load_file

    read = load_file(tmp_path / "saved" / "model.safetensors")
    fresh_model = transformers.GPT2LMHeadModel(config)
    missing, unexpected = fresh_model.load_state_dict(read, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    fresh_model.tie_weights()
    assert runs.far(runs.vector(fresh_model.state_dict()), expected) <= 1e-5


def test_gathering_a_model_can_be_refused():
    def work(rank):
        accelerator = runs.accelerator(3, zero3_save_16bit_model=False)
        with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save.*Received: False"):
            runs.trained(accelerator, 4, count=16)

    run(work, 1)


class Experts(nn.Module):
    """One of two experts for each batch, which its attribute `chosen` names."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.chosen = 0

    def forward(self, x):
        return self.experts[self.chosen](x)


def test_experts_of_a_moe_layer_are_gathered_together():
    """The two ranks choose different experts, for which ZeRO-3 would wait for ever."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), Experts(), nn.Linear(6, 3))

    def work(rank):
        accelerator = runs.accelerator(3, transformer_moe_cls_names="Experts")
        mixture = model()
        mixture, optimizer = accelerator.prepare(mixture, torch.optim.SGD(mixture.parameters(), lr=0.1))
        for step in range(4):
            accelerator.unwrap_model(mixture)[1].chosen = (rank + step) % 2
            x = torch.full((2, 6), 1.0 + rank)
            accelerator.backward(F.cross_entropy(mixture(x), torch.tensor([0, 1])))
            optimizer.step()
            optimizer.zero_grad()
        return runs.vector(accelerator.get_state_dict(mixture))

    mixture = model()
    optimizer = torch.optim.SGD(mixture.parameters(), lr=0.1)
    for step in range(4):
        for rank in range(2):
            mixture[1].chosen = (rank + step) % 2
            x = torch.full((2, 6), 1.0 + rank)
            (F.cross_entropy(mixture(x), torch.tensor([0, 1])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run(work, 2, timeout=200):
        assert runs.far(weights, runs.vector(mixture.state_dict())) <= 1e-5

    def wrongly(rank):
        accelerator = runs.accelerator(3, transformer_moe_cls_names="Absent")
        with pytest.raises(ValueError, match="'Absent'.*it has .*Linear"):
            runs.trained(accelerator, 4)

    run(wrongly, 1)


# DeepSpeed's own format


def test_native_checkpoints_only_by_name(tmp_path):
    def work(rank):
        accelerator = runs.accelerator(2)
        first = runs.trained(accelerator, 4, count=40)
        model, optimizer, loader = first["prepared"]
        accelerator.strategy.save_native(model, str(tmp_path / "native"), tag="one")
        for parameter in accelerator.unwrap_model(model).parameters():
            parameter.data.zero_()
        accelerator.strategy.load_native(model, str(tmp_path / "native"), tag="one")
        return first["weights"], runs.vector(accelerator.get_state_dict(model))

    for before, after in run(work, 2, timeout=200):
        assert torch.equal(before, after)
    assert (tmp_path / "native" / "one").is_dir()


# What it cannot do


def test_what_the_engine_cannot_do_names_the_alternative():
    def work(rank):
        accelerator = runs.accelerator(2)
        model = runs.mlp()
        with pytest.raises(ValueError, match="one prepare.. call.*an optimizer without its model"):
            accelerator.prepare(runs.adamw(model))
        with pytest.raises(ValueError, match="one optimizer for a model.*strategy='ddp'"):
            accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[2].parameters(), 0.1))
        prepared = accelerator.prepare(runs.mlp())
        with pytest.raises(ValueError, match="a model without its optimizer"):
            accelerator.backward(prepared(torch.zeros(2, 6)).sum())
        model, optimizer, loader = runs.trained(accelerator, 4, count=16, model=model)["prepared"]
        with pytest.raises(ValueError, match="clipping by value.*strategy='ddp'"):
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        with pytest.raises(ValueError, match="Expected norm_type=2"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
        with pytest.raises(ValueError, match="all trained parameters of one prepared model"):
            accelerator.clip_grad_norm_([next(model.parameters())], 1.0)
        with pytest.raises(ValueError, match="before prepare.., or use strategy"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        loss = F.cross_entropy(model(torch.zeros(2, 6)), torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="Received: create_graph"):
            accelerator.backward(loss, create_graph=True)
        accelerator.backward(loss)
        with pytest.raises(RuntimeError, match="optimizer.step.. between two windows"):
            accelerator.backward(F.cross_entropy(model(torch.zeros(2, 6)), torch.tensor([0, 1])))
        optimizer.zero_grad()  # forgets what nobody stepped with
        before = runs.vector(accelerator.get_state_dict(model))
        optimizer.step()
        assert torch.equal(before, runs.vector(accelerator.get_state_dict(model)))
        with pytest.raises(ValueError, match="Expected a loss with a graph"):
            accelerator.backward(torch.zeros(()))

    run(work, 2, timeout=200)
