"""Train the small packaged model, from nothing to a checkpoint folder, in stages that save and resume.

    python -m scripts.train_small.run --out outputs/train_small
    python -m scripts.train_small.run --out outputs/train_small --stage experts --minutes 12.5

    data     a picture of drawn clips, and how often the judge is right about them
    vae      the VAE
    text     the tokenizer and the text encoder
    experts  latents and text of all clips, then the high-noise and the low-noise expert
    pack     the Diffusers folder OUT/model, and how often its clips are what the prompts say

Without --stage all of them run. `--minutes` is the time of all training; each stage takes its share of it, and a stage
that is done is not done again. A stage that was interrupted goes on where it last saved; so does one that is named
after --again, if `--minutes` now gives it more time.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from scripts.git_commit import commit_here
from scripts.train_small.captions import caption
from scripts.train_small.data import draw_clips, draw_scenes
from scripts.train_small.device import pick_device
from scripts.train_small.evaluate import evaluate, shares
from scripts.train_small.judge import judge
from scripts.train_small.pack import pack
from scripts.train_small.settings import FULL, SHARES, SMOKE, Settings
from scripts.train_small.sheets import clip_sheet, plot_losses
from scripts.train_small.world import all_combinations

STAGES = ("data", "vae", "text", "experts", "pack")
FOLLOWERS = {"vae": ("cache", "high", "low"), "text": ("cache", "high", "low"), "cache": ("high", "low")}
TRAINED = ("vae", "text", "high", "low")
JUDGED_CLIPS = 320  # as many combinations as are trained


class Training:
    """One training in one folder: what has been done is in `report.json` there."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        device: torch.device,
        *,
        commit: str | None = None,
        compiled: bool = False,
    ) -> None:
        self.compiled = compiled
        self.folder, self.settings, self.device, self.commit = folder, settings, device, commit
        self.file = folder / "report.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    @property
    def num_judged(self) -> int:
        return min(JUDGED_CLIPS, self.settings.expert.cached_clips // 2)

    def run(self, stage: str) -> None:
        for part in ("cache", "high", "low") if stage == "experts" else (stage,):
            self._run_part(part)
        plot_losses(self.folder, list(TRAINED))

    def forget(self, part: str) -> None:
        """That a part is done. Its training then goes on from where it ended, up to the minutes given now."""
        self.report.pop(part, None)
        for follower in FOLLOWERS.get(part, ()):  # learnt from what is replaced now: these start anew
            self.report.pop(follower, None)
            (self.folder / f"{follower}.pt").unlink(missing_ok=True)

    def _run_part(self, part: str) -> None:
        if part in self.report and part != "pack":
            print(f"{part}: done before, {self.report[part]}")
            return
        started = time.monotonic()
        found = self._parts()[part]()
        wall = round(time.monotonic() - started, 1)
        self.report[part] = found | {"wall_seconds": wall, "device": _device_name(self.device)}
        self.file.write_text(json.dumps(self.report, indent=2) + "\n")
        print(f"{part}: {wall:.0f} s, {found}", flush=True)

    def _parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        from scripts.train_small.cache import build_cache
        from scripts.train_small.experts import train_expert
        from scripts.train_small.text import train_text
        from scripts.train_small.vae import train_vae

        folder, settings, device = self.folder, self.settings, self.device
        seconds = {part: 60 * settings.minutes * share for part, share in SHARES.items()}
        where: dict[str, Any] = {"device": device}
        experts = {**where, "compiled": self.compiled}
        return {
            "data": self._look_at_data,
            "vae": lambda: train_vae(folder, settings.vae, seconds=seconds["vae"], seed=settings.seed, **where),
            "text": lambda: train_text(folder, settings.text, seconds=seconds["text"], seed=settings.seed, **where),
            "cache": lambda: build_cache(folder, settings, seconds=seconds["cache"], **where),
            "high": lambda: train_expert("high", folder, settings, seconds=seconds["high"], **experts),
            "low": lambda: train_expert("low", folder, settings, seconds=seconds["low"], **experts),
            "pack": self._pack,
        }

    def _look_at_data(self) -> dict[str, Any]:
        random = Random(self.settings.seed)
        scenes = draw_scenes(self.num_judged, all_combinations(), random=random)
        pixels = draw_clips(scenes, seed=self.settings.seed, device=self.device).pixels
        clips = ((pixels + 1) * 127.5).round().permute(0, 2, 3, 4, 1).cpu()
        shown = clip_sheet(clips[:8], [caption(random, scene) for scene in scenes[:8]])
        shown.save(self.folder / "data.png")
        return shares(scenes, map(judge, clips))

    def _pack(self) -> dict[str, Any]:
        record = {
            "commit": self.commit or commit_here(),
            "settings": asdict(self.settings),
            "stages": {part: self.report[part] for part in SHARES},
        }
        out = pack(self.folder, self.settings, record)
        sheet = self.folder / "clips.png"
        sheet.unlink(missing_ok=True)
        rows = evaluate(out, device=self.device, count=self.num_judged, sheet=sheet)
        (self.folder / "evaluation.json").write_text(json.dumps(rows, indent=2) + "\n")
        return {"right": {row["group"]: row["right"] for row in rows[:2]}}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of this training")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--minutes", type=float, help="of all training together (default: 12.5)")
    parser.add_argument("--again", nargs="+", choices=SHARES, default=[], help="parts to go on with, though done")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--commit", help="to be recorded, where there is no repository (default: git's answer)")
    parser.add_argument("--compile", action="store_true", help="the experts' norms and residual sums, by torch.compile")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes and three steps: does it run?")
    flags = parser.parse_args()
    settings = SMOKE if flags.smoke else FULL
    settings = replace(settings, minutes=flags.minutes or settings.minutes)
    training = Training(flags.out, settings, pick_device(flags.device), commit=flags.commit, compiled=flags.compile)
    for part in flags.again:
        training.forget(part)
    for stage in STAGES:
        if stage in flags.stage:
            training.run(stage)


if __name__ == "__main__":
    main()
