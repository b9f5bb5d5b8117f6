"""The size of a clip: frames and pixels in, latent shape and token grid out.

Every shape in the program follows from this one object. Imports no torch; refuses illegal sizes by name.
"""

from dataclasses import dataclass

from usp.errors import UserError
from usp.models.wan.config import PATCH_SIZE

VAE_STRIDE = (4, 8, 8)  # frames, rows, columns of pixels per latent cell; the first frame stands alone
SIDE_MULTIPLE = VAE_STRIDE[1] * PATCH_SIZE[1]


@dataclass(frozen=True)
class Clip:
    """`frames` of `height` x `width` pixels. Raises UserError unless frames are 4k+1 and sides multiples of 16."""

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        _check_frames(self.frames)
        _check_side("height", self.height)
        _check_side("width", self.width)

    @property
    def latent_size(self) -> tuple[int, int, int]:
        """(frames, rows, columns) of the latent."""
        t, h, w = VAE_STRIDE
        return (self.frames - 1) // t + 1, self.height // h, self.width // w

    @property
    def token_grid(self) -> tuple[int, int, int]:
        """(frames, rows, columns) of tokens."""
        frames, height, width = self.latent_size
        return frames // PATCH_SIZE[0], height // PATCH_SIZE[1], width // PATCH_SIZE[2]

    @property
    def num_tokens(self) -> int:
        frames, height, width = self.token_grid
        return frames * height * width

    def check_positions(self, limit: int) -> None:
        """Raise UserError if an axis of the token grid is longer than the model's rotary table."""
        for name, length in zip(("frames", "height", "width"), self.token_grid, strict=True):
            if length > limit:
                raise UserError(
                    f"{name}: {length} token positions, but this model knows {limit}; make the clip smaller"
                )


def _check_frames(frames: int) -> None:
    step = VAE_STRIDE[0]
    if frames >= 1 and frames % step == 1:
        return
    below = (frames - 1) // step * step + 1
    nearest = f"{below} or {below + step}" if below >= 1 else "1 or 5"
    raise UserError(f"frame_num is {frames}; it must be 4k+1, so use {nearest}")


def _check_side(name: str, side: int) -> None:
    if side >= SIDE_MULTIPLE and side % SIDE_MULTIPLE == 0:
        return
    below = side // SIDE_MULTIPLE * SIDE_MULTIPLE
    nearest = f"{below} or {below + SIDE_MULTIPLE}" if below >= SIDE_MULTIPLE else "16 or 32"
    raise UserError(f"{name} is {side}; it must be a multiple of {SIDE_MULTIPLE}, so use {nearest}")
