"""On a GPU, every backend that runs there: a head's bits do not depend on its group, and a call waits for nobody.

One process. Backends that this machine lacks are skipped with their reason; those inside torch must run.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from usp.attention import choose_attention
from usp.backends.check import plain_attention, try_backend
from usp.backends.names import NAMES
from usp.errors import UserError
from usp.layout import split_counts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),  # some libraries compile at first use
]

IN_TORCH = ("cudnn", "flash", "efficient", "math")
FIXED = tuple(name for name in NAMES if name != "sdpa")  # which picks by shape, and promises nothing
HEAD_DIM = 128
GROUPS = ((0, 1), (1, 3), (3, 6), (6, 11))  # of 1, 2, 3 and 5 heads
GROUPS_OF_EIGHT = ((0, 1), (1, 3), (3, 8), (2, 5))
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
OUTSIDE = 3  # heads and rows around the place that is written to


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def backend(device):
    """`backend(name)`: made once; skips where this machine lacks it."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = try_backend(name, device=device, dtype=torch.bfloat16, head_dim=HEAD_DIM)
        found, obstacle = made[name]
        if found is None:
            assert name not in IN_TORCH, f"{name} is part of torch: {obstacle}"
            pytest.skip(f"{name}: {obstacle}")
        return found

    return get


def inputs(device, num_queries, num_keys=None, *, batch=1, heads=11, kv_heads=None):
    """Slices of a row that holds more, as a fused projection gives them."""
    num_keys, kv_heads = num_keys or num_queries, kv_heads or heads

    def rows(count, width):
        fused = torch.randn(batch, count, width + 2, HEAD_DIM, device=device, dtype=torch.bfloat16)
        return fused[:, :, 1:-1]

    return rows(num_queries, heads), rows(num_keys, kv_heads), rows(num_keys, kv_heads)


def assert_groups_are_stable(attend, q, k, v, groups):
    full = attend(q, k, v)
    for start, stop in groups:
        strided = [x[:, :, start:stop] for x in (q, k, v)]
        for form, tensors in (("strided", strided), ("dense", [x.contiguous() for x in strided])):
            found = attend(*tensors)
            differing = int((found != full[:, :, start:stop]).sum())
            assert differing == 0, f"heads {start} to {stop}, {form}: {differing} of {found.numel()} values differ"


@pytest.mark.parametrize("num_tokens", [1000, 4000])
@pytest.mark.parametrize("name", FIXED)
def test_a_group_of_heads_alone_has_the_bits_of_the_full_call(backend, device, name, num_tokens):
    assert_groups_are_stable(backend(name), *inputs(device, num_tokens), GROUPS)


@pytest.mark.parametrize("name", FIXED)
def test_a_group_of_heads_alone_has_the_bits_of_the_full_call_at_720p(backend, device, name):
    assert_groups_are_stable(backend(name), *inputs(device, 75600, heads=8), GROUPS_OF_EIGHT)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1000, 512), (4000, 512), (1000, 1077), (45, 45), (1, 77)])
@pytest.mark.parametrize("name", FIXED)
def test_keys_of_another_length_are_attended_to_exactly_and_stably(backend, device, name, num_queries, num_keys):
    attend = backend(name)
    q, k, v = inputs(device, num_queries, num_keys)
    exact = plain_attention(q.double(), k.double(), v.double())
    allowed = 2 * (plain_attention(q, k, v) - exact).abs().max()
    assert (attend(q, k, v) - exact).abs().max() <= allowed
    assert_groups_are_stable(attend, q, k, v, GROUPS)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(256, 512), (1000, 512), (4000, 512), (75600, 512)])
@pytest.mark.parametrize("name", FIXED)
def test_a_share_of_the_queries_has_the_bits_of_the_full_call(backend, device, name, num_queries, num_keys):
    """A rank attends to the text with its own tokens only."""
    attend = backend(name)
    q, k, v = inputs(device, num_queries, num_keys, heads=5)
    full = attend(q, k, v)
    for num_ranks in (2, 3, 4, 8):
        shares = q.split(split_counts(num_queries, num_ranks), dim=1)
        found = torch.cat([attend(share, k, v) for share in shares], dim=1)
        assert torch.equal(found, full), f"{num_ranks} ranks: {int((found != full).sum())} values differ"


@pytest.mark.parametrize("name", FIXED)
def test_samples_of_a_batch_have_the_bits_of_each_alone(backend, device, name):
    attend = backend(name)
    q, k, v = inputs(device, 1000, batch=2, heads=3)
    both = attend(q, k, v)
    for sample in range(2):
        alone = attend(*(x[sample : sample + 1] for x in (q, k, v)))
        assert torch.equal(both[sample : sample + 1], alone), f"sample {sample}"


@pytest.mark.parametrize("name", FIXED)
def test_a_group_of_grouped_heads_has_the_bits_of_the_full_call(backend, device, name):
    attend = backend(name)
    if not attend.traits.takes_gqa:
        pytest.skip(f"{name} has declared no GQA")
    q, k, v = inputs(device, 1000, heads=12, kv_heads=4)
    full = attend(q, k, v)
    for start, stop in ((0, 1), (1, 4)):
        alone = attend(q[:, :, 3 * start : 3 * stop], *(x[:, :, start:stop] for x in (k, v)))
        assert torch.equal(alone, full[:, :, 3 * start : 3 * stop]), f"key/value heads {start} to {stop}"


@pytest.mark.parametrize(("num_tokens", "batch"), [(1000, 1), (1000, 2), (4000, 1), (75600, 1)])
@pytest.mark.parametrize("name", FIXED)
def test_out_gets_the_same_bits_and_nothing_else_is_touched(backend, device, name, num_tokens, batch):
    attend = backend(name)
    if not attend.writes_out:
        pytest.skip(f"{name} has declared no out=")
    for heads in (1, 2, 3, 5):
        q, k, v = inputs(device, num_tokens, batch=batch, heads=heads)
        fresh = attend(q, k, v)
        shape = (batch, num_tokens + 2 * OUTSIDE, heads + 2 * OUTSIDE, HEAD_DIM)
        around = torch.full(shape, torch.nan, device=device, dtype=torch.bfloat16)
        rows = slice(OUTSIDE, -OUTSIDE) if batch == 1 else slice(None)  # samples follow each other without a gap
        if batch > 1:
            q, k, v = inputs(device, num_tokens + 2 * OUTSIDE, batch=batch, heads=heads)
            fresh = attend(q, k, v)
        out = around[:, rows, OUTSIDE:-OUTSIDE]
        attend(q, k, v, out=out)
        assert torch.equal(out, fresh), f"{heads} heads"
        out.fill_(torch.nan)
        assert bool(around.isnan().all()), f"{heads} heads: something beside the place was written"


@pytest.mark.parametrize("name", FIXED)
def test_a_planned_call_neither_synchronises_nor_copies_from_pageable_memory(backend, device, name):
    attend = backend(name)
    self_attention, text = inputs(device, 1000), inputs(device, 1000, 512)
    for shapes in (self_attention, text):
        attend(*shapes)

    def calls():
        for _ in range(3):
            attend(*self_attention)
            attend(*text)

    assert waits_and_copies(calls) == []


@pytest.mark.parametrize("name", FIXED)
def test_planning_a_shape_copies_from_pinned_memory_only(backend, device, name):
    attend, q_k_v = backend(name), inputs(device, 1234, 567, heads=7)
    found = waits_and_copies(lambda: attend(*q_k_v))
    assert [one for one in found if "Pageable" in one] == []


def test_waits_and_pageable_copies_would_be_seen(device):
    found = waits_and_copies(lambda: torch.randn(3).to(device).sum().item())
    assert any("Pageable -> Device" in one for one in found) and any("Synchronize" in one for one in found)


def waits_and_copies(calls):
    """Names of the host waits inside `calls`, and of all copies between host and device that they queued."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function("calls"):
            calls()
        torch.cuda.synchronize()
    events = seen.events()
    whole = next(event for event in events if event.name == "calls").time_range
    waits = [e.name for e in events if e.name in SYNCS and whole.start <= e.time_range.start < whole.end]
    return waits + [e.name for e in events if e.name.startswith("Memcpy") and "DtoD" not in e.name]


def test_auto_takes_a_backend_that_runs_and_names_every_one_before(device):
    chosen = choose_attention("auto", device=device, dtype=torch.bfloat16, head_dim=HEAD_DIM)
    assert chosen.backend.name in FIXED and "agrees with math" in chosen.reason
    has_fa3, _ = try_backend("fa3", device=device, dtype=torch.bfloat16, head_dim=HEAD_DIM)
    assert (chosen.backend.name == "fa3") == (has_fa3 is not None)


def test_a_backend_that_this_gpu_lacks_is_a_value_error_that_names_it(device):
    with pytest.raises(ValueError, match=r"--attention fa3 cannot run on .* torch .*float32") as caught:
        choose_attention("fa3", device=device, dtype=torch.float32, head_dim=HEAD_DIM)
    assert isinstance(caught.value, UserError) and torch.cuda.get_device_name(device) in str(caught.value)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 128), (torch.bfloat16, 12), (torch.float16, 128)])
def test_auto_finds_a_backend_for_every_dtype_and_for_narrow_heads(device, dtype, head_dim):
    assert choose_attention("auto", device=device, dtype=dtype, head_dim=head_dim).backend.name in NAMES
