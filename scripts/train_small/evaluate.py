"""Is the clip what the prompt says? Every combination once, judged by image measurement, at several guidance scales.

Combinations that training never saw are counted apart.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from scripts.train_small.captions import plain_caption
from scripts.train_small.data import draw_scenes
from scripts.train_small.judge import Finding, is_right, judge
from scripts.train_small.sampler import Guidance, Sampler
from scripts.train_small.sheets import clip_sheet
from scripts.train_small.world import STILL, Combination, Scene, held_out_combinations, trained_combinations

ATTRIBUTES = ("colour", "shape", "motion", "speed", "background")
EVALUATION_SEED = 5_000_000
OTHER_GUIDANCE = (Guidance(1.0, 1.0), Guidance(2.0, 2.0), Guidance(6.0, 4.0))
SHOWN, COMPARED = 8, 96  # clips in the picture, and clips of a group at other guidance


def evaluate(folder: Path, *, device: torch.device, count: int, sheet: Path) -> list[dict[str, Any]]:
    """Sample `count` trained and all held-out combinations (at most `count`) at the folder's guidance and at others.

    Prints a table, writes a picture of the first clips, returns the table's rows: shares of right clips.
    """
    sampler = Sampler(folder, device)
    defaults = sampler.checkpoint.defaults
    own = Guidance(defaults["guidance_high"], defaults["guidance_low"])
    groups = {"trained": _scenes(trained_combinations(), count), "held out": _scenes(held_out_combinations(), count)}
    rows = []
    for guidance in (own, *OTHER_GUIDANCE):
        for group, all_scenes in groups.items():
            scenes = all_scenes if guidance == own else all_scenes[:COMPARED]
            clips = _clips(sampler, scenes, guidance)
            rows.append({"guidance": [guidance.high, guidance.low], "group": group} | shares(scenes, map(judge, clips)))
            if not sheet.exists():
                clip_sheet(clips[:SHOWN], [plain_caption(scene) for scene in scenes[:SHOWN]]).save(sheet)
    print(table(rows))
    return rows


def shares(scenes: Sequence[Scene], findings: Any) -> dict[str, float]:
    """Shares of clips that are right (colour, shape and motion together), and right in each attribute."""
    pairs = list(zip(scenes, findings, strict=True))
    right = {"clips": len(pairs), "right": sum(is_right(finding, scene) for scene, finding in pairs) / len(pairs)}
    return right | {name: _share(pairs, name) for name in ATTRIBUTES}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row, columns aligned."""
    lines = [
        f"{'guidance':>10} {'group':>9} {'clips':>6} " + " ".join(f"{name:>10}" for name in ("right", *ATTRIBUTES))
    ]
    for row in rows:
        high, low = row["guidance"]
        numbers = " ".join(f"{row[name]:>10.1%}" for name in ("right", *ATTRIBUTES))
        lines.append(f"{f'{high:g}, {low:g}':>10} {row['group']:>9} {row['clips']:>6} {numbers}")
    return "\n".join(lines)


def _scenes(combinations: list[Combination], count: int) -> list[Scene]:
    """Different combinations, with speed and background drawn for each."""
    random = Random(EVALUATION_SEED)
    picked = random.sample(combinations, min(count, len(combinations)))
    return [draw_scenes(1, [one], random=random)[0] for one in picked]


def _clips(sampler: Sampler, scenes: list[Scene], guidance: Guidance) -> torch.Tensor:
    prompts = [plain_caption(scene) for scene in scenes]
    steps = sampler.checkpoint.defaults["steps"]
    return sampler.clips(prompts, first_seed=EVALUATION_SEED, guidance=guidance, steps=steps)


def _share(pairs: list[tuple[Scene, Finding]], name: str) -> float:
    """Of the clips that have the attribute: what stands still has no speed."""
    asked = [(scene, finding) for scene, finding in pairs if name != "speed" or scene.motion != STILL]
    return sum(getattr(finding, name) == getattr(scene, name) for scene, finding in asked) / max(1, len(asked))
