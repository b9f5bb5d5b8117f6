"""What the kernels compute, in plain torch: the path of ranks without a GPU, and what tests compare kernels with."""

from collections.abc import Iterable

import torch

from usp.destinations import HeadRun


def place_heads_reference(x_bshd: torch.Tensor, runs: Iterable[HeadRun]) -> None:
    """Copy the rows [B, S_r, H, D] of every head in a run to its place; heads in no run stay where they are."""
    for start, rows in runs:
        rows.copy_(x_bshd[:, :, start : start + rows.shape[2]])
