"""The (cfg, ulysses) mesh of a running job, as process groups.

Made once, after the process group exists; passed to whatever communicates. Costs one group per axis line.
Used by the exchange, guidance and `models/wan/parallel.py`.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from usp.layout import MeshShape


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it: its own line of ranks, and where it stands in it."""

    name: str
    size: int
    index: int
    group: dist.ProcessGroup
    device_type: str  # of the memory that the group moves: "cuda" over NCCL, "cpu" over gloo


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the job. `cfg` is the outer axis, `ulysses` the inner one."""

    shape: MeshShape
    rank: int
    cfg: Axis
    ulysses: Axis


def make_mesh(shape: MeshShape, *, device_type: str) -> Mesh:
    """Build the mesh over all ranks of the default process group.

    `device_type` is "cuda" for groups that move device memory (NCCL) and "cpu" for gloo. Collective; every rank calls
    it with the same shape. Raises UserError when the shape does not have exactly the ranks of the job.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    shape.check_fits(world=world, num_heads=shape.ulysses)
    grid = init_device_mesh(device_type, (shape.cfg, shape.ulysses), mesh_dim_names=("cfg", "ulysses"))
    cfg_index, ulysses_index = shape.coordinates(rank)
    cfg = Axis("cfg", shape.cfg, cfg_index, grid.get_group("cfg"), device_type)
    ulysses = Axis("ulysses", shape.ulysses, ulysses_index, grid.get_group("ulysses"), device_type)
    return Mesh(shape, rank, cfg, ulysses)
