"""How much communication hid under attention: per rank and step, from what a profiler recorded.

    python scripts/overlap_report.py run.sqlite
    python scripts/overlap_report.py rank0.json.gz rank1.json.gz --json report.json --png call.png

Reads sqlite exports of Nsight Systems (all ranks in one, or a file each) and Chrome traces of torch's profiler (a file
each). `total` is the time of the attention calls. `exposed` is communication with no kernel beside it, `hidden` the
rest of it in the calls; `outside` ran before or after its own call, and counts as not hidden. `stall` is waiting with
neither: a peer was late. `idle` is launches, events and the host. `copies` are those from the rank, and to it from
ranks that were recorded; `inner` leaves out the first group's sends and the last group's returns. GB and GB/s are of
the copies that the rank issued.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from usp.errors import UserError
from usp.recorded_call import Call
from usp.trace_calls import calls_of
from usp.trace_read import read
from usp.trace_report import as_json, text


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    try:
        recordings = [one for path in flags.files for one in read(path)]
        calls = calls_of(recordings, copy_streams=flags.copy_stream)
        print(text(calls))
        _write(calls, flags)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _write(calls: list[Call], flags: argparse.Namespace) -> None:
    if flags.json:
        flags.json.write_text(as_json(calls), encoding="utf-8")
        print(f"wrote {flags.json}")
    if flags.png:
        from usp.trace_draw import draw_call

        width, height = draw_call(calls, flags.png)
        print(f"wrote {flags.png}, {width} x {height}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument(
        "--copy-stream",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="a stream whose activities are copies; may be repeated (default: where sends and returns were issued)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="per rank and step, and per call, in microseconds")
    parser.add_argument("--png", type=Path, metavar="FILE", help="a typical call of the last step, on every rank")
    return parser


if __name__ == "__main__":
    sys.exit(main())
