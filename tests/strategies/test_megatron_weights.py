"""Weights of transformers in Megatron's chunks and back: the same logits, and the same bits."""

from __future__ import annotations

import contextlib
import functools
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from drivetrain.strategies import megatron_weights  # noqa: E402
from drivetrain.strategies.megatron_models import architecture  # noqa: E402
from drivetrain.strategies.megatron_weights_names import entries  # noqa: E402
from drivetrain.tests.distributed import run  # noqa: E402
from drivetrain.tests.strategies import megatron_families as families  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # seconds on a machine of its own, minutes on a loaded one
STATE = "megatron.core.parallel_state"
ALL = list(families.FAMILIES)
GPTS = [name for name in ALL if "bert" not in name and "t5" not in name]
# Place of each case: tensor parallel, pipeline, virtual stages, sequence parallel, expert parallel.
CASES = [
    *[(name, 1, 1, 1, False, 1) for name in ALL],
    *[(name, 2, 1, 1, False, 1) for name in ALL],
    *[(name, 2, 1, 1, True, 1) for name in ALL if "bert" not in name],
    *[(name, 1, 2, 1, False, 1) for name in ALL if "t5" not in name],
    ("llama", 1, 2, 2, False, 1), ("gpt2", 1, 2, 2, False, 1), ("mixtral", 1, 1, 1, False, 2),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    """Ranks are forked from here: what they import is imported once."""
    for module in ("transformers", "drivetrain.strategies.megatron_chunks", "drivetrain.strategies.megatron_families"):
        import_module(module)
    families.model("llama")


@contextlib.contextmanager
def places(tensor=1, pipeline=1, virtual=1, sequence=False, expert=1):
    """Megatron's groups, and the fields of a config that go with them."""
    state, random = import_module(STATE), import_module("megatron.core.tensor_parallel.random")
    with OnCPU():
        state.initialize_model_parallel(
            tensor, pipeline, expert_model_parallel_size=expert, expert_tensor_parallel_size=tensor,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        )  # fmt: skip
        random.model_parallel_cuda_manual_seed(1)
        yield {
            "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None, "sequence_parallel": sequence,
            "expert_model_parallel_size": expert, "expert_tensor_parallel_size": tensor,
            "pipeline_dtype": torch.float32, "use_cpu_initialization": True,
        }  # fmt: skip
        state.destroy_model_parallel()


def chunks_of(arch, fields):
    """This rank's chunks, in evaluation mode."""
    config = arch.config(**fields)
    stages, rank = config.pipeline_model_parallel_size, import_module(STATE).get_pipeline_model_parallel_rank()
    virtual = config.virtual_pipeline_model_parallel_size
    count = virtual or 1
    return [
        arch.build(config, pre_process=rank == 0 and number == 0, vp_stage=number if virtual else None,
                   post_process=rank == stages - 1 and number == count - 1).eval()
        for number in range(count)
    ]  # fmt: skip


def outputs(arch, chunks, inputs):
    """The outputs of the last stage, as a list, with the vocabulary of all ranks; None on other stages."""
    state = import_module(STATE)
    stages, rank = state.get_pipeline_model_parallel_world_size(), state.get_pipeline_model_parallel_rank()
    hidden = torch.zeros(inputs["input_ids"].shape[1], len(inputs["input_ids"]), arch.fields["hidden_size"])
    for stage in range(stages * len(chunks)):
        if rank == stage % stages:
            if stage:
                dist.recv(hidden, (stage - 1) % stages) if stages > 1 else None
                chunks[stage // stages].set_input_tensor(hidden.clone())
            found = arch.batch(inputs).run(chunks[stage // stages])
            if stage + 1 < stages * len(chunks):
                dist.send(found.contiguous(), (stage + 1) % stages)
    if rank < stages - 1:
        return None
    first, *rest = found if isinstance(found, tuple) else (found,)
    group = state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(first) for _ in range(group.size())]
    dist.all_gather(parts, first.contiguous(), group=group)
    return [torch.cat(parts, dim=-1)[..., : families.VOCABULARY], *[one for one in rest if one is not None]]


@pytest.mark.parametrize("name, tensor, pipeline, virtual, sequence, expert", CASES)
def test_logits_are_those_of_transformers_and_weights_come_back(name, tensor, pipeline, virtual, sequence, expert):
    model, inputs = families.model(name), families.batch(name)
    expected, state = families.logits(name, model, inputs), model.state_dict()

    def work(rank):
        with places(tensor, pipeline, virtual, sequence, expert) as fields, torch.no_grad():
            arch = architecture(model.config)
            chunks = chunks_of(arch, fields)
            megatron_weights.load(arch, chunks, model)
            return outputs(arch, chunks, inputs), megatron_weights.weights(arch, chunks)

    found = run(work, max(tensor * pipeline, expert))
    for logits in [one for one, _ in found if one is not None]:
        for mine, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    for _, weights in found:
        assert all(torch.equal(tensor, state[key]) for key, tensor in weights.items())
        left = {key for key in set(state) - set(weights)}
        same = {tensor.data_ptr() for key, tensor in state.items() if key in weights}
        assert all(state[key].data_ptr() in same for key in left)  # tied to one that is there


@pytest.mark.parametrize("name, tensor, pipeline, expert", [
    ("llama", 2, 1, 1), ("gpt2", 2, 1, 1), ("bert", 1, 2, 1), ("t5", 2, 1, 1), ("mixtral", 1, 1, 2), ("qwen3", 1, 2, 1),
])  # fmt: skip
def test_folders_of_transformers_are_read_and_written(name, tensor, pipeline, expert, tmp_path):
    """Each rank reads its part of each tensor; what comes back has the names and bits of what was read."""
    model = families.model(name)
    model.save_pretrained(tmp_path / "given", max_shard_size="20KB")

    def work(rank):
        with places(tensor, pipeline, expert=expert) as fields, counted() as read:
            arch = architecture(str(tmp_path / "given"), binary_head=name == "bert")
            chunks = chunks_of(arch, fields)
            megatron_weights.load(arch, chunks, tmp_path / "given")
            megatron_weights.save_pretrained(arch, chunks, tmp_path / "saved")
            parameters = megatron_weights.named(chunks)
            padded = padding(arch, megatron_weights.Place.here(), parameters)
            return sum(read), sum(one.numel() for one in parameters.values()) - padded

    for read, held in run(work, max(tensor * pipeline, expert)):
        assert read == held
    loaded, report = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state = model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.state_dict().items())


@contextlib.contextmanager
def counted():
    """The numbers of elements that are read from files."""
    kind, read = megatron_weights._Slice, []
    plain = kind.__getitem__

    def count(self, index):
        tensor = plain(self, index)
        read.append(tensor.numel())
        return tensor

    kind.__getitem__ = count
    try:
        yield read
    finally:
        kind.__getitem__ = plain


def padding(arch, place, parameters):
    """How many elements of a rank are padding of the vocabulary."""
    found = 0
    for entry in entries(arch):
        if entry.kind == "vocabulary" and entry.name in parameters:
            parameter = parameters[entry.name]
            real = min(max(arch.vocab_size - place.rank * len(parameter), 0), len(parameter))
            found += parameter[real:].numel()
    return found


def test_tensors_of_other_shapes_and_missing_ones_are_refused():
    model = families.model("llama")

    def work(rank, change):
        with places() as fields:
            arch = architecture(model.config)
            chunks, state = chunks_of(arch, fields), model.state_dict()
            change(state)
            with pytest.raises((KeyError, ValueError)) as caught:
                megatron_weights.load(arch, chunks, state)
            return type(caught.value).__name__, str(caught.value)

    def drop(state):
        del state["model.layers.2.self_attn.k_proj.weight"]

    def cut(state):
        state["model.norm.weight"] = state["model.norm.weight"][:8]

    kind, message = run(functools.partial(work, change=drop), 1)[0]
    assert kind == "KeyError" and "Expected model.layers.2.self_attn.k_proj.weight in the weights" in message
    kind, message = run(functools.partial(work, change=cut), 1)[0]
    assert kind == "ValueError" and "Expected decoder.final_layernorm.weight as (16,). Received: (8,)" in message


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="Expected weights in safetensors"):
        megatron_weights.Source(tmp_path)


def test_only_models_of_hugging_face_configs_are_saved_for_transformers(tmp_path):
    arch = architecture({"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8,
                         "sequence_length": 8})  # fmt: skip
    with pytest.raises(ValueError, match="Expected a model of a Hugging Face config"):
        megatron_weights.save_pretrained(arch, [], tmp_path)
