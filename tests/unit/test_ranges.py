"""Ranges for profilers: names that can be read back, around the right operations, and nothing where they are off."""

import timeit
from contextlib import contextmanager

import pytest
import torch

from usp.errors import UserError
from usp.launch.capture import Capture, capture_from
from usp.plan import AttentionPlan
from usp.ranges import Mark, Ranges, layer_name, op_name, parse, ranges_from, record_functions, step_name, who
from usp.schedule import Kind, build
from usp.trace_read import read

PLAN = AttentionPlan((5, 4, 3), 12, 12, 8, "float32", ((2, 1, 1),) * 3, direct=False)


class Log:
    """Ranges that write down when they open and close."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ranges = Ranges(self._range)

    @contextmanager
    def _range(self, name: str):
        self.lines.append(f"+{name}")
        yield
        self.lines.append(f"-{name}")


def test_names_can_be_read_back() -> None:
    assert parse(step_name(3)) == Mark("step", 3)
    assert parse(layer_name(7, who(4, (4, 5, 6)))) == Mark("layer", 7, rank=4, ranks=(4, 5, 6))
    for op in build(PLAN, 1):
        name = op_name(op)
        if name:
            peer = op.flag.writer if op.flag else op.peer
            assert parse(name) == Mark(op.kind.value, op.group, peer), op
    assert {op.kind for op in build(PLAN, 1) if op_name(op)} >= {Kind.SEND, Kind.WAIT, Kind.ATTEND, Kind.RETURN}


@pytest.mark.parametrize("name", ["", "usp", "aten::mm", "usp layer", "usp step 3x", "xusp step 3", "usp send g1>"])
def test_names_of_others_are_not_taken_for_ours(name: str) -> None:
    mark = parse(name)
    assert mark is None or mark == Mark("layer")  # too little to be a call's


def test_each_operation_runs_inside_its_range_and_its_group() -> None:
    log, ops = Log(), [op for op in build(PLAN, 1) if op.kind not in (Kind.PRODUCE, Kind.CONSUME)]
    steps = log.ranges.steps(ops, [lambda call, op=op: log.lines.append(f"{call} {op}") for op in ops])
    for step in steps:
        step("call 9")
    assert [line for line in log.lines if line[0] not in "+-"] == [f"call 9 {op}" for op in ops]
    opened: list[str] = []
    for line in log.lines:
        if line[0] == "+":
            opened.append(line[1:])
        elif line[0] == "-":
            assert opened.pop() == line[1:]
        else:
            op = next(op for op in ops if line == f"call 9 {op}")
            assert [op_name(op)] * bool(op_name(op)) == [name for name in opened if "group" not in name]
            if op.group >= 0:
                assert opened[0] == f"usp group {op.group}"
    assert not opened
    for group in range(3):  # from its attention to its last return, events included, a group is one range
        attend = log.lines.index(f"+usp attend g{group}")
        returned = max(place for place, line in enumerate(log.lines) if line.startswith(f"-usp return g{group}"))
        assert f"+usp group {group}" not in log.lines[attend:returned]


def test_where_ranges_are_off_the_steps_are_the_very_same_functions() -> None:
    steps = [object() for _ in build(PLAN, 0)]
    assert Ranges().steps(build(PLAN, 0), steps) == steps
    assert Ranges().wrap("usp attend g0", len) is len


def test_a_range_that_is_off_costs_a_fraction_of_a_microsecond() -> None:
    """0.2 us and less on an idle machine; the best of many short runs, since the others may be disturbed."""
    once = timeit.Timer("with off.range('usp step 3'): pass", globals={"off": Ranges()})
    assert min(once.repeat(number=2_000, repeat=50)) / 2_000 < 0.5e-6


def test_torchs_profiler_records_the_ranges_of_a_call(tmp_path) -> None:
    ranges = record_functions()
    step, layer = step_name(2), layer_name(1, who(0, (0, 1)))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler, ranges.range(step), ranges.range(layer):
        ranges.wrap("usp attend g1", torch.mm)(torch.ones(8, 8), torch.ones(8, 8))
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    (recording,) = read(tmp_path / "trace.json.gz")
    (step,), (layer,), (attend,) = (recording.of(kind) for kind in ("step", "layer", "attend"))
    assert (step.mark.number, layer.mark.ranks, attend.mark.number) == (2, (0, 1), 1)
    assert step.start <= layer.start <= attend.start < attend.end <= layer.end <= step.end
    assert step.thread == attend.thread


def test_the_environment_turns_ranges_on_and_bad_values_are_named() -> None:
    assert not ranges_from({}).enabled and not ranges_from({"USP_NVTX": "0"}).enabled
    with pytest.raises(UserError, match="USP_NVTX is 'yes'"):
        ranges_from({"USP_NVTX": "yes"})
    if torch.version.cuda is None:
        with pytest.raises(UserError, match="CUDA build of torch"):
            ranges_from({"USP_NVTX": "1"})
    else:
        assert ranges_from({"USP_NVTX": "1"}).enabled


def test_a_capture_covers_the_chosen_steps_on_every_rank() -> None:
    log = Log()
    note = log.lines.append
    capture = Capture(
        log.ranges, range(1, 3), lambda: note("start"), lambda: note("stop"), lambda step: note(f"meet {step}")
    )
    for step in range(4):
        capture.before(step)
        note(f"run {step}")
        capture.after(step)
    whole = [
        ["start", "meet 1"] * (step == 1) + [f"+usp step {step}", f"run {step}", f"-usp step {step}"]
        for step in range(4)
    ]
    whole[2] += ["meet 2", "stop"]
    assert log.lines == [line for lines in whole for line in lines]


@pytest.mark.parametrize(("text", "steps"), [("", []), ("0", [0]), ("3-4", [3, 4]), ("4-4", [4])])
def test_steps_are_chosen_by_number(text: str, steps: list[int]) -> None:
    made = capture_from({"USP_PROFILE_STEPS": text}, num_steps=5, device=torch.device("cpu"))
    assert list(made.chosen) == steps
    made.start()  # on a CPU there is nothing to start


@pytest.mark.parametrize("text", ["5", "4-3", "3-5", "-1", "a", "1,2", "1-"])
def test_steps_that_the_run_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="among 0-4"):
        capture_from({"USP_PROFILE_STEPS": text}, num_steps=5, device=torch.device("cpu"))
