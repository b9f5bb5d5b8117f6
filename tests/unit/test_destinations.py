"""Device tables: every head of every block is where the table says, and nowhere else."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from usp.destinations import FillBlock, FillBlocks, alignment, head_table
from usp.execute import Executor
from usp.placement import Placement
from usp.plan import AttentionPlan, make_plan

PLANS = [
    make_plan(token_counts=(23, 22), num_heads=5, head_dim=8, dtype="float32", num_groups=2),
    make_plan(token_counts=(4, 4, 3), num_heads=12, num_kv_heads=6, head_dim=12, dtype="bfloat16", batch=3, prefix=5),
    make_plan(token_counts=(9, 0, 9, 9), num_heads=7, head_dim=128, dtype="float16", num_groups=5, batch=2),
    make_plan(token_counts=(6,), num_heads=4, num_kv_heads=2, head_dim=3, dtype="float32", suffix=2, direct=False),
]
EVERY_RANK = [(plan, rank) for plan in PLANS for rank in range(plan.num_ranks)]


def executor(plan: AttentionPlan, rank: int) -> Executor:
    """An executor over memory of this process; it enqueues nothing."""
    nbytes = Placement(plan, rank).nbytes
    memory = torch.zeros(nbytes + 256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :][:nbytes]  # as arenas are aligned

    def view(rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return memory[offset:].view(torch.uint8)[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    arena = SimpleNamespace(rank=rank, base=(memory.data_ptr(),) * plan.num_ranks, view=view)
    engine = MagicMock()
    return Executor(plan, arena=arena, engine=engine, attention=lambda q, k, v: q)


@pytest.mark.parametrize(("plan", "rank"), EVERY_RANK)
def test_a_plans_tables_say_where_its_views_are(plan: AttentionPlan, rank: int) -> None:
    blocks = executor(plan, rank).fill_blocks
    if not plan.token_counts[rank]:
        assert blocks == []
        return
    tables, seen = blocks.tables, {"q": set(), "k": set()}
    assert tables.q.shape == (plan.num_heads, 3) and tables.k.shape == (plan.num_kv_heads, 3)
    assert tables.q.dtype == tables.k.dtype == torch.int64
    for block in blocks:
        for name, start, view in (("q", block.head_start, block.q_dst), ("k", block.kv_head_start, block.k_dst)):
            for head in range(view.shape[2]):
                one = view[:, :, head]
                found = getattr(tables, name)[start + head].tolist()
                assert found == [one.data_ptr(), one.stride(0), one.stride(1)]
                seen[name].add(start + head)
    assert seen == {"q": set(range(plan.num_heads)), "k": set(range(plan.num_kv_heads))}


@pytest.mark.parametrize(("plan", "rank"), EVERY_RANK)
def test_every_entry_of_a_plan_is_aligned_as_kernels_assume(plan: AttentionPlan, rank: int) -> None:
    if plan.token_counts[rank]:
        tables, itemsize = executor(plan, rank).fill_blocks.tables, torch.finfo(getattr(torch, plan.dtype)).bits // 8
        for table in (tables.q, tables.k):
            in_bytes = table * torch.tensor([1, itemsize, itemsize])
            assert not (in_bytes % alignment(plan.head_dim, itemsize)).any()


def test_tables_are_made_once() -> None:
    blocks = executor(PLANS[0], 0).fill_blocks
    assert blocks.tables is blocks.tables


def test_a_block_unpacks_as_start_count_and_both_destinations() -> None:
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 2, 8)
    for start, count, q_dst, k_dst in FillBlocks([FillBlock(4, 4, q, k, 2, 2)]):
        assert (start, count) == (4, 4) and q_dst is q and k_dst is k


def test_heads_in_no_run_have_address_zero() -> None:
    rows = torch.zeros(2, 3, 2, 8)
    table = head_table([(1, rows)], num_heads=5)
    address, size = rows.data_ptr(), rows.element_size()
    assert table.tolist() == [[0] * 3, [address, 48, 16], [address + 8 * size, 48, 16], [0] * 3, [0] * 3]
    assert head_table([], num_heads=2, device="cpu").tolist() == [[0] * 3] * 2


def test_scattered_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="elements of a head lie 2 apart"):
        head_table([(0, torch.zeros(1, 2, 2, 16)[..., ::2])], num_heads=2)


@pytest.mark.parametrize("where", ["address", "row stride", "batch stride"])
def test_misaligned_rows_are_refused(where: str) -> None:
    memory, shift = torch.zeros(1000), where == "address"
    strides = (101 if where == "batch stride" else 100, 17 if where == "row stride" else 16, 8, 1)
    rows = memory.as_strided((2, 3, 2, 8), strides, int(shift))
    with pytest.raises(ValueError, match=r"heads of 8 x 4 bytes are written 16 bytes at a time, but .* are \["):
        head_table([(0, rows)], num_heads=2)


@pytest.mark.parametrize(
    ("q", "k", "said"),
    [
        (torch.zeros(2, 4, 4, 8), torch.zeros(2, 3, 2, 8), "q is torch.float32 (2, 4, 4, 8)"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8), "k is torch.float32 (2, 3, 4, 8)"),
        (torch.zeros(2, 3, 4, 8).half(), torch.zeros(2, 3, 2, 8), "q is torch.float16 (2, 3, 4, 8)"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(1, 3, 2, 8), "k is torch.float32 (1, 3, 2, 8)"),
    ],
)
def test_rows_that_do_not_fit_the_destinations_are_refused(q: torch.Tensor, k: torch.Tensor, said: str) -> None:
    blocks = FillBlocks([FillBlock(0, 4, torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 2, 8), 0, 2)])
    blocks.check(q=torch.ones(2, 3, 4, 8), k=torch.ones(2, 3, 2, 8))
    with pytest.raises(ValueError, match=r"the blocks to fill hold torch\.float32 \(2, 3, ") as error:
        blocks.check(q=q, k=k)
    assert said in str(error.value)
