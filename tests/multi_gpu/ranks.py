"""Spawned ranks that stay: one group of processes per world size, reused by every test that asks for it.

A test body is a module-level function `body(rank_env, *args)`; `Ranks.run` calls it on every rank and returns their
results in rank order. A body that raises, dies or outlives its limit fails the test and takes its group down.
`Ranks.end` lets the processes come to their own end; `close` kills them. Ranks take the GPUs there are in turn; with
one each, collectives go over NCCL. USP_TEST_RANKS="2,3" skips what asks for other numbers of ranks.
"""

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from usp.layout import MeshShape
from usp.mesh import Mesh, make_mesh

END_S, GONE_S = 30.0, 1.0
LIMIT_S = 180.0 if torch.cuda.is_available() else 150.0  # ranks that share a GPU take turns


@dataclass(frozen=True)
class RankEnv:
    rank: int
    world: int
    device: str  # "cpu", or "cuda": the ranks then share the GPUs there are


class RankError(AssertionError):
    """A rank failed; the message is its traceback."""


class Ranks:
    def __init__(self, world: int) -> None:
        skip_unless_asked_for(world)
        self.world = world
        self.broken = False
        context = mp.get_context("spawn")
        port = _free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, body: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Call `body(env, *args)` on every rank; results in rank order."""
        answers = self.run_to_the_end(body, *args, limit_s=limit_s)
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    def run_to_the_end(self, body: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[tuple[bool, Any]]:
        """(whether it returned, its result or what happened) of every rank: for bodies in which ranks are to fail."""
        for pipe in self.pipes:
            pipe.send((body, args))
        deadline = time.monotonic() + limit_s
        return [self._answer(rank, deadline) for rank in range(self.world)]

    def end(self, limit_s: float = END_S) -> list[int | None]:
        """Exit codes of ranks that had nothing more to do, in rank order; None for one that had to be killed."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.close()
        return codes

    def close(self) -> None:
        self.broken = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
            assert not process.is_alive()

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        pipe, process = self.pipes[rank], self.processes[rank]
        while time.monotonic() < deadline:
            if pipe.poll(0.05):
                try:
                    return pipe.recv()
                except (EOFError, ConnectionResetError):
                    process.join(GONE_S)
                    break
            if not process.is_alive():
                break
        return False, f"no answer; alive: {process.is_alive()}, exit code: {process.exitcode}"


def new_mesh(shape: MeshShape) -> Mesh:
    """For bodies that fail on some ranks: what they leave half done on a group is nobody else's."""
    return make_mesh(shape, device_type="cuda" if _has_gpu_each(shape.world) else "cpu")


MESHES: dict[MeshShape, Mesh] = {}  # of a rank's process


def mesh_of(shape: MeshShape) -> Mesh:
    """A mesh that is made once and kept from body to body."""
    if shape not in MESHES:
        MESHES[shape] = new_mesh(shape)
    return MESHES[shape]


def _let_go_of_groups() -> None:
    """All that bodies have made: every group of gloo keeps a thread that wakes a hundred times a second."""
    kept = {axis.group for mesh in MESHES.values() for axis in (mesh.cfg, mesh.ulysses)} | {dist.group.WORLD}
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)


def _has_gpu_each(world: int) -> bool:
    return 1 < world <= torch.cuda.device_count()


def skip_unless_asked_for(world: int) -> None:
    asked = os.environ.get("USP_TEST_RANKS")
    if asked and str(world) not in asked.split(","):
        pytest.skip(f"USP_TEST_RANKS={asked} leaves out {world} ranks")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if _has_gpu_each(world) else "gloo")
    env = RankEnv(rank, world, "cuda" if torch.cuda.is_available() else "cpu")
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            return
        _let_go_of_groups()  # now: every rank has answered for the body before
        try:
            pipe.send((True, body(env, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
