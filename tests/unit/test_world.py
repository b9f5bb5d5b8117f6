"""Which rank a process is: torchrun's word, mpirun's word, both, neither, and words that make no sense."""

import ast
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import usp.launch
from usp.errors import UserError
from usp.launch import world as world_module
from usp.launch.main import CONNECTIONS
from usp.launch.world import SINGLE, World, detect_world

ROOT = Path(__file__).parents[2]

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


def _without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_an_empty_environment_is_a_single_process():
    assert detect_world({}) == SINGLE == World(0, 1, 0, 1, "single")


def test_torchrun_says_rank_and_host():
    world = detect_world(TORCHRUN)
    assert world == World(5, 8, 1, 4, "torchrun")
    assert world.several_hosts


@pytest.mark.parametrize(
    ("environ", "world"), [(OPENMPI, World(2, 3, 2, 3, "mpirun")), (MPICH, World(1, 2, 0, 1, "mpirun"))]
)
def test_mpirun_says_rank_and_host(environ, world):
    assert detect_world(environ) == world


def test_torchrun_wins_inside_mpirun_if_its_agent_started_the_process():
    assert detect_world({**OPENMPI, **TORCHRUN}).launcher == "torchrun"
    assert detect_world({**OPENMPI, **_without(TORCHRUN, "TORCHELASTIC_RUN_ID")}).launcher == "mpirun"


def test_torchruns_variables_may_be_set_by_hand():
    assert detect_world(_without(TORCHRUN, "TORCHELASTIC_RUN_ID")) == World(5, 8, 1, 4, "torchrun")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_torchrun_variable_is_named(name):
    """D21: the meeting point comes from the environment or not at all."""
    for environ in (TORCHRUN, _without(TORCHRUN, "TORCHELASTIC_RUN_ID")):
        with pytest.raises(UserError, match=f"but not {name};"):
            detect_world(_without(environ, name))


@pytest.mark.parametrize("name", list(OPENMPI)[1:])
def test_a_missing_mpirun_variable_is_named(name):
    with pytest.raises(UserError, match=name):
        detect_world(_without(OPENMPI, name))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "8", "rank 8 of 8"),
        ("RANK", "-1", "rank -1 of 8"),
        ("WORLD_SIZE", "0", "rank 5 of 0"),
        ("LOCAL_RANK", "4", "local rank 4 of 4"),
        ("RANK", "first", "RANK is 'first'"),
        ("WORLD_SIZE", "", "WORLD_SIZE is ''"),
    ],
)
def test_a_torchrun_variable_that_makes_no_sense_is_named(name, value, words):
    with pytest.raises(UserError, match=words):
        detect_world({**TORCHRUN, name: value})


def test_mpirun_without_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.setattr(world_module, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"pip install 'usp-runtime\[mpi\]'"):
        detect_world(OPENMPI)


def test_no_port_is_written_into_the_launch_code():
    """D21: only port 0, which the system replaces by a free one."""
    for file in Path(usp.launch.__file__).parent.glob("*.py"):
        numbers = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)]
        assert not [n for n in numbers if type(n) is int and 1024 <= n < 65536 and n not in _SIZES], file
        assert not re.search(r"tcp://|:\d{4,5}\b", file.read_text()), file


_SIZES = (5120,)  # the width of a model


def test_the_store_waits_as_long_as_the_collectives():
    """NCCL's ids are awaited in it; they come when the slowest rank has loaded."""
    store = world_module.open_store(SINGLE)
    patience = timedelta(hours=2)
    world_module.start_process_group(SINGLE, store, backend="gloo", timeout=patience)
    try:
        assert store.timeout == patience
    finally:
        world_module.stop_process_group()


@pytest.mark.parametrize(("given", "found"), [(None, "32"), ("8", "8"), ("64", "64")])
def test_cuda_is_given_enough_queues_unless_told(given, found):
    program = f"import os; from usp.launch.main import main; main(['--help']); print(os.environ['{CONNECTIONS}'])"
    environ = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    environ |= {CONNECTIONS: given} if given else {}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == found
