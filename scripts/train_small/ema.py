"""A running mean of a model's weights, which samples better than the last step's weights."""

from copy import deepcopy
from typing import Generic, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


class Ema(Generic[M]):
    """`model` holds the mean. Early on it forgets faster, so that no initial weight is left in it."""

    def __init__(self, model: M, *, decay: float) -> None:
        self.decay = decay
        self.model = deepcopy(model).requires_grad_(False).eval()
        self._mean: list[torch.Tensor] = list(self.model.parameters())
        self._now: list[torch.Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._mean, self._now, 1 - decay)
