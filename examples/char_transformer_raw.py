"""char_transformer.py with a loop written by hand around an Accelerator: the same weights, bit for bit.

    python examples/char_transformer_raw.py

It would run as it is on several processes (`torchrun --nproc-per-node 2 ...`) and in another precision.
"""

from __future__ import annotations

import torch
from char_transformer import BATCH, CLIP, EPOCHS, LEARNING_RATE, SEED
from char_transformer import CharTransformer, StandardLibrary, next_character_loss, one_cycle
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator


def main(data: Dataset | None = None, epochs: int = EPOCHS) -> CharTransformer:
    accelerator = Accelerator(cpu=True, seed=SEED, step_scheduler_with_optimizer=False)
    torch.manual_seed(SEED)
    model = CharTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(data or StandardLibrary(), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = accelerator.prepare(one_cycle(optimizer, epochs * len(loader)))

    for epoch in range(epochs):
        model.train()
        for pieces in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = next_character_loss(model, pieces)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    print(main().eval().write())
