"""A small language model that learns, character by character, to write Python: from the standard library's own source.

    python examples/char_transformer.py          a minute or two on a laptop; ends with a sample

char_transformer_raw.py trains the same model in a hand-written loop, to the same weights, bit for bit.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Trainer, TrainModule

CHARACTERS = [chr(code) for code in (10, *range(32, 127))]  # newline and what can be printed
CODES = {character: code for code, character in enumerate(CHARACTERS)}
EPOCHS, BATCH, LEARNING_RATE, CLIP, SEED = 6, 32, 3e-3, 1.0, 1


class StandardLibrary(Dataset):
    """The text of the standard library's modules, cut into pieces of ``length`` characters and the one that follows."""

    def __init__(self, length: int = 64, characters: int = 400_000) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(file.read_text(errors="ignore") for file in files)[:characters]
        self.codes = torch.tensor([CODES[character] for character in text if character in CODES])
        self.length = length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.codes[start : start + self.length + 1]


class CharTransformer(nn.Module):
    """A decoder: ``forward`` gives scores for the next character at each place of a (batch, length) tensor of codes."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.length = length
        self.characters, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, len(CHARACTERS))

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        x = self.characters(codes) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        return self.scores(self.layers(x, mask=mask, is_causal=True))

    @torch.no_grad()
    def write(self, start: str = "def ", count: int = 300) -> str:
        """Return ``start`` and what the model writes after it."""
        codes = torch.tensor([[CODES[character] for character in start]])
        for _ in range(count):
            chances = self(codes[:, -self.length :])[:, -1].div(0.7).softmax(-1)
            codes = torch.cat([codes, chances.multinomial(1)], 1)
        return "".join(CHARACTERS[code] for code in codes[0].tolist())


def next_character_loss(model: nn.Module, pieces: Tensor) -> Tensor:
    """Return the mean cross entropy of predicting each next character of (batch, length + 1) codes."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)


class Writer(TrainModule):
    """The model, and how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CharTransformer()

    def training_step(self, batch, batch_idx):
        loss = next_character_loss(self.model, batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        schedule = one_cycle(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(data: Dataset | None = None, **options) -> CharTransformer:
    options = {"max_epochs": EPOCHS, "gradient_clip_val": CLIP, "seed": SEED, "accelerator": "cpu"} | options
    trainer = Trainer(**options)
    torch.manual_seed(SEED)
    module = Writer()
    trainer.fit(module, DataLoader(data or StandardLibrary(), BATCH, shuffle=True))
    return module.model


if __name__ == "__main__":
    print(main().eval().write())
