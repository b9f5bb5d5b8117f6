"""Rotary position embedding over (frame, row, column), interleaved pairs.

Tables are built once per request in float64 and kept in fp32; a rank slices its own rows. Used by the transformer.
"""

from typing import NamedTuple

import torch

THETA = 10000.0


class RopeTable(NamedTuple):
    """cos and sin of every token's angles, [S, D/2] each, fp32."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rows(self, start: int, stop: int) -> "RopeTable":
        return RopeTable(self.cos[start:stop], self.sin[start:stop])

    def to(self, device: torch.device) -> "RopeTable":
        return RopeTable(self.cos.to(device), self.sin.to(device))


def split_head_dim(head_dim: int) -> tuple[int, int, int]:
    """Columns of a head that turn with frame, row and column."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def rope_table(token_grid: tuple[int, int, int], head_dim: int) -> RopeTable:
    """Angles of all tokens of a (frames, rows, columns) grid, tokens in row-major order."""
    angles = [
        torch.outer(torch.arange(length, dtype=torch.float64), _frequencies(columns))
        for length, columns in zip(token_grid, split_head_dim(head_dim), strict=True)
    ]
    frames, rows, columns = token_grid
    by_frame = angles[0][:, None, None].expand(frames, rows, columns, -1)
    by_row = angles[1][None, :, None].expand(frames, rows, columns, -1)
    by_column = angles[2][None, None, :].expand(frames, rows, columns, -1)
    # [F, H, W, D/2] -> [S, D/2]
    table = torch.cat([by_frame, by_row, by_column], dim=-1).reshape(frames * rows * columns, head_dim // 2)
    return RopeTable(table.cos().float(), table.sin().float())


def _frequencies(columns: int) -> torch.Tensor:
    return 1.0 / THETA ** (torch.arange(0, columns, 2, dtype=torch.float64) / columns)
