"""What `strategy="auto"` comes to once the model is known: DDP, or FSDP where a replica does not fit a device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..strategies import create
from .planning import MARGIN, device_memory, least_bytes

if TYPE_CHECKING:
    from .module import TrainModule
    from .trainer import Trainer

logger = logging.getLogger(__name__)


def suit_strategy(trainer: Trainer, module: TrainModule) -> None:
    """Let FSDP take DDP's place where nobody has named a strategy and a whole replica is too large (collective).

    What a replica takes at least is known from the model's parameters, without a step of it; `drivetrain plan` knows it
    in full.
    """
    accelerator = trainer.accelerator
    if not trainer.plan.unnamed or accelerator.strategy.name != "ddp" or accelerator.num_processes == 1:
        return
    needed, memory = least_bytes(module), device_memory(accelerator.device, ranks=accelerator.world.local_size)
    if not accelerator.world.agree(needed > memory * (1 - MARGIN)):
        return
    logger.warning(
        "A replica of %s takes at least %.1f GiB, and a device has %.1f: strategy='fsdp' shares it among the %d "
        "processes. `drivetrain plan` says more; name a strategy to decide for yourself.",
        type(module).__name__, needed / 2**30, memory / 2**30, accelerator.num_processes,
    )  # fmt: skip
    trainer.plan.options["strategy"] = create("fsdp")
    trainer.release_accelerator()
