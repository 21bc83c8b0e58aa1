"""A generative adversarial network that learns to draw digits: two optimizers, stepped by hand.

    python examples/gan.py          about a minute; ends with a few drawn digits; needs `pip install scikit-learn`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import Digits
from torch import Tensor, nn

from drivetrain import Trainer, TrainModule


def mlp(*widths: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.LeakyReLU(0.2)) for a, b in zip(widths, widths[1:])]
    return nn.Sequential(*(part for layer in layers for part in layer))[:-1]


class GAN(TrainModule):
    """A generator (16 random numbers → 8 × 8 pixels) against a critic that tells its images from real ones."""

    def __init__(self, noise: int = 16, learning_rate: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(mlp(noise, 128, 128, 64), nn.Sigmoid())
        self.critic = mlp(64, 128, 64, 1)

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.hparams.noise, device=self.device))

    def training_step(self, batch, batch_idx):
        real = batch[0].flatten(1)
        yes, no = torch.ones(len(real), 1, device=self.device), torch.zeros(len(real), 1, device=self.device)
        drawing, judging = self.optimizers()

        critic_loss = self.judge(real, 0.9 * yes) + self.judge(self(len(real)).detach(), no)
        self.manual_backward(critic_loss)
        judging.step()
        judging.zero_grad()

        with self.toggled_optimizer(drawing):  # the critic's weights need no gradient here
            generator_loss = self.judge(self(len(real)), yes)
            self.manual_backward(generator_loss)
            drawing.step()
            drawing.zero_grad()

        self.log_dict({"critic": critic_loss, "generator": generator_loss}, prog_bar=True)

    def judge(self, images: Tensor, truth: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.critic(images), truth)

    def configure_optimizers(self):
        rate = self.hparams.learning_rate
        return [torch.optim.Adam(part.parameters(), lr=rate, betas=(0.5, 0.9)) for part in (self.generator, self.critic)]


def draw(images: Tensor) -> str:
    """Return (count, 64) pixels between 0 and 1 as text, side by side."""
    shades = " .:-=+*#%@"
    rows = images.reshape(-1, 8, 8).mul(len(shades) - 1).round().long().transpose(0, 1).tolist()
    return "\n".join("    ".join("".join(2 * shades[pixel] for pixel in part) for part in row) for row in rows)


def main(**options) -> GAN:
    torch.manual_seed(1)
    module = GAN()
    Trainer(**{"max_epochs": 150, "seed": 1, **options}).fit(module, datamodule=Digits(batch_size=64))
    with torch.no_grad():
        print(draw(module(5)))
    return module


if __name__ == "__main__":
    main()
