"""The backends as they compute: against plain math, with what they have declared, and head groups alone."""

import threading

import pytest
import torch

from usp.attention import sdpa, writes_out
from usp.backends.backend import ANY_FLOAT, Backend, Traits, why_unfit
from usp.backends.check import TRAITS, make_backend, plain_attention
from usp.backends.names import AUTO, NAMES
from usp.backends.torch_sdpa import CHOICE

CPU = torch.device("cpu")
ON_CPU = ("sdpa", "math")


def inputs(num_queries, num_keys, *, batch=1, heads=3, kv_heads=None, head_dim=16, dtype=torch.float32):
    shapes = ((num_queries, heads), *[(num_keys, kv_heads or heads)] * 2)
    return [torch.randn(batch, count, width, head_dim).to(dtype) for count, width in shapes]


@pytest.mark.parametrize("dtype", ANY_FLOAT, ids=str)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(45, 45), (45, 77), (30, 1), (1, 30)])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_backend_is_as_exact_as_plain_math_in_its_dtype(name, num_queries, num_keys, dtype):
    q, k, v = inputs(num_queries, num_keys, batch=2, dtype=dtype)
    exact = plain_attention(q.double(), k.double(), v.double())
    unit = torch.finfo(dtype).eps * exact.abs().max()
    allowed = 2 * (plain_attention(q, k, v) - exact).abs().max() + unit
    result = make_backend(name, device=CPU)(q, k, v)
    assert result.shape == q.shape and result.dtype == dtype
    assert (result - exact).abs().max() <= allowed


@pytest.mark.parametrize("name", ON_CPU)
def test_grouped_heads_are_those_of_repeated_keys_and_values(name):
    q, k, v = inputs(45, 50, heads=6, kv_heads=2)
    attend = make_backend(name, device=CPU)
    repeated = attend(q, *(x.repeat_interleave(3, dim=2) for x in (k, v)))
    torch.testing.assert_close(attend(q, k, v), repeated, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ON_CPU)
def test_heads_alone_are_those_of_the_full_call(name):
    q, k, v = inputs(45, 45, heads=5)
    attend = make_backend(name, device=CPU)
    full = attend(q, k, v)
    for heads in (slice(0, 1), slice(1, 3), slice(2, 5)):
        alone = attend(*(x[:, :, heads].contiguous() for x in (q, k, v)))
        torch.testing.assert_close(alone, full[:, :, heads], rtol=0, atol=1e-6)


def test_math_computes_all_scores_where_torch_would_pick_another_kernel(monkeypatch):
    seen = []
    monkeypatch.setattr("usp.backends.torch_sdpa.sdpa", lambda q, k, v: seen.append(_enabled()) or sdpa(q, k, v))
    make_backend("math", device=CPU)(*inputs(8, 8))
    assert set(seen) == {(True, False)} and _enabled() == (True, True)


@pytest.mark.parametrize(("num_queries", "batch", "kv_heads"), [(1, 1, 2), (511, 1, 4), (1300, 2, 2)])
def test_a_share_of_the_queries_has_the_bits_of_all_under_math(num_queries, batch, kv_heads):
    attend = make_backend("math", device=CPU)
    q, _, _ = inputs(num_queries, 1, heads=4, batch=batch)
    _, k, v = inputs(1, 77, heads=4, kv_heads=kv_heads, batch=batch)
    full = attend(q, k, v)
    for size in (1, 100, 512, 700):
        assert torch.equal(torch.cat([attend(some, k, v) for some in q.split(size, 1)], 1), full), size


@pytest.mark.parametrize("name", ON_CPU)
def test_gradients_are_those_of_plain_math(name):
    given = [x.requires_grad_() for x in inputs(600, 30, heads=2, dtype=torch.float64)]
    plain_attention(*given).pow(2).sum().backward()
    expected = [x.grad.clone() for x in given]
    for x in given:
        x.grad = None
    make_backend(name, device=CPU)(*given).pow(2).sum().backward()
    for x, wanted in zip(given, expected, strict=True):
        assert torch.allclose(x.grad, wanted, rtol=1e-9, atol=1e-12)


def _enabled() -> tuple[bool, bool]:
    return torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()


def test_two_threads_do_not_change_each_others_choice_of_kernel():
    """The choice belongs to the process: the second thread waits for the first."""
    attend, done = make_backend("math", device=CPU), threading.Event()
    thread = threading.Thread(target=lambda: (attend(*inputs(8, 8)), done.set()))
    with CHOICE:
        thread.start()
        assert not done.wait(0.2)
    thread.join(10)
    assert done.is_set() and _enabled() == (True, True)


def test_a_rank_without_tokens_asks_no_kernel():
    asked = []
    backend = Backend("one", Traits((), "none", writes_out=True), lambda *tensors: asked.append(tensors))
    q, k, v = inputs(0, 77)
    out = q.clone()
    assert backend(q, k, v).shape == q.shape and backend(q, k, v, out=out) is out and asked == []


def test_what_was_not_declared_is_refused():
    backend = Backend("one", Traits((), "none", takes_gqa=False), lambda q, k, v, out: q)
    q, k, v = inputs(4, 4, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match="one takes as many key/value heads"):
        backend(q, k, v)
    with pytest.raises(ValueError, match="one cannot write into a given tensor"):
        backend(q, q, q, out=torch.empty_like(q))
    assert backend(q, q, q) is q and not writes_out(backend)


def test_the_executor_sees_who_writes_to_its_place():
    for name in ("sdpa", "math"):
        assert not writes_out(make_backend(name, device=CPU))
    assert writes_out(Backend("one", TRAITS["fa3"], lambda *tensors: tensors[0])) and not writes_out(sdpa)


@pytest.mark.parametrize("name", ["fa3", "fa4", "flashinfer-fa3"])
def test_a_gpu_kernel_is_refused_on_the_cpu_with_what_it_needs(name):
    reason = why_unfit(TRAITS[name], device=CPU, dtype=torch.bfloat16, head_dim=128)
    assert "compute capability 9.x" in reason and "is the CPU" in reason


@pytest.mark.parametrize(
    ("major", "dtype", "head_dim", "words"),
    [
        (8, torch.bfloat16, 128, "9.x, and this one is of 8.x"),
        (10, torch.bfloat16, 128, "9.x, and this one is of 10.x"),
        (9, torch.float32, 128, "bfloat16 or float16, not float32"),
        (9, torch.bfloat16, 12, "heads of 12 channels"),
        (9, torch.float16, 64, None),
    ],
)
def test_a_declaration_names_what_does_not_fit(monkeypatch, major, dtype, head_dim, words):
    monkeypatch.setattr("usp.backends.backend.compute_capability", lambda device: major)
    reason = why_unfit(TRAITS["fa3"], device=CPU, dtype=dtype, head_dim=head_dim)
    assert reason is None if words is None else words in reason


def test_every_name_has_a_declaration_and_auto_tries_no_other():
    assert {*NAMES} == {*TRAITS, "flashinfer"}
    assert {name for names in AUTO.values() for name in names} <= {*NAMES}
    assert AUTO["cuda"][-1] == "math" and "math" in ON_CPU  # it runs everywhere
