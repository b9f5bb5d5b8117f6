"""The start-up check: a backend is made and run on a tiny input, and must agree with plain math in double precision.

Costs a few launches, and the compiling of a library that compiles at first use. Runs before any weight loads.

Shapes: S query tokens, L key tokens, H heads, D head dim; the batch is one.
"""

import math
import warnings

import torch

from usp.backends import flash, ragged, torch_flash, torch_sdpa
from usp.backends.backend import HALVES, Backend, Traits, why_unfit

MODULES = (torch_sdpa, torch_flash, flash, ragged)
TRAITS: dict[str, Traits] = {name: traits for module in MODULES for name, traits in module.TRAITS.items()}
NUM_QUERIES, NUM_HEADS = 200, 2
KEY_COUNTS = (200, 77)  # as many as queries, and as for a text or with a prefix: fewer
MARGIN = 4  # rows and heads around the place that is written to
SEED = 0
FP32_UNITS = 8


def try_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Backend | None, str | None]:
    """(backend, None), or (None, why it cannot be used). Whatever a library raises is an answer, not an error."""
    name = ragged.resolved(name, device)
    obstacle = why_unfit(TRAITS[name], device=device, dtype=dtype, head_dim=head_dim)
    if obstacle is not None:
        return None, obstacle
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch warns of each kernel that it passes over
            backend = make_backend(name, device=device)
            obstacle = _why_wrong(backend, device=device, dtype=dtype, head_dim=head_dim)
    except ImportError as error:
        obstacle = f"its package is missing or broken ({_first_line(error)})"
    except Exception as error:
        obstacle = f"it fails on a tiny input ({type(error).__name__}: {_first_line(error)})"
    return (backend, None) if obstacle is None else (None, obstacle)


def make_backend(name: str, *, device: torch.device) -> Backend:
    """Imports the library. Raises whatever a missing or broken one raises."""
    name = ragged.resolved(name, device)
    module = next(module for module in MODULES if name in module.TRAITS)
    return Backend(name, TRAITS[name], module.make(name, device))


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax of all scores at once, in the dtype of its inputs: [1, S, H, D] against [1, L, H, D] -> [1, S, H, D]."""
    scores = torch.einsum("bshd,blhd->bhsl", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhsl,blhd->bshd", scores.softmax(-1), v)


def _why_wrong(backend: Backend, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    generator = torch.Generator(device).manual_seed(SEED)
    for num_keys in KEY_COUNTS if backend.traits.takes_prefix else KEY_COUNTS[:1]:
        q, k, v = (
            _product(count, head_dim, generator).to(dtype)[:, :, NUM_HEADS : 2 * NUM_HEADS]
            for count in (NUM_QUERIES, num_keys, num_keys)
        )
        result = backend(q, k, v)
        obstacle = _why_inexact(result, q, k, v)
        if obstacle is None and backend.writes_out:
            obstacle = _why_misplaced(backend, result, q, k, v)
        if obstacle is not None:
            return f"on {NUM_QUERIES} queries and {num_keys} keys {obstacle}"
    return None


def _product(count: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """[1, S, 3 * H, D]: of a fused projection attention is given slices, whose rows are three times as far apart."""
    return torch.randn(1, count, 3 * NUM_HEADS, head_dim, generator=generator, device=generator.device)


def _why_inexact(result: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """At most twice the error of plain math in the same dtype, and some units in the last place of the largest value:
    one where every value is rounded to 16 bits at the end, more where only the order of the sums differs."""
    if result.shape != q.shape or result.dtype != q.dtype:
        return f"it returns {list(result.shape)} {result.dtype} for {list(q.shape)} {q.dtype}"
    exact = plain_attention(q.double(), k.double(), v.double())
    units = 1 if q.dtype in HALVES else FP32_UNITS
    slack = units * torch.finfo(q.dtype).eps * exact.abs().max()
    allowed = float(2 * (plain_attention(q, k, v) - exact).abs().max() + slack)
    error = float((result - exact).abs().max())
    return None if error <= allowed else f"it is off by {error:.3g} from plain math, where {allowed:.3g} is allowed"


def _why_misplaced(
    backend: Backend, result: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> str | None:
    """`out` gets the bits of a call without it, and nothing around it changes."""
    num_rows, num_heads = q.shape[1] + 2 * MARGIN, q.shape[2] + 2 * MARGIN
    around = q.new_full((1, num_rows, num_heads, q.shape[3]), torch.nan)
    out = around[:, MARGIN:-MARGIN, MARGIN:-MARGIN]
    backend(q, k, v, out=out)
    if not torch.equal(out, result):
        return "it writes into a given tensor other bits than it returns"
    out.fill_(torch.nan)
    return None if bool(around.isnan().all()) else "it writes beside the tensor it is given"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")
