"""What the experts learn from, once and for all on the device: latents of clips, and states of their captions.

Captions are wrong on purpose now and then, as captions of real clips are: a model that believes every word has nothing
left for guidance to do.

Shapes: N clips, C latent channels, F x H x W latent cells, L text positions, D text width.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from scripts.train_small.captions import caption, random_scene
from scripts.train_small.data import draw_clips, draw_scenes
from scripts.train_small.settings import Settings
from scripts.train_small.text import text_states, trained_text
from scripts.train_small.tokens import token_ids
from scripts.train_small.vae import encoded, trained_vae
from scripts.train_small.world import COLOURS, MOTIONS, SHAPES, Scene, is_held_out, trained_combinations

BATCH = 128
FILE = "cache.pt"


@dataclass(frozen=True)
class Cache:
    """Latents [N, C, F, H, W] of mean 0 and deviation 1, states [N, L, D], and the empty prompt's states [L, D]."""

    latents: torch.Tensor
    states: torch.Tensor
    empty: torch.Tensor


def build_cache(folder: Path, settings: Settings, *, seconds: float, device: torch.device) -> dict[str, Any]:
    """Draw and encode clips until there are enough or the time is over; save them in half precision."""
    vae, mean, deviation = trained_vae(folder, settings.vae, device)
    tokenizer, encoder = trained_text(folder, settings.text, device)
    mean, deviation = (one.view(1, -1, 1, 1, 1).to(device) for one in (mean, deviation))
    started, latents, states = time.monotonic(), [], []
    batch = min(BATCH, settings.expert.cached_clips)
    for index in range(settings.expert.cached_clips // batch):
        seed = (settings.seed + 1) * 1_000_000 + index
        scenes = draw_scenes(batch, trained_combinations(), random=Random(seed))
        latent = (encode(vae, scenes, seed=seed, device=device) - mean) / deviation
        latents.append(latent.half().cpu())  # waits for the device, so the time below is the device's
        states.append(_states(tokenizer, encoder, _captions(scenes, seed, settings.expert.wrong_words)).half().cpu())
        if time.monotonic() - started > seconds:
            break
    cache = {
        "latents": torch.cat(latents),
        "states": torch.cat(states),
        "empty": _states(tokenizer, encoder, [""])[0].half(),
    }
    torch.save(cache, folder / FILE)
    return {"clips": len(cache["latents"]), "seconds": round(time.monotonic() - started, 1)}


def load_cache(folder: Path, device: torch.device) -> Cache:
    return Cache(**torch.load(folder / FILE, map_location=device, weights_only=True))


@torch.inference_mode()
def encode(vae: Any, scenes: list[Scene], *, seed: int, device: torch.device) -> torch.Tensor:
    """Latents of fresh clips of these scenes."""
    return encoded(vae, draw_clips(scenes, seed=seed, device=device).pixels)[0]


@torch.inference_mode()
def _states(tokenizer: Any, encoder: Any, captions: list[str]) -> torch.Tensor:
    ids, mask = (one.to(encoder.device) for one in token_ids(tokenizer, captions))
    return text_states(encoder, ids, mask)


def _captions(scenes: list[Scene], seed: int, wrong_words: float) -> list[str]:
    random = Random(seed)
    return [caption(random, random_scene(random, _misnamed(random, scene, wrong_words))) for scene in scenes]


def _misnamed(random: Random, scene: Scene, chance: float) -> Scene:
    """The scene with colour, shape and motion each replaced by any of its kind, with this chance; as it is where that
    would name what is held out, or it would be learnt as always wrong."""
    kinds = {"colour": tuple(COLOURS), "shape": SHAPES, "motion": MOTIONS}
    wrong = {name: random.choice(known) for name, known in kinds.items() if random.random() < chance}
    named = replace(scene, **wrong)
    return scene if is_held_out(named.combination) else named
