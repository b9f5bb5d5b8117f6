"""The program: cheap checks first, then the heavy part, and one message if either fails.

Nothing here imports torch. The checks take a fraction of a second on every rank, so a wrong flag, mesh, checkpoint or
output folder is answered before a process starts loading, and before `--nproc` starts processes at all.
"""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from usp.errors import UserError
from usp.launch.failure import fail, fail_early
from usp.launch.files import check_outputs
from usp.launch.flags import Flags, build_parser, parse, wants_help, without_flag
from usp.launch.guard import Guard
from usp.launch.request import Request, resolve
from usp.launch.world import SINGLE, World, detect_world, start_ranks
from usp.models.wan.checkpoint.folder import open_checkpoint, packaged_checkpoint
from usp.models.wan.checkpoint.hub import resolve_checkpoint
from usp.models.wan.text import check_text_packages

log = logging.getLogger(__name__)

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. A failure after the checks ends the process instead of returning."""
    parent = os.getppid()
    os.environ.setdefault(CONNECTIONS, "32")  # read when CUDA starts: fewer queues let parked streams stop others
    argv = sys.argv[1:] if argv is None else argv
    world = SINGLE
    try:
        world = detect_world(os.environ)
        if wants_help(argv):
            return _help(world)
        request = prepare(argv, world)
    except (Exception, KeyboardInterrupt) as error:
        return fail_early(world, error)
    return _generate(request, world, parent)


def prepare(argv: Sequence[str], world: World) -> Request:
    """Every cheap check. With `--nproc` this process then becomes the launcher of the ranks, and nothing returns."""
    flags = parse(argv)
    request = resolve(flags, world=_world_to_be(flags, world), checkpoint=open_checkpoint(_folder(flags)))
    if world.rank == 0:  # only rank 0 reads prompts and writes files
        check_text_packages()
        check_outputs(request)
    if flags.nproc is not None:
        start_ranks(flags.nproc, without_flag(argv, "nproc"))
    return request


def _generate(request: Request, world: World, parent: int) -> int:
    _set_up_logging(world)
    for notice in request.notices:
        log.info(notice)
    with Guard(world, parent=parent) as guard:
        try:
            from usp.launch.run import run

            run(request, world, guard)
        except Exception as error:
            fail(guard, error)
    return 0


def _help(world: World) -> int:
    if world.rank == 0:
        sys.stdout.write(build_parser().format_help())
    return 0


def _world_to_be(flags: Flags, world: World) -> World:
    """The world that the checks are about: with --nproc the one that is still to be started."""
    if flags.nproc is None:
        return world
    if world.launcher != "single":
        raise UserError(
            f"--nproc {flags.nproc} starts processes, but {world.launcher} has already started {world.size}; "
            "leave --nproc out"
        )
    return replace(world, size=flags.nproc, local_size=flags.nproc)


def _folder(flags: Flags) -> Path:
    return packaged_checkpoint() if flags.ckpt_dir is None else resolve_checkpoint(flags.ckpt_dir)


def _set_up_logging(world: World) -> None:
    """Our lines at INFO on rank 0; warnings of anybody on every rank, with the rank where it is not 0."""
    is_first = world.rank == 0
    logging.basicConfig(format="%(message)s" if is_first else f"rank {world.rank}: %(message)s", level=logging.WARNING)
    logging.getLogger("usp").setLevel(logging.INFO if is_first else logging.WARNING)
