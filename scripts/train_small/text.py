"""The small text encoder: a UMT5 encoder taught to tell what captions say.

A linear head per attribute reads the mean of the states; afterwards the heads are dropped and the encoder is kept as it
is. Captions name things in several ways, leave some unsaid and hold words without meaning, so the states of known words
carry their meaning and those of others little.

Shapes: B captions, L positions, C width of the encoder.
"""

from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from scripts.train_small.captions import caption, random_scene
from scripts.train_small.data import draw_scenes
from scripts.train_small.loop import Limits, Loop, Moment
from scripts.train_small.settings import TextSettings
from scripts.train_small.tokens import load_small_tokenizer, token_ids, write_small_tokenizer
from scripts.train_small.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SPEEDS, Scene, trained_combinations

ANSWERS: dict[str, tuple[str | None, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "motion": MOTIONS,
    "speed": (*SPEEDS, None),
    "background": (*BACKGROUNDS, None),
}
POOL = 32_768  # captions that are drawn once and learnt from again and again
CHECKING_SEED, NUM_CHECKED = 1_000_003, 2000


class Reader(nn.Module):
    """An encoder and a head per attribute."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict(
            {name: nn.Linear(encoder.config.d_model, len(known)) for name, known in ANSWERS.items()}
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """[B, L] twice -> scores per attribute, [B, answers]."""
        states = text_states(self.encoder, ids, mask)
        mean = states.sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return {name: head(mean) for name, head in self.heads.items()}


def new_encoder(settings: TextSettings, vocab_size: int) -> Any:
    config = UMT5Config(
        vocab_size=vocab_size,
        d_model=settings.width,
        d_kv=settings.width // settings.heads,
        d_ff=2 * settings.width,
        num_layers=settings.layers,
        num_heads=settings.heads,
        dropout_rate=0.0,
    )
    return UMT5EncoderModel(config)


def text_states(encoder: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, L, C], zero past each caption's end, as the transformer is given them."""
    return encoder(ids, mask).last_hidden_state * mask[..., None]


def train_text(
    folder: Path, settings: TextSettings, *, seconds: float, seed: int, device: torch.device
) -> dict[str, Any]:
    """Write `tokenizer/`, train the encoder, save `text_weights.pt`. Returns a report."""
    torch.manual_seed(seed)
    vocab_size = write_small_tokenizer(folder / "tokenizer")
    tokenizer = load_small_tokenizer(folder / "tokenizer")
    reader = Reader(new_encoder(settings, vocab_size)).to(device)
    pool = [one.to(device) for one in _captions(tokenizer, POOL if device.type == "cuda" else 2048, seed=seed)]
    limits = Limits(seconds, settings.max_steps)
    loop = Loop("text", reader, folder=folder, limits=limits, rate=settings.rate, decay=0.99, seed=seed)
    loop.run(lambda moment: _loss(reader, pool, settings.batch, moment))
    torch.save(loop.ema.model.encoder.state_dict(), folder / "text_weights.pt")
    told = _share_told(loop.ema.model, tokenizer, device)
    return {"steps": loop.step, "seconds": round(loop.seconds, 1), "vocabulary": vocab_size, "told": told}


def trained_text(folder: Path, settings: TextSettings, device: torch.device) -> tuple[Any, Any]:
    """(tokenizer, encoder), the encoder frozen."""
    tokenizer = load_small_tokenizer(folder / "tokenizer")
    encoder = new_encoder(settings, len(tokenizer))
    encoder.load_state_dict(torch.load(folder / "text_weights.pt", map_location="cpu", weights_only=True))
    return tokenizer, encoder.requires_grad_(False).eval().to(device)


def _captions(tokenizer: Any, count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and right answers [N, attributes] of fresh captions."""
    random = Random(seed)
    scenes = [random_scene(random, scene) for scene in draw_scenes(count, trained_combinations(), random=random)]
    ids, mask = token_ids(tokenizer, [caption(random, scene) for scene in scenes])
    return ids, mask, torch.tensor([_answers(scene) for scene in scenes])


def _answers(scene: Scene) -> list[int]:
    return [known.index(getattr(scene, name)) for name, known in ANSWERS.items()]


def _loss(reader: Reader, pool: list[torch.Tensor], batch: int, moment: Moment) -> torch.Tensor:
    device = pool[0].device
    pick = torch.randint(len(pool[0]), (batch,), generator=torch.Generator().manual_seed(moment.seed)).to(device)
    ids, mask, answers = (one[pick] for one in pool)
    scores = reader(ids, mask)
    return torch.stack([F.cross_entropy(scores[name], answers[:, at]) for at, name in enumerate(ANSWERS)]).sum()


@torch.inference_mode()
def _share_told(reader: Reader, tokenizer: Any, device: torch.device) -> dict[str, float]:
    """Share of fresh captions whose attribute is told rightly."""
    ids, mask, answers = (one.to(device) for one in _captions(tokenizer, NUM_CHECKED, seed=CHECKING_SEED))
    scores = reader.eval()(ids, mask)
    return {
        name: round(float((scores[name].argmax(dim=1) == answers[:, at]).float().mean()), 4)
        for at, name in enumerate(ANSWERS)
    }
