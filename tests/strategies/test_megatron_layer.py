"""The layer under which megatron-core runs on the CPU, shown with megatron-core used by hand."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import megatron_gpt as tiny
from drivetrain.tests.strategies.megatron_cpu import OnCPU

pytest.importorskip("megatron.core")

STEPS, SAMPLES, MICRO = 3, 8, 2


def by_hand(rank: int, tp: int = 1, pp: int = 1) -> list[float]:
    """Trains by Megatron's DDP, optimizer and schedules, called one by one."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with OnCPU():
        parallel_state.initialize_model_parallel(tp, pp)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = tiny.config(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32
        )
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        model = tiny.gpt(config, first, last)
        tiny.fill(model)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.01, clip_grad=0.0), [ddp])
        config.finalize_model_grads_func = finalize_model_grads
        losses = []
        for step in range(STEPS):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=_forward, data_iterator=iter(tiny.tokens(SAMPLES, step).split(MICRO)), model=[ddp],
                num_microbatches=SAMPLES // MICRO, seq_length=tiny.SEQUENCE, micro_batch_size=MICRO,
            )  # fmt: skip
            assert optimizer.step()[0]
            losses.append(sum(reports) / len(reports) if reports else None)
        return losses


def _forward(batches, model):
    output = model(**tiny.inputs(next(batches)))
    return output, lambda found: (loss := tiny.loss(found), float(loss))


@cache
def plain() -> list[float]:
    """The same by a plain loop over the whole model."""
    return run(_plain, 1)[0]


def _plain(rank: int) -> list[float]:
    from megatron.core import parallel_state, tensor_parallel

    with OnCPU():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model = tiny.gpt(tiny.config())
        tiny.fill(model)
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        losses = []
        for step in range(STEPS):
            loss = tiny.loss(model(**tiny.inputs(tiny.tokens(SAMPLES, step))))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_megatron_core_by_hand_equals_a_plain_loop(tp, pp):
    found = run(by_hand, tp * pp, tp, pp)
    assert found[-1] == pytest.approx(plain(), rel=1e-5)
    assert plain()[-1] != pytest.approx(plain()[0], rel=1e-3)
