"""The simulator's command line, and what it must not import."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from usp.simulate_command import main

SMALL = ["--tokens", "6000", "--heads", "8", "--head-dim", "64", "--ranks", "2"]


def test_it_prints_draws_and_writes_what_was_asked(tmp_path, capsys) -> None:
    png, trace, events = tmp_path / "a.png", tmp_path / "trace.json", tmp_path / "events.json"
    files = ["--png", str(png), "--trace", str(trace), "--json", str(events)]
    assert main([*SMALL, "--groups", "1-2-1", *files]) == 0
    printed = capsys.readouterr().out
    with Image.open(png) as image:
        assert f"wrote {png}, {image.width} x {image.height}" in printed
    assert "groups 1-2-1" in printed and "inner hidden" in printed
    assert json.loads(trace.read_text())["traceEvents"] and json.loads(events.read_text())["calls"]


def test_groupings_are_compared_fastest_first(capsys) -> None:
    assert main(["--compare", "20", "2-5-6-5-2", "4-4-4-4-4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["2-5-6-5-2", "4-4-4-4-4", "20"]
    assert [float(row[1]) for row in rows] == sorted(float(row[1]) for row in rows)


def test_uneven_ranks_take_one_list_each(capsys) -> None:
    assert main(["--heads", "6", "--kv-heads", "3", "--tokens", "45", "--groups", "1-1,0-1", "--not-direct"]) == 0
    assert "6 heads (3 kv) of 128, bfloat16, groups 1-1,0-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--groups", "2-5-6-5-3"], ["2-5-6-5-3", "42", "not 40 on 2"]),
        (["--groups", "2-x"], ["'2-x'", "2-5-6-5-2"]),
        (["--groups", "20-20,20"], ["60", "40 on 2"]),
        (["--ranks", "0"], ["0 ranks", "at least 1"]),
        (["--ranks", "17"], ["17 ranks", "1 to 16"]),
        (["--kv-heads", "3"], ["40 query heads", "3 key/value heads"]),
        (["--link-gbps", "-5"], ["link_gbps is -5.0"]),
        (["--emulate", "2"], ["--emulate 2", "0 to 1"]),
        (["--measured", "/nowhere/table.json"], ["/nowhere/table.json"]),
        (["--compare", "20", "--png", "a.png"], ["--compare", "--png"]),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(flags, words, capsys) -> None:
    assert main(flags) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)


def test_two_processes_give_the_same_timeline_and_import_nothing_heavy(tmp_path) -> None:
    code = (
        "import sys; from usp.simulate_command import main; "
        "code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'PIL'} & set(sys.modules); sys.exit(code or str(heavy or '') or 0)"
    )
    written = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        command = [sys.executable, "-c", code, *SMALL, "--ranks", "3", "--json", str(path)]
        run = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        written.append(path.read_text())
    assert written[0] == written[1]
