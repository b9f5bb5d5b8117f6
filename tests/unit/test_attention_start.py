"""The check before any weight loads: what is taken, what is refused, and in which words. Libraries are stand-ins."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from usp import attention
from usp.attention import Answer, choose_attention
from usp.backends import backend as backend_module
from usp.backends import flash, ragged, torch_flash
from usp.backends.check import plain_attention, try_backend
from usp.backends.names import NAMES
from usp.errors import UserError

CPU = torch.device("cpu")
BF16 = {"device": CPU, "dtype": torch.bfloat16, "head_dim": 128}


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors, but every backend believes in a GPU of compute capability 9; no optional library is installed."""
    for module in (backend_module, ragged):
        monkeypatch.setattr(module, "compute_capability", lambda device: 9)
    monkeypatch.setattr(attention, "_device_name", lambda device: "a stand-in H200")
    monkeypatch.setattr(attention, "AUTO", {"cpu": attention.AUTO["cuda"]})
    for name in ("fa3_fwd", "fa3_fwd._C", "flash_attn_interface", "flash_attn", "flash_attn.cute", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)


def install_fa3(monkeypatch, forward):
    """`forward(q, k, v, out, **settings)`, as the package's op."""

    def op(q, k, v, *, out=None, **settings):
        return [forward(q, k, v, out, **settings)]

    monkeypatch.setitem(sys.modules, "fa3_fwd._C", ModuleType("fa3_fwd._C"))
    monkeypatch.setitem(sys.modules, "fa3_fwd", ModuleType("fa3_fwd"))
    ops = SimpleNamespace(fa3_fwd=SimpleNamespace(fwd=SimpleNamespace(default=op)))
    monkeypatch.setattr(flash, "torch", SimpleNamespace(ops=ops, Tensor=torch.Tensor))


def right(q, k, v, out, **settings):
    exact = plain_attention(q.float(), k.float(), v.float()).to(q.dtype)
    return exact if out is None else out.copy_(exact)


def off_by_a_key(q, k, v, out, **settings):
    return right(q, k[:, :-1], v[:, :-1], out)


def deaf_to_out(q, k, v, out, **settings):
    return right(q, k, v, None)


def writes_beside(q, k, v, out, **settings):
    if out is not None:
        wide = out.as_strided((*out.shape[:2], out.shape[2] + 1, out.shape[3]), out.stride(), out.storage_offset())
        wide[:, :, -1] = 0
    return right(q, k, v, out)


def other_bits(q, k, v, out, **settings):
    result = right(q, k, v, out)
    return result if out is None else result.mul_(1.01)


def deaf_to_strides(q, k, v, out, **settings):
    dense = [x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset()) for x in (q, k, v)]
    return right(*dense, out)


def raises(q, k, v, out, **settings):
    raise RuntimeError("no kernel image is available\nCUDA kernel errors might be reported later")


def of_another_shape(q, k, v, out, **settings):
    return right(q, k, v, out).transpose(1, 2)


def not_a_number(q, k, v, out, **settings):
    return right(q, k, v, out) * torch.nan


def test_a_library_that_agrees_with_math_is_taken(hopper, monkeypatch):
    settings = []
    install_fa3(monkeypatch, lambda *tensors, **fixed: settings.append(fixed) or right(*tensors))
    chosen = choose_attention("fa3", **BF16)
    assert chosen.backend.name == "fa3" and chosen.backend.writes_out
    assert "agrees with math" in chosen.reason and torch.__version__ in chosen.reason
    fixed = {"softmax_scale": 128**-0.5, "num_splits": 1, "pack_gqa": False}
    assert settings == [fixed] * 4  # two lengths of keys, each with and without `out`


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (off_by_a_key, "off by"),
        (not_a_number, "off by nan"),
        (of_another_shape, "it returns"),
        (deaf_to_out, "other bits than it returns"),
        (other_bits, "other bits than it returns"),
        (writes_beside, "beside the tensor it is given"),
        (deaf_to_strides, "off by"),
        (raises, "RuntimeError: no kernel image is available)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_library_is_refused_by_name_gpu_and_version(hopper, monkeypatch, forward, words):
    install_fa3(monkeypatch, forward)
    monkeypatch.setattr(attention, "version", lambda library: {"fa3-fwd": "0.0.3", "flash-attn-3": "3.0"}[library])
    with pytest.raises(UserError) as caught:
        choose_attention("fa3", **BF16)
    message = str(caught.value)
    assert message.startswith("--attention fa3 cannot run on a stand-in H200 with fa3-fwd 0.0.3, flash-attn-3 3.0")
    assert words in message and message.endswith("use --attention auto") and "\n" not in message


def test_a_missing_library_is_named(hopper):
    with pytest.raises(
        ValueError, match=r"no fa3-fwd or flash-attn-3.*missing or broken.*fa3_fwd.*flash_attn_interface"
    ):
        choose_attention("fa3", **BF16)
    with pytest.raises(ValueError, match=r"with no flash-attn-4.*missing or broken"):
        choose_attention("fa4", **BF16)
    with pytest.raises(ValueError, match=r"--attention flashinfer cannot run.*no flashinfer-python.*missing or broken"):
        choose_attention("flashinfer", **BF16)


def test_a_typo_lists_the_names():
    with pytest.raises(UserError) as caught:
        choose_attention("fa5", **BF16)
    assert "'fa5'" in str(caught.value) and all(name in str(caught.value) for name in ("auto", *NAMES))


def test_auto_takes_the_first_that_runs_and_says_why_not_those_before(hopper, monkeypatch):
    install_fa3(monkeypatch, off_by_a_key)
    chosen = choose_attention("auto", **BF16)
    assert chosen.backend.name == "math"  # of a stand-in GPU, whose tensors are on the CPU
    reasons = chosen.reason.split("; no ")
    assert reasons[0].startswith("no fa3, since on 200 queries and 200 keys it is off by")
    assert [one.partition(",")[0] for one in reasons[1:]] == ["fa4", "cudnn", "flashinfer", "flash", "efficient"]
    install_fa3(monkeypatch, right)
    assert choose_attention("auto", **BF16).backend.name == "fa3"


def test_on_the_cpu_auto_is_torchs_own_choice():
    chosen = choose_attention("auto", device=CPU, dtype=torch.float32, head_dim=12)
    assert chosen.backend.name == "sdpa" and "agrees with math" in chosen.reason


def test_one_rank_that_cannot_sends_all_to_the_next(hopper, monkeypatch):
    install_fa3(monkeypatch, right)
    asked = []

    def gather(own):
        asked.append(own)
        return [own, replace(own, obstacle="it fails here") if len(asked) == 1 else own]

    chosen = choose_attention("auto", **BF16, gather=gather)
    assert chosen.backend.name != "fa3" and chosen.reason.startswith("no fa3, since on rank 1, it fails here; no fa4")
    asked.clear()
    with pytest.raises(UserError, match=r"fa3 cannot run .*: on rank 1, it fails here; use"):
        choose_attention("fa3", **BF16, gather=gather)


def test_ranks_whose_libraries_differ_are_told(hopper, monkeypatch):
    install_fa3(monkeypatch, right)
    with pytest.raises(UserError, match=r"rank 0 has fa3-fwd 1, but rank 2 fa3-fwd 2: their bits may differ"):
        choose_attention("fa3", **BF16, gather=lambda own: [Answer(None, f"fa3-fwd {one}") for one in (1, 1, 2)])


def test_what_cannot_fit_is_refused_before_its_library_is_imported(monkeypatch):
    monkeypatch.setattr("usp.backends.check.make_backend", lambda *args, **settings: pytest.fail("made"))
    assert "compute capability" in try_backend("fa3", **BF16)[1]


class StandInWrapper:
    """FlashInfer's wrapper, as far as it is used here: plans once, runs on rows, and computes with math."""

    made: list["StandInWrapper"]

    def __init__(self, workspace, layout, *, backend):
        self.workspace, self.layout, self.backend, self.runs = workspace, layout, backend, 0
        self.made.append(self)

    def plan(self, starts_q, starts_k, num_heads, num_kv_heads, head_dim, **settings):
        self.starts, self.heads, self.settings = (starts_q, starts_k), (num_heads, num_kv_heads, head_dim), settings

    def run(self, q, k, v, *, out=None, enable_pdl):
        self.runs += 1
        assert q.dtype == self.settings["q_data_type"] == self.settings["kv_data_type"]
        parts = [self._attend(q, k, v, sequence) for sequence in range(len(self.starts[0]) - 1)]
        result = torch.cat(parts)
        return result if out is None else out.copy_(result)

    def _attend(self, q, k, v, sequence):
        rows_q, rows_k = (slice(*starts[sequence : sequence + 2].tolist()) for starts in self.starts)
        return right(q[None, rows_q], k[None, rows_k], v[None, rows_k], None)[0]


@pytest.fixture
def flashinfer(hopper, monkeypatch):
    StandInWrapper.made = []
    module = ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = StandInWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(ragged, "WORKSPACE_BYTES", 1024)
    return StandInWrapper.made


def test_flashinfer_plans_a_shape_once_and_all_shapes_share_one_workspace(flashinfer):
    attend = choose_attention("flashinfer", **BF16).backend
    assert attend.name == "flashinfer-fa3" and attend.writes_out
    assert len(flashinfer) == 2 and [one.runs for one in flashinfer] == [2, 2]
    q = torch.randn(1, 200, 2, 128).bfloat16()
    attend(q, q, q)
    assert len(flashinfer) == 2 and flashinfer[0].runs == 3
    assert len({one.workspace.data_ptr() for one in flashinfer}) == 1 and flashinfer[0].workspace.numel() == 1024


def test_flashinfer_is_told_the_dtype_the_scale_and_one_sequence_per_sample(flashinfer):
    attend = choose_attention("flashinfer-fa2", **BF16).backend
    q, k, v = (torch.randn(3, count, 2, 128).bfloat16() for count in (10, 7, 7))
    result = attend(q, k, v)
    for sample in range(3):
        rows = [x[sample : sample + 1] for x in (q, k, v)]
        assert torch.equal(result[sample : sample + 1], right(*rows, None))
    wrapper = flashinfer[-1]
    assert [starts.tolist() for starts in wrapper.starts] == [[0, 10, 20, 30], [0, 7, 14, 21]]
    assert wrapper.starts[0].dtype == torch.int32 and wrapper.backend == "fa2" and not attend.writes_out
    assert wrapper.settings["disable_split_kv"] and wrapper.settings["sm_scale"] == 128**-0.5
    assert wrapper.heads == (2, 2, 128) and wrapper.settings["causal"] is False


def test_flashinfers_cudnn_counts_elements(flashinfer):
    attend = ragged.make("flashinfer-cudnn", CPU)
    q, k = torch.randn(2, 10, 4, 128), torch.randn(2, 7, 2, 128)
    wrapper = attend._plan(q, k)
    assert [starts.tolist() for starts in wrapper.starts] == [[0, 5120, 10240], [0, 1792, 3584]]
    assert wrapper.settings["max_token_per_sequence"] == 10 and wrapper.settings["max_sequence_kv"] == 7
    assert wrapper.settings["seq_lens"].flatten().tolist() == [7, 7]


def test_flashinfers_cudnn_is_given_dense_rows(flashinfer, monkeypatch):
    """Its graph reads rows as if they lay one after another, whatever strides it is given."""

    def run_dense(self, q, k, v, *, out=None, enable_pdl):
        assert all(one.is_contiguous() for one in (q, k, v))
        return torch.zeros_like(q)

    monkeypatch.setattr(StandInWrapper, "run", run_dense)
    attend = ragged.make("flashinfer-cudnn", CPU)
    q, k, v = torch.randn(1, 10, 12, 128).chunk(3, dim=2)
    assert attend(q, k, v, None).shape == q.shape


def test_flashinfer_says_where_its_32_bits_end(flashinfer):
    attend = ragged.make("flashinfer-cudnn", CPU)
    rows = torch.empty(1, 1, 40, 128).expand(1, 420_000, 40, 128)
    with pytest.raises(ValueError, match="flashinfer-cudnn counts 2,150,400,000 elements in 32 bits"):
        attend._plan(rows, rows)


def test_the_second_package_of_fa3_is_taken_where_the_first_is_missing(hopper, monkeypatch):
    def op(q, k, v, *, out=None, **settings):
        return [right(q, k, v, out)]

    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    ops = SimpleNamespace(flash_attn_3=SimpleNamespace(fwd=SimpleNamespace(default=op)))
    monkeypatch.setattr(flash, "torch", SimpleNamespace(ops=ops, Tensor=torch.Tensor))
    assert choose_attention("fa3", **BF16).backend.name == "fa3"


def test_torchs_flash_is_given_lengths_once_per_shape(monkeypatch):
    """Without them it would split the keys of short clips by the number of heads."""
    given = []

    def op(q, k, v, starts_q, starts_k, longest_q, longest_k, **settings):
        given.append((starts_q, starts_k, longest_q, longest_k, settings["scale"]))
        sequences = zip(q.split(longest_q), k.split(longest_k), v.split(longest_k), strict=True)
        return [torch.cat([right(*(x[None] for x in one), None)[0] for one in sequences])]

    ops = SimpleNamespace(aten=SimpleNamespace(_flash_attention_forward=op))
    monkeypatch.setattr(torch_flash, "torch", SimpleNamespace(ops=ops, Tensor=torch.Tensor))
    attend = torch_flash.make("flash", CPU)
    q, k, v = (torch.randn(2, count, 3, 64) for count in (10, 7, 7))
    for _ in range(2):
        torch.testing.assert_close(attend(q, k, v, None), right(q, k, v, None), rtol=0, atol=1e-6)
    assert [starts.tolist() for starts in given[0][:2]] == [[0, 10, 20], [0, 7, 14]]
    assert given[0][2:] == (10, 7, 64**-0.5) and all(a is b for a, b in zip(given[0][:2], given[1][:2], strict=True))


def test_fa4_is_asked_for_one_split(hopper, monkeypatch):
    settings = []
    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = lambda q, k, v, out=None, **fixed: (settings.append(fixed) or right(q, k, v, out), None)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    assert choose_attention("fa4", **BF16).backend.writes_out
    assert {(one["num_splits"], one["pack_gqa"]) for one in settings} == {(1, False)}


@pytest.mark.parametrize("head_dim", [8, 56, 64, 128, 254])
@pytest.mark.parametrize("name", ["math", "sdpa"])
def test_correct_kernels_pass_in_fp32_at_any_head_dim(name: str, head_dim: int) -> None:
    chosen = choose_attention(name, device=torch.device("cpu"), dtype=torch.float32, head_dim=head_dim)
    assert chosen.backend.name == name
