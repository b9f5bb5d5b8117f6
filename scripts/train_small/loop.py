"""A training loop that always ends in time, saves itself, goes on where it stopped, and logs losses as JSON lines.

How far it is decides the learning rate: the greater of time spent and steps done, each as a share of what it may use.
Every step seeds its own random numbers, so a loop that was interrupted sees the same data as one that was not.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import nn

from scripts.train_small.ema import Ema, M

LOG_EVERY, SAVE_SECONDS = 25, 60.0
WARM_UP = 0.03  # share of the loop
LARGEST_GRADIENT = 1.0
SEED_STRIDE = 10_000_000  # more than any loop has steps


@dataclass(frozen=True)
class Limits:
    """A loop ends after this many seconds of training or steps, whichever comes first."""

    seconds: float
    max_steps: int


@dataclass(frozen=True)
class Moment:
    """Where a loop is: the step's number and seed, and how much of the loop is over, 0..1."""

    step: int
    seed: int
    progress: float


class Loop(Generic[M]):
    """Trains `model` in place; its state is `<folder>/<name>.pt`, its log `<folder>/<name>.jsonl`."""

    def __init__(
        self, name: str, model: M, *, folder: Path, limits: Limits, rate: float, decay: float, seed: int
    ) -> None:
        self.name, self.model, self.limits, self.rate, self.seed = name, model, limits, rate, seed
        self.file, self.log = folder / f"{name}.pt", folder / f"{name}.jsonl"
        self.ema = Ema(model, decay=decay)
        on_gpu = next(model.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=on_gpu
        )
        self.step, self.seconds = 0, 0.0
        self._losses: list[torch.Tensor] = []
        if self.file.exists():
            self._load()

    @property
    def progress(self) -> float:
        return min(1.0, max(self.seconds / self.limits.seconds, self.step / self.limits.max_steps))

    def run(self, loss_of: Callable[[Moment], torch.Tensor]) -> None:
        """Train to the end. Raises RuntimeError for a loss that is not finite."""
        self.model.train()
        started, before, saved = time.monotonic(), self.seconds, time.monotonic()
        while self.progress < 1.0:
            self._train_step(loss_of)
            if self.step % LOG_EVERY == 0:
                self._write_log()  # waits for the device, so the time is the device's
            self.seconds = before + time.monotonic() - started
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self._write_log()
        self.save()

    def save(self) -> None:
        state: dict[str, Any] = {"model": self.model, "ema": self.ema.model, "optimizer": self.optimizer}
        written: dict[str, Any] = {name: part.state_dict() for name, part in state.items()}
        written |= {"step": self.step, "seconds": self.seconds}
        part_file = self.file.with_suffix(".part")
        torch.save(written, part_file)
        part_file.replace(self.file)

    def _load(self) -> None:
        state = torch.load(self.file, map_location=next(self.model.parameters()).device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.ema.model.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def _train_step(self, loss_of: Callable[[Moment], torch.Tensor]) -> None:
        progress = self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * rate_share(progress)
        loss = loss_of(Moment(self.step, self.seed * SEED_STRIDE + self.step, progress))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.step += 1
        self.ema.update(self.step)
        self._losses.append(loss.detach())

    def _write_log(self) -> None:
        if not self._losses:
            return
        loss = float(torch.stack(self._losses).mean())
        self._losses.clear()
        if not math.isfinite(loss):
            raise RuntimeError(f"{self.name}: the loss is {loss} at step {self.step}")
        line = {"stage": self.name, "step": self.step, "seconds": round(self.seconds, 2), "loss": loss}
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.step % (20 * LOG_EVERY) == 0 or self.progress == 1.0:
            print(
                f"{self.name}: step {self.step}, {self.seconds:.0f} s, {self.progress:.0%}, loss {loss:.5f}", flush=True
            )


def rate_share(progress: float) -> float:
    """Share of the peak learning rate: up from 0 in the warm-up, then down to 0 along a cosine."""
    if progress < WARM_UP:
        return (progress + 1e-3) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
