"""The groups of a mesh are connected before anything is loaded, or a sentence says that they cannot be."""

import time
from dataclasses import replace

import torch

from tests.multi_gpu.ranks import RankEnv, Ranks, new_mesh
from usp.collectives import connect
from usp.errors import UserError
from usp.layout import MeshShape

CPU = torch.device("cpu")


def connect_both(env: RankEnv, late: int | None) -> str:
    mesh = new_mesh(MeshShape(2, 2))
    axes = [replace(axis, device_type="cpu") for axis in (mesh.cfg, mesh.ulysses)]
    start = time.monotonic()
    try:
        if env.rank != late:
            connect(axes, CPU, limit_s=2.0)
        else:
            time.sleep(4.0)
    except UserError as error:
        assert time.monotonic() - start < 30
        return str(error)
    return "connected"


def test_all_axes_are_connected(ranks) -> None:
    assert ranks(4).run(connect_both, None) == ["connected"] * 4


def test_a_group_that_does_not_connect_is_a_sentence() -> None:
    group = Ranks(4)
    try:
        found = group.run(connect_both, 3)
    finally:
        group.close()
    said = "NCCL did not connect within 2 s; NCCL_DEBUG=INFO says why; NCCL_P2P_DISABLE=1 or --exchange gloo may help"
    assert found == [said if one != "connected" else one for one in found]
    assert found[1] == found[2] == said  # which share an axis with rank 3


def connect_nothing(env: RankEnv) -> str:
    mesh = new_mesh(MeshShape(1, 2))
    axes = [replace(axis, device_type="cuda") for axis in (mesh.cfg, mesh.ulysses)]
    if env.rank == 0:
        connect(axes, CPU, limit_s=1.0)  # nothing of these is served: no rank is awaited
    return "done"


def test_axes_that_others_serve_are_left_alone(ranks) -> None:
    assert ranks(2).run(connect_nothing) == ["done"] * 2
