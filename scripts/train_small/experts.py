"""The two experts: our own transformer, trained by flow matching on cached latents, each on its side of the boundary.

Shapes: B clips, C latent channels, F x H x W latent cells, L text positions, D text width.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from scripts.train_small.cache import Cache, load_cache
from scripts.train_small.device import lower_precision
from scripts.train_small.flow import PaddedText, level_range, noise_level, predict
from scripts.train_small.kernels import training_kernels
from scripts.train_small.loop import Limits, Loop, Moment
from scripts.train_small.settings import ExpertSettings, Settings
from usp.models.wan.rope import RopeTable, rope_table
from usp.models.wan.transformer import WanTransformer

NORM_WEIGHTS = ("norm_q.weight", "norm_k.weight", "norm2.weight")
# Gates and modulation, the way out of cross-attention (which has no gate), and the way out of the model.
SILENT = ("scale_shift_table", "time_proj.weight", "attn2.to_out.0.weight", "proj_out.weight")
SEEDS = {"high": 11, "low": 12}  # so that the two see other data in another order


def new_expert(settings: Settings) -> WanTransformer:
    model = WanTransformer(settings.transformer)
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: WanTransformer) -> None:
    """Every parameter: norms neutral, products Xavier, and each block silent at first, so that depth does no harm."""
    for name, parameter in model.named_parameters():
        if name.endswith(NORM_WEIGHTS):
            parameter.fill_(1.0)
        elif name.endswith(("bias", *SILENT)):
            parameter.zero_()
        else:
            bound = math.sqrt(6 / (parameter.shape[0] + parameter[0].numel()))
            parameter.uniform_(-bound, bound)


def train_expert(
    name: str, folder: Path, settings: Settings, *, seconds: float, device: torch.device, compiled: bool = False
) -> dict[str, Any]:
    """Train `high` or `low` to the end and save `<name>_weights.pt`. Returns a report."""
    seed = settings.seed + SEEDS[name]
    torch.manual_seed(seed)
    cache, model, expert = load_cache(folder, device), new_expert(settings).to(device), settings.expert
    limits = Limits(seconds, expert.max_steps)
    loop = Loop(name, model, folder=folder, limits=limits, rate=expert.rate, decay=expert.ema_decay, seed=seed)
    loss = Loss(name, model, cache, settings, compiled=compiled)
    loss(Moment(0, 0, 0.0)).backward()  # compiles, and must not be training time
    loop.run(loss)
    torch.save(loop.ema.model.state_dict(), folder / f"{name}_weights.pt")
    return {"steps": loop.step, "seconds": round(loop.seconds, 1), "parameters": count_parameters(model)}


def count_parameters(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


class Loss:
    """Squared error of one expert's velocity on a batch from the cache."""

    def __init__(
        self, name: str, model: WanTransformer, cache: Cache, settings: Settings, *, compiled: bool = False
    ) -> None:
        self.kernels = training_kernels(compiled=compiled)
        self.model, self.cache, self.settings = model, cache, settings
        self.device = cache.latents.device
        self.levels = level_range(name, settings.sampling)
        _, _, frames, height, width = cache.latents.shape
        table = rope_table((frames, height // 2, width // 2), model.config.head_dim)
        self.rope: RopeTable = table.to(self.device)
        self.cross_attention = PaddedText(cache.states.shape[1], self.device)

    def __call__(self, moment: Moment) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(moment.seed)
        clip, states = self._batch(self.settings.expert, generator)
        sigma = self._levels(len(clip), generator)
        noise = torch.randn(clip.shape, generator=generator, device=self.device)
        noisy = torch.lerp(clip, noise, sigma.view(-1, 1, 1, 1, 1))
        with lower_precision(self.device):
            found = predict(
                self.model,
                noisy,
                sigma,
                states,
                rope=self.rope,
                cross_attention=self.cross_attention,
                kernels=self.kernels,
            )
        return F.mse_loss(found.float(), noise - clip)

    def _batch(self, expert: ExpertSettings, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips and their states; a share of them has the empty prompt's."""
        pick = torch.randint(len(self.cache.latents), (expert.batch,), generator=generator, device=self.device)
        dropped = torch.rand(expert.batch, 1, 1, generator=generator, device=self.device) < expert.dropped_prompts
        states = torch.where(dropped, self.cache.empty, self.cache.states[pick])
        return self.cache.latents[pick].float(), states.float()

    def _levels(self, count: int, generator: torch.Generator) -> torch.Tensor:
        low, high = self.levels
        # evenly spread over the batch, so that no step sees only loud or only quiet latents
        place = torch.arange(count, device=self.device) + torch.rand(count, generator=generator, device=self.device)
        return noise_level(low + (high - low) * place / count, self.settings.sampling.shift)
