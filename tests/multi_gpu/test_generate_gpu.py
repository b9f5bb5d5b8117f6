"""The whole program on a GPU that the ranks share: one hash of latents, however many there are."""

import subprocess
import sys

import pytest
import torch

from tests.multi_gpu.programs import GENERATE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
SHAPES = [("256*256", 1), ("128*128", 17), ("96*160", 5)]


def latents_hash(tmp_path, ranks: int, size: str, frames: int) -> str:
    """The file that is written afterwards is another test's."""
    request = ["--prompt", "a red ball", "--base_seed", "3", "--size", size, "--frame_num", str(frames)]
    command = [sys.executable, GENERATE, *request, "--cfg_size", "1", "--nproc", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180, check=False)
    said = done.stdout + done.stderr
    lines = [line for line in said.splitlines() if "latents sha256" in line]
    assert len(lines) == 1, said
    return lines[0].split()[2]


@pytest.mark.parametrize(("size", "frames"), SHAPES)
def test_any_number_of_ranks_gives_the_same_latents(tmp_path, size: str, frames: int) -> None:
    hashes = {ranks: latents_hash(tmp_path, ranks, size, frames) for ranks in (1, 2, 4)}
    assert len({*hashes.values()}) == 1, hashes
