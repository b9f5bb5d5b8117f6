"""What the simulator expects of the day, filed before anything is measured, under the names of the measurements.

Plain arithmetic on the rates of usp/costs.py, which describe one H200 and the copy engines of NVLink 4. Times of a
block and of a step start from what one H200 was measured to take (docs/benchmarks.md): 247.3 ms and 19.55 s at 75,600
tokens, 64.0 ms and 4.97 s at 32,760.
"""

from collections.abc import Iterator

from scripts.gpu_day.notes import Note, call_name
from scripts.gpu_day.sizes import SIZES_480P, SIZES_720P, Sizes
from usp.costs import Costs
from usp.layout import split_counts
from usp.overlap import Overlap
from usp.plan import AttentionPlan, make_plan
from usp.simulate import simulate
from usp.tables import describe_groups

BLOCK_MS = {SIZES_720P: 247.3, SIZES_480P: 64.0}
STEP_S = {SIZES_720P: 19.55, SIZES_480P: 4.97}
LAYERS, BRANCHES = 40, 2
NO_ATTENTION = {("attend", "", None): 0.0}
CALLS = 3


def predictions(sizes: Sizes, *, ranks_of_calls: set[int], meshes: list[tuple[int, int]]) -> dict[str, Note]:
    """By name: of calls, and of steps on meshes of (cfg, ulysses) ranks."""
    found: dict[str, Note] = {}
    for ranks in sorted(ranks_of_calls):
        for tokens in sizes.tokens:
            found |= dict(_calls(sizes, tokens, ranks))
    for cfg, ulysses in meshes:
        for tokens in sizes.tokens:
            found |= dict(_steps(sizes, tokens, cfg, ulysses))
    return found


def plan_for(sizes: Sizes, tokens: int, ranks: int, widths: tuple[int, ...] | None = None) -> AttentionPlan:
    return make_plan(
        token_counts=split_counts(tokens, ranks),
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        dtype=sizes.dtype,
        group_widths=widths,
    )


def plans_for(sizes: Sizes, tokens: int, ranks: int) -> list[AttentionPlan]:
    """With the groups of the plan's own rule first, then those that are compared with it."""
    own = plan_for(sizes, tokens, ranks)
    others = [widths for widths in sizes.groupings(ranks) if widths != own.group_widths[0]]
    return [own, *(plan_for(sizes, tokens, ranks, widths) for widths in others)]


def expected(plan: AttentionPlan, costs: Costs | None = None) -> Overlap:
    """Of the slowest rank in the last call of several."""
    timeline = simulate(plan, costs or Costs(), calls=CALLS)
    return timeline.overlap(timeline.slowest(CALLS), CALLS)


def _calls(sizes: Sizes, tokens: int, ranks: int) -> Iterator[tuple[str, Note]]:
    alone = expected(plan_for(sizes, tokens, ranks), Costs(measured=NO_ATTENTION))
    yield _ms(call_name(tokens, ranks, "exchange alone, pipelined"), alone.total)
    for plan in plans_for(sizes, tokens, ranks):
        overlap = expected(plan)
        name = call_name(tokens, ranks, f"call, groups {describe_groups(plan)}")
        yield _ms(name, overlap.total)
        yield _ms(f"{name}, exposed", overlap.exposed)
        yield _share(f"{name}, hidden share", overlap.hidden_share or 0.0)
    if tokens in BLOCK_MS:
        exposed = expected(plan_for(sizes, tokens, ranks)).exposed / 1e3
        name = call_name(tokens, ranks, "block, exposed share")
        yield _share(name, exposed / (BLOCK_MS[tokens] / ranks + exposed))


def _steps(sizes: Sizes, tokens: int, cfg: int, ulysses: int) -> Iterator[tuple[str, Note]]:
    if tokens not in STEP_S:
        return
    exposed = expected(plan_for(sizes, tokens, ulysses)).exposed / 1e6 if ulysses > 1 else 0.0
    seconds = STEP_S[tokens] / (cfg * ulysses) + LAYERS * BRANCHES / cfg * exposed
    name = step_name(tokens, cfg, ulysses)
    yield name, {"value": seconds, "unit": "s"}
    yield _share(f"{name}, efficiency", STEP_S[tokens] / (cfg * ulysses * seconds))


def step_name(tokens: int, cfg: int, ulysses: int) -> str:
    return f"step of {tokens:,} tokens, mesh {cfg}x{ulysses}"


def _ms(name: str, us: float) -> tuple[str, Note]:
    return name, {"value": us / 1e3, "unit": "ms"}


def _share(name: str, share: float) -> tuple[str, Note]:
    return name, {"value": share, "unit": ""}
