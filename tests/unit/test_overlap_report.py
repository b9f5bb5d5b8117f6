"""The report about recorded overlap: tiny recordings with known answers, in the formats of both profilers."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from PIL import Image, ImageColor

import overlap_report
from tests.unit.profiles import Issued, Process, write_chrome, write_sqlite
from usp.draw import COLOURS
from usp.schedule import Kind

MAIN, COPY = 7, 13


def rank_0(*, next_launched: float = 65, step: int | None = 3) -> Process:
    """One call with two groups of each rank. A copy on the main stream is work; a kernel on the copy stream, a copy."""
    issued = [
        Issued(MAIN, 0, 100, 10),
        Issued(COPY, 101, 121, 21, "usp send g0>1", 2_000_000),
        Issued(MAIN, 101, 131, 23, "usp fill", 4096),
        Issued(COPY, 132, 152, 25, "usp send g0>1", 2_000_000),
        Issued(COPY, 152, 182, 27, "usp send g1>1", 3_000_000),
        Issued(MAIN, 170, 270, 32, "usp attend g0"),
        Issued(COPY, 271, 291, 34, "usp return g0>1", 2_000_000),
        Issued(MAIN, 272, 372, 40, "usp attend g1"),
        Issued(COPY, 373, 393, 42, "usp return g1>1"),
        Issued(MAIN, 420, 430, next_launched),
    ]
    ranges = [("usp layer 5 rank 0 of 0 1", 20, 60), ("usp group 0", 31, 36), ("not ours", 1, 2)]
    return Process(4711, issued, ranges + ([] if step is None else [(f"usp step {step}", 5, 500)]))


def rank_1(*, shift: float = 0.0) -> Process:
    """Returns to rank 0 late, under nothing there."""
    issued = [
        Issued(MAIN, 0, 50, 10),
        Issued(MAIN, 55, 65, 22, "usp attend g0"),
        Issued(COPY, 395, 415, 30, "usp return g0>0", 5_000_000),
        Issued(MAIN, 416, 420, 61),
    ]
    ranges = [("usp layer 5 rank 1 of 0 1", 20, 60), ("usp step 3", 5, 500)]
    moved = [
        replace(one, start=one.start + shift, end=one.end + shift, launched=one.launched + shift) for one in issued
    ]
    return Process(4712, moved, [(name, start + shift, end + shift) for name, start, end in ranges])


def report(*files, flags=()) -> dict:
    out = files[0].with_name("report.json")
    assert overlap_report.main([*map(str, files), "--json", str(out), *flags]) == 0
    return json.loads(out.read_text())


def refusal(capsys, *arguments) -> str:
    assert overlap_report.main([*map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "Traceback" not in printed.err
    return printed.err


def in_both(tmp_path, process: Process) -> list:
    chrome = [write_chrome(tmp_path / f"{k}.json", process, driver_copies=bool(k)) for k in range(2)]
    return [write_sqlite(tmp_path / "a.sqlite", process), write_chrome(tmp_path / "a.json.gz", process), *chrome]


@pytest.mark.parametrize(("next_launched", "stall", "idle"), [(65, 31, 0), (410, 13, 18)])
def test_both_formats_give_what_was_counted_by_hand(tmp_path, capsys, next_launched, stall, idle):
    """The device waits only for what the host has launched: before that, the host is late and nobody else."""
    for file in in_both(tmp_path, rank_0(next_launched=next_launched)):
        (step,) = report(file)["steps"]
        assert (step["rank"], step["step"], step["num_calls"]) == (0, 3, 1)
        named = {"total": 320, "work": 230, "attention": 200, "communication": 110, "exposed": 59, "hidden": 51}
        named |= {"stall": stall, "idle": idle, "inner_communication": 50, "inner_exposed": 19}
        assert {name: step[name] for name in named} == pytest.approx(named), file
        assert step["hidden_share"] == pytest.approx(51 / 110) and step["nbytes"] == 9_000_000
        assert step["gbps"] == pytest.approx(9_000_000 / 90 / 1e3)
    assert "ranks 1" in capsys.readouterr().out  # whose recording would tell stalls from copies


def test_a_return_that_ends_after_the_call_is_told_apart(tmp_path):
    """The caller's next kernel runs beside half of it, and the call is over: nobody hid it and nobody waited for it."""
    process = rank_0()
    last, following = process.issued[-2:]
    process.issued[-2:] = [replace(last, start=425, end=445), replace(following, end=435)]
    for file in in_both(tmp_path, process):
        (step,) = report(file)["steps"]
        named = {"total": 320, "work": 230, "communication": 110, "exposed": 39, "outside": 20, "hidden": 51}
        named |= {"stall": 51, "idle": 0, "inner_communication": 50, "inner_exposed": 19, "inner_outside": 0}
        assert {name: step[name] for name in named} == pytest.approx(named), file
        assert step["hidden_share"] == pytest.approx(51 / 110)


def test_a_recorded_peer_turns_stalls_into_communication(tmp_path):
    both = write_sqlite(tmp_path / "both.sqlite", rank_0(), rank_1())
    one = [write_chrome(tmp_path / f"rank{rank}.json", made) for rank, made in enumerate((rank_0(), rank_1()))]
    for found in (report(both), report(*one)):
        first, second = found["steps"]
        assert (first["communication"], first["exposed"], first["stall"]) == pytest.approx((130, 79, 11))
        assert first["nbytes"] == 9_000_000 and second["nbytes"] == 5_000_000
        assert (second["total"], second["communication"]) == pytest.approx((366, 20 + 110))


def test_files_are_put_on_one_clock(tmp_path):
    origin, late = 1_700_000_000_000_000_000, 250.0
    for write, suffix in ((write_sqlite, "sqlite"), (write_chrome, "json")):
        first = write(tmp_path / f"0.{suffix}", rank_0(), origin_ns=origin)
        second = write(tmp_path / f"1.{suffix}", rank_1(shift=-late), origin_ns=origin + round(late * 1e3))
        assert report(first, second)["steps"][0]["stall"] == pytest.approx(11)


def test_calls_of_a_step_add_up_and_calls_outside_steps_have_none(tmp_path):
    process, again = rank_0(), rank_0()
    moved = [
        replace(one, start=one.start + 1000, end=one.end + 1000, launched=one.launched + 600) for one in again.issued
    ]
    process.issued += moved
    process.ranges.append(("usp layer 6 rank 0 of 0 1", 620, 665))
    found = report(write_sqlite(tmp_path / "a.sqlite", process))
    assert [(one["step"], one["num_calls"]) for one in found["steps"]] == [(None, 1), (3, 1)]
    process.ranges[-2] = ("usp step 3", 5, 700)
    (step,) = report(write_chrome(tmp_path / "a.json", process))["steps"]
    assert step["num_calls"] == 2 and step["communication"] == pytest.approx(220)
    assert step["total"] == pytest.approx(640) and step["nbytes"] == 18_000_000


def test_the_copy_stream_can_be_named(tmp_path, capsys):
    """Where a profiler ties copies to no range, as for calls through the driver."""
    process = rank_0()
    blind = write_chrome(tmp_path / "a.json", process, driver_copies=True)
    content = json.loads(blind.read_text())
    events = [one for one in content["traceEvents"] if one.get("cat") != "gpu_user_annotation"]
    events = [one for one in events if one.get("tid") != COPY or one["cat"] == "gpu_memcpy"]
    blind.write_text(json.dumps({**content, "traceEvents": events}))
    assert "--copy-stream, one of 7, 13" in refusal(capsys, blind)
    (step,) = report(blind, flags=("--copy-stream", "13"))["steps"]
    assert (step["communication"], step["work"], step["exposed"]) == pytest.approx((90, 230, 39))
    assert step["inner_hidden_share"] is None


def test_the_table_names_rank_step_and_rate(tmp_path, capsys):
    report(write_sqlite(tmp_path / "a.sqlite", rank_0()))
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.lstrip().startswith("rank"))
    row = dict(zip(re.split(r"  +", header.strip()), lines[lines.index(header) + 1].split(), strict=True))
    assert (row["rank"], row["step"], row["exposed"], row["hidden"], row["GB/s"]) == ("0", "3", "0.059", "46.4%", "100")


def test_the_picture_shows_attention_in_proportion(tmp_path):
    png = tmp_path / "a.png"
    report(write_sqlite(tmp_path / "a.sqlite", rank_0()), flags=("--png", str(png)))
    with Image.open(png) as image:
        colours = Counter({colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)})
    attention, sends = (colours[ImageColor.getrgb(COLOURS[kind])] for kind in (Kind.ATTEND, Kind.SEND))
    assert attention / sends == pytest.approx(200 / 70, rel=0.15)  # legend boxes are in both, and labels


BROKEN = {
    "empty.json": b"",
    "half.json": b'{"traceEvents": [',
    "list.json": b'{"traceEvents": [1, 2]}',
    "other.json": b'{"events": []}',
    "string.json": b'"traceEvents"',
    "half.json.gz": b"\x1f\x8b\x08\x00",
    "notes.txt": b"hello",
    "fields.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1}]}',
    "torn.sqlite": b"SQLite format 3\0" + bytes(50),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_profile_gets_one_sentence(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(BROKEN[name])
    error = refusal(capsys, tmp_path / name)
    assert name in error and "Chrome trace" in error


def test_other_refusals_name_what_would_work(tmp_path, capsys):
    assert "missing.json" in refusal(capsys, tmp_path / "missing.json")
    bare = Process(1, rank_0().issued[:1], [])
    assert "USP_NVTX=1" in refusal(capsys, write_sqlite(tmp_path / "bare.sqlite", bare))
    twice = [write_chrome(tmp_path / f"{k}.json", rank_0()) for k in range(2)]
    assert "rank 0 is in several" in refusal(capsys, *twice)
    mixed = rank_0()
    mixed.ranges.append(("usp layer 5 rank 1 of 0 1", 70, 80))
    assert "one Chrome trace per rank" in refusal(capsys, write_chrome(tmp_path / "mixed.json", mixed))
    other = rank_1()
    other.ranges[0] = ("usp layer 5 rank 1 of 1 0", 20, 60)
    assert "one job" in refusal(capsys, write_sqlite(tmp_path / "jobs.sqlite", rank_0(), other))
