"""What Megatron refuses, and what it tells to use instead."""

from __future__ import annotations

import re
import sys

import pytest
import torch

import drivetrain
from drivetrain import Accelerator, GradScalerKwargs, MegatronLMPlugin, ParallelismConfig
from drivetrain.strategies import megatron_groups
from drivetrain.tests.distributed import RankFailed, run

pytest.importorskip("megatron.core")

from drivetrain import MegatronModel, MegatronStrategy  # noqa: E402
from drivetrain.tests.strategies import megatron_gpt as tiny  # noqa: E402
from drivetrain.tests.strategies import megatron_runs as runs  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


# The options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp_degree": 0}, "Expected tp_degree to be 1 or more. Received: tp_degree=0."),
        ({"pp_degree": 1.5}, "Received: pp_degree=1.5."),
        ({"num_micro_batches": True}, "Received: num_micro_batches=True."),
        ({"recompute_granularity": "some"}, "Expected recompute_granularity of full, selective. Received"),
        ({"recompute_granularity": "full"}, "Expected recompute_method"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_activations": True}, "one granularity"),
        ({"sequence_parallelism": True}, "Expected tp_degree of 2 or more"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "Expected pp_degree of 2 or more"),
        ({"gradient_clipping": -1.0}, "Use 0 for none"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "Expected optimizer_cpu_offload"),
        ({"pipeline_model_parallel_split_rank": 1}, "no part of megatron-core"),
        ({"use_custom_fsdp": True}, "strategy='fsdp'"),
        ({"tensorboard_dir": "logs"}, "log_with='tensorboard'"),
        ({"set_all_logging_options": True}, "log_with"),
        ({"custom_prepare_model_function": print}, "Prepare a MegatronModel of your own"),
        ({"custom_model_provider_function": print}, "Give MegatronModel an object with config, build and batch"),
        ({"encoder_seq_length": 8}, "Batches have lengths of their own"),
        ({"lr_mult": 2.0}, "Expected scale_lr_cond with lr_mult"),
        ({"attention_backend": "quick"}, "Expected attention_backend of flash"),
        ({"consumed_samples": [8, 0, 0]}, "Use load_state, or skip_first_batches"),
        ({"lr_decay_style": "steep"}, "Expected lr_decay_style of constant"),
    ],
    ids=str,
)
def test_options_that_do_not_exist_or_contradict_each_other(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MegatronLMPlugin(**options)


def test_options_come_once_and_degrees_from_megatron_alone():
    with pytest.raises(ValueError, match=r"Received: plugin and \['tp_degree'\]"):
        MegatronStrategy(MegatronLMPlugin(), tp_degree=2)
    with pytest.raises(ValueError, match="Received: tp_size=2 in a ParallelismConfig"):
        MegatronLMPlugin().strategy(ParallelismConfig(tp_size=2))
    with pytest.raises(TypeError, match="tensor_degree"):
        MegatronStrategy(tensor_degree=2)
    with pytest.raises(ValueError, match="arguments of megatron-core. Received: 'num_layrs'. Did you mean 'num_layers'"):
        MegatronStrategy(other_megatron_args={"num_layrs": 2})
    with pytest.raises(ValueError, match="Received: overlap_grad_reduce=True"):
        MegatronStrategy(other_megatron_args={"overlap_grad_reduce": True})


def test_a_launch_says_what_arguments_do_not(monkeypatch):
    for name, value in (("TP_DEGREE", "4"), ("SEQUENCE_PARALLELISM", "true"), ("GRADIENT_CLIPPING", "0.5"),
                        ("RECOMPUTE_GRANULARITY", "selective"), ("HIDDEN_DROPOUT", "0.1"), ("ATTENTION_BACKEND", "None")):
        monkeypatch.setenv(f"MEGATRON_LM_{name}", value)
    plugin = MegatronLMPlugin(pp_degree=2)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.sequence_parallelism) == (4, 2, True)
    assert (plugin.gradient_clipping, plugin.recompute_granularity) == (0.5, "selective")
    assert (plugin.hidden_dropout, plugin.attention_backend, plugin.num_micro_batches) == (0.1, None, 1)
    assert MegatronLMPlugin(tp_degree=2).tp_degree == 2  # nobody has set it in a launch file
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    engine = drivetrain.strategies.create()
    assert type(engine) is MegatronStrategy and engine.plugin.tp_degree == 4
    assert type(drivetrain.strategies.create("megatron")) is MegatronStrategy
    with pytest.raises(ValueError, match="Expected the engine of the launch"):
        drivetrain.strategies.create("ddp")


def test_defaults_are_accelerates():
    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches, plugin.gradient_clipping) == (1, 1, 1, 1.0)
    assert plugin.consumed_samples == [0, 0, 0] and not plugin.clips
    assert MegatronStrategy().plugin.gradient_clipping == 0.0
    assert MegatronStrategy(gradient_clipping=2.0).plugin.gradient_clipping == 2.0


# The machine


def test_a_machine_without_cuda_is_told_what_to_use(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(ValueError, match="Expected a CUDA device for Megatron.*Use strategy='tp', 'pp' or 'fsdp'"):
        Accelerator(cpu=True, strategy="megatron")


def test_the_missing_package_is_told_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", None)
    with pytest.raises(ImportError, match=r"Expected the package megatron-core.*pip install 'drivetrain\[megatron\]'"):
        Accelerator(cpu=True, strategy="megatron")


def refused(options, size, said):
    with OnCPU(), pytest.raises(ValueError, match=re.escape(said)):
        megatron_groups.check(torch.device("cpu"), MegatronLMPlugin(**options), size)


def test_ranks_and_packages_that_do_not_fit_the_degrees():
    refused({"tp_degree": 2, "pp_degree": 2}, 6, "that 4 divides (tensor_model_parallel_size=2, pipeline_model")
    if not drivetrain.has_package("transformer_engine"):
        refused({"context_parallel_size": 2}, 2, "Expected Transformer Engine for context_parallel_size")
    refused_device = "Received: device='meta'"
    with OnCPU(), pytest.raises(ValueError, match=refused_device):
        megatron_groups.check(torch.device("meta"), MegatronLMPlugin(), 1)


# A run


def accelerator(**options):
    return Accelerator(cpu=True, strategy=MegatronStrategy(**options))


def raises(kind, said, function):
    """What a function raises on one rank of Megatron."""

    def work(rank):
        with OnCPU(), pytest.raises(kind, match=re.escape(said)):
            function()

    run(work, 1, group=False)


def prepared(module=None, **options):
    made = accelerator(**options)
    own = module or runs.Module()
    own.configure_model()
    optimizer = own.configure_optimizers()["optimizer"]
    return made, *made.prepare(own, optimizer)


def test_a_model_needs_megatrons_ranks():
    with pytest.raises(RuntimeError, match="Expected a model of Megatron in a run by Megatron"):
        MegatronModel(tiny.Tiny()).build()
    with pytest.raises(RuntimeError, match="Expected a prepared MegatronModel"):
        MegatronModel(tiny.Tiny())(tiny.tokens(2))


def test_modules_that_are_not_megatrons():
    raises(ValueError, "Received: Linear without one", lambda: accelerator().prepare(torch.nn.Linear(2, 2)))

    def beside():
        made, module = accelerator(), runs.Module()
        module.configure_model()
        module.head = torch.nn.Linear(2, 2)
        made.prepare(module)

    raises(ValueError, "Received: head.weight, head.bias beside it", beside)

    def two():
        made, module = accelerator(), torch.nn.ModuleList([MegatronModel(tiny.Tiny()), MegatronModel(tiny.Tiny())])
        made.prepare(module)

    raises(ValueError, "Expected one MegatronModel in a module. Received: 2", two)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.Adagrad(p, 0.1), "Received: Adagrad. Use torch's Adam, AdamW or SGD"),
        (lambda p: torch.optim.AdamW(list(p)[1:], 0.1), "Expected all trained parameters"),
    ],
    ids=["kind", "a part"],
)
def test_optimizers_that_megatron_does_not_have(make, said):
    def work():
        made, module = accelerator(), runs.Module()
        module.configure_model()
        made.prepare(module, make(module.parameters()))

    raises(ValueError, said, work)


def test_what_schedules_and_optimizers_of_megatron_cannot():
    def by_value():
        made, module, optimizer = prepared()
        made.clip_grad_value_(module.parameters(), 1.0)

    raises(ValueError, "Expected clipping by norm", by_value)

    def other_norm():
        made, module, optimizer = prepared()
        made.clip_grad_norm_(module.parameters(), 1.0, 1)

    raises(ValueError, "Expected norm_type=2", other_norm)

    def some():
        made, module, optimizer = prepared()
        made.clip_grad_norm_(list(module.parameters())[:2], 1.0)

    raises(ValueError, "all trained parameters of its model", some)

    def twice():
        made, module, optimizer = prepared(gradient_clipping=2.0)
        made.clip_grad_norm_(module.parameters(), 1.0)

    raises(ValueError, "Received: gradient_clipping=2.0 in Megatron's options, max_norm=1.0 in the script", twice)

    def closure():
        made, module, optimizer = prepared()
        optimizer.step(lambda: 1.0)

    raises(ValueError, "Expected no closure", closure)

    def by_hand():
        made, module, optimizer = prepared()
        made.entry(module, "training_step", manual=True)

    raises(ValueError, "Expected automatic optimization", by_hand)

    def another_loss():
        made, module, optimizer = prepared()
        made.backward(torch.ones((), requires_grad=True) * 2)

    raises(ValueError, "Expected the loss of a training step", another_loss)

    def past_the_schedule():
        made, module, optimizer = prepared()
        module.model(tiny.tokens(2))

    raises(RuntimeError, "Expected a training step through Megatron's schedule", past_the_schedule)

    def two_windows():
        made, module, optimizer = prepared()
        step = made.entry(module, "training_step")
        for _ in range(2):
            made.backward(step(tiny.tokens(2), 0)["loss"])

    raises(RuntimeError, "Expected optimizer.step() between two windows", two_windows)
    raises(NotImplementedError, "join_uneven_inputs", lambda: accelerator().join_uneven_inputs([]).__enter__())


@pytest.mark.parametrize(("step", "said"), [
    (lambda model, batch: None, "Expected a step that returns a loss"),
    (lambda model, batch: torch.ones(()), "Received: one that never does"),
    (lambda model, batch: model(batch).mean() + model(batch).mean(), "Received: a second one"),
], ids=["no loss", "no call", "two calls"])  # fmt: skip
def test_steps_that_a_schedule_cannot_run(step, said):
    class Other(runs.Module):
        def training_step(self, batch, index):
            return step(self.model, batch)

    def work():
        made, module, optimizer = prepared(Other())
        made.entry(module, "training_step")(tiny.tokens(2), 0)

    raises((TypeError, ValueError), said, work)


@pytest.mark.parametrize("word", ["bf16-true", "16-true", "64-true"])
def test_precisions_that_megatron_does_not_have(word):
    def work():
        Accelerator(cpu=True, strategy="megatron", mixed_precision=word)

    raises(ValueError, "Expected precision of 32-true, bf16-mixed, 16-mixed for Megatron", work)


def test_overflows_are_skipped_and_counted():
    def work(rank):
        with OnCPU():
            made = Accelerator(cpu=True, strategy="megatron", mixed_precision="fp16",
                               kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40)])  # fmt: skip
            module = runs.Module()
            module.configure_model()
            before = [parameter.detach().clone() for parameter in module.parameters()]
            module, optimizer = made.prepare(module, module.configure_optimizers()["optimizer"])
            made.backward(made.entry(module, "training_step")(tiny.tokens(4), 0)["loss"])
            optimizer.step()
            same = all(torch.equal(one, other.half()) for one, other in zip(module.parameters(), before))
            return made.optimizer_step_was_skipped, made.skipped_steps, same, made.precision.state_dict()["scale"]

    assert run(work, 1, group=False) == [(True, 1, True, 2.0**39)]


def test_layers_that_do_not_go_into_virtual_stages():
    def work(rank):
        with OnCPU():
            prepared(pp_degree=2, num_layers_per_virtual_pipeline_stage=3)

    with pytest.raises(RankFailed, match="Expected layers for equal virtual stages. Received: 4 layers, pp_degree=2"):
        run(work, 2, group=False)
