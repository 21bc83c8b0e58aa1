"""How a Trainer comes to its processes: they are there, the script is started again, or a function is forked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..strategies.environment import detect
from ..strategies.world import World
from .metrics import Metrics

if TYPE_CHECKING:
    from ..strategies.environment import Placement
    from .arguments import Plan
    from .loaders import LoaderSource
    from .module import TrainModule
    from .trainer import Trainer


def make_accelerator(plan: Plan, *, alone: bool = False) -> Any:
    """Return the plan's Accelerator, or a new one with the Trainer's (exact) semantics.

    ``alone``: for a process whose ranks are others; a process group here would keep it from forking them.
    """
    if plan.accelerator is not None:
        return plan.accelerator
    from ..strategies.settings import DataLoaderConfiguration, GradientAccumulationPlugin
    from .accelerator import Accelerator  # here, so that importing the Trainer costs little

    options = plan.options | ({"strategy": None} if alone else {})
    if plan.devices is not None:
        options["device"] = plan.devices[detect().local_rank]
    return Accelerator(
        dataloader_config=DataLoaderConfiguration(split_last_batch=True, shard=plan.shards),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=None, scale_last_window=True),
        step_scheduler_with_optimizer=False,
        **options,
    )


class Launcher:
    """Decides, when a Trainer is made, where its processes come from.

    Launched processes (torchrun, SLURM, ...) must be as many as asked for. A script is started again at once, and this
    process ends with its exit code. Elsewhere (a notebook, a test, a prompt, or by a strategy like "ddp_spawn") each
    ``fit`` starts processes of its own: ``later`` is true, and weights and results come back from rank 0.
    """

    def __init__(self, plan: Plan, placement: Placement) -> None:
        self.plan = plan
        self.later = False
        if plan.accelerator is not None or placement.launched:
            return
        if plan.processes == 1 and plan.nodes == 1:
            return
        if plan.nodes > 1:
            raise ValueError(
                f"Expected processes on {plan.nodes} machines. Received: num_nodes={plan.nodes} in a single process. "
                "Start the script on each machine by torchrun, SLURM or drivetrain launch."
            )
        from ..strategies import launch  # here, since most runs never need the elastic agent

        if plan.start_method is None and launch.can_relaunch():
            sys.exit(launch.relaunch(plan.processes))
        self.later = True

    def call(self, trainer: Trainer, stage: str, model: TrainModule, source: LoaderSource, **options: Any) -> Any:
        """Run a stage in processes of its own; bring back weights, counters, metrics, callbacks' states and results."""
        from safetensors import torch as safetensors

        from ..strategies import launch
        from ..strategies.checkpoint.state import decode

        method = self.plan.start_method or "fork"
        trainer.release_accelerator()  # each rank makes its own
        answers = launch.call(
            _run, trainer, stage, model, source, options, processes=self.plan.processes, start_method=method
        )
        tree, packed = answers[0]
        answer = decode(tree, safetensors.load(packed))
        model.load_state_dict(answer["weights"])
        trainer.module = model
        trainer.progress.load_state_dict(answer["progress"])
        trainer.metrics = Metrics(World(), model)
        trainer.metrics.take_values(answer["metrics"])
        trainer.run_folder.run_id = answer["run_id"]
        for callback, state in zip(trainer.callbacks, answer["callbacks"]):
            callback.load_state_dict(state)
        return answer["result"]


def _run(
    trainer: Trainer, stage: str, model: TrainModule, source: LoaderSource, options: dict[str, Any]
) -> tuple[Any, bytes]:
    """Run a stage in a started process and return what the parent needs, as JSON values and packed tensors."""
    from safetensors import torch as safetensors

    from ..strategies.checkpoint.state import encode

    trainer.launcher.later = False
    given = source.given
    loaders = (given.get("train"), given.get("validate")) if stage == "fit" else (given.get(stage),)
    result = getattr(trainer, stage)(model, *loaders, datamodule=source.datamodule, **options)
    answer = {
        "weights": {name: tensor.cpu() for name, tensor in _weights(trainer).items()},
        "progress": trainer.progress.state_dict(),
        "metrics": trainer.metrics.values(),  # type: ignore[union-attr]
        "run_id": trainer.run_id,
        "callbacks": [callback.state_dict() for callback in trainer.callbacks],
        "result": result,
    }
    tree, tensors = encode(answer, path=f"the results of {stage}")
    return tree, safetensors.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def _weights(trainer: Trainer) -> dict[str, Any]:
    """The whole weights after a stage, on the first rank at least."""
    assert trainer.session is not None
    return trainer.accelerator.get_state_dict(trainer.session.model)
