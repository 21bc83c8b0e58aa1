"""What drivetrain costs beside megatron-core used by hand: `python tests/benchmarks/megatron_engine.py [--rounds 20]`.

Both train the same GPT on the same two ranks (on the CPU, under the layer of the tests), in turns of 10 steps, so that
whatever else the machine does hits both. Time is process CPU time of rank 0; a ratio is taken within each turn, and its
median shown beside the bar of 1.03. Memory is what each adds to the process at its peak, each in ranks of its own.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch

from drivetrain import Accelerator, MegatronModel, MegatronStrategy, TrainModule
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import megatron_gpt as tiny
from drivetrain.tests.strategies import megatron_runs
from drivetrain.tests.strategies.megatron_cpu import OnCPU

BAR, STEPS, WARM_UP, SAMPLES = 1.03, 10, 2, 16
SIZES = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8}
CASES = {
    "tp": {"tp_degree": 2},
    "pp": {"pp_degree": 2, "num_micro_batches": 4},
    "distributed optimizer": {"use_distributed_optimizer": True},
}


class Wide(tiny.Tiny):
    """The tests' GPT, wide enough that its layers are what costs."""

    num_layers = SIZES["num_layers"]

    def config(self, **engine):
        return tiny.config(**{**SIZES, **engine})

    def build(self, config, *, pre_process, post_process, vp_stage):
        return tiny.gpt(config, pre_process, post_process, vp_stage)


class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = MegatronModel(Wide())

    def training_step(self, batch, index):
        total, count = self.model.architecture.batch(batch).loss(self.model(batch))
        return total / count


def by_hand(options, batch):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    own = MegatronModel(Wide())  # makes this rank's chunk by the degrees that are set up
    config, shared = own.config, options.get("use_distributed_optimizer", False)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=shared), own.chunks[0])
    settings = OptimizerConfig(lr=1e-3, clip_grad=0.0, use_distributed_optimizer=shared)
    optimizer = get_megatron_optimizer(settings, [ddp])
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, ddp.no_sync
    parts = options.get("num_micro_batches", 1)

    def forward(batches, model):
        made = tiny.Batch(next(batches))

        def loss(output):
            total, count = made.loss(output)
            return total / count, {"loss": (total / count).detach()}

        return made.run(model), loss

    def turn():
        for _ in range(STEPS):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward, data_iterator=iter(batch.chunk(parts)), model=[ddp], num_microbatches=parts,
                seq_length=tiny.SEQUENCE, micro_batch_size=len(batch) // parts,
            )  # fmt: skip
            optimizer.step()

    return turn


def by_drivetrain(accelerator, batch):
    module = Module()
    module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    step = accelerator.entry(module, "training_step")

    def turn():
        for _ in range(STEPS):
            with accelerator.accumulate(module):
                accelerator.backward(step(batch, 0))
                optimizer.step()
                optimizer.zero_grad()

    return turn


def ratios(rank, options, rounds):
    with OnCPU():
        accelerator = Accelerator(cpu=True, strategy=MegatronStrategy(**options))
        batch = tiny.tokens(SAMPLES // accelerator.strategy.data_world.size)
        turns = {"hand": by_hand(options, batch), "drivetrain": by_drivetrain(accelerator, batch)}
        found = []
        for number in range(rounds + WARM_UP):
            times = {}
            for name in ("hand", "drivetrain") if number % 2 else ("drivetrain", "hand"):
                start = time.process_time()
                turns[name]()
                times[name] = time.process_time() - start
            if number >= WARM_UP:
                found.append(times["drivetrain"] / times["hand"])
        return found


def peak(rank, options, name):
    with OnCPU():
        accelerator = Accelerator(cpu=True, strategy=MegatronStrategy(**options))
        batch = tiny.tokens(SAMPLES // accelerator.strategy.data_world.size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (by_hand(options, batch) if name == "hand" else by_drivetrain(accelerator, batch))()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    megatron_runs.preload()
    for name, options in CASES.items():
        found = sorted(run(ratios, 2, options, rounds, group=False, timeout=1200)[0])
        memory = {who: run(peak, 2, options, who, group=False, timeout=600)[0] for who in ("hand", "drivetrain")}
        print(
            f"{name}: time {statistics.median(found):.3f} (quartiles {found[len(found) // 4]:.3f} to "
            f"{found[-1 - len(found) // 4]:.3f}), memory {memory['drivetrain'] / memory['hand']:.3f} "
            f"({memory['drivetrain'] // 1024} MiB), bar {BAR}",
            flush=True,
        )


if __name__ == "__main__":
    main()
