"""The whole program under every launcher, with the packaged model: one result, wherever its ranks come from."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import uuid4

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.multi_gpu.programs import (
    GENERATE,
    Finished,
    Programs,
    alone,
    free_port,
    held_port,
    left_over,
    mpirun,
    torchrun,
    torchrun_agent,
)
from usp.launch.video import VideoInfo, probe

pytestmark = pytest.mark.timeout(900)  # the first test waits for every launcher, each with a limit of its own
USUAL_PORT = 29500  # of torch's launcher
RANKS = ("torchrun", "mpirun", "--nproc", "two agents")


@dataclass(frozen=True)
class Launched:
    """The same request under every launcher. The first one, torchrun's, had no flags at all and drew `seed`."""

    runs: dict[str, Finished]
    other_host: Finished
    seed: int

    def hash(self, launcher: str) -> str:
        (line,) = self.runs[launcher].lines("latents sha256", f"(seed {self.seed})")
        return line.split()[2]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two or three jobs at a time, and all of them while the usual port is taken."""
    with Programs(tmp_path_factory.mktemp("launched")) as programs, held_port(USUAL_PORT):
        first = programs.run(*torchrun(4), GENERATE)
        seed = int(re.findall(r"\(seed (\d+)\)", first.stderr)[0])
        flags = [GENERATE, f"--base_seed={seed}", "--report=report.json", "--save_latents=latents.safetensors"]
        job = uuid4().hex
        agent = torchrun_agent(2, 2, port=free_port(), job=job)
        pairs = [
            {"mpirun": [*mpirun(4), *flags], "--nproc": [*alone(), *flags, "--nproc=4"]},
            {"two agents": [*agent, *flags], "other host": [*agent, *flags], "alone": [*alone(), *flags]},
        ]
        runs = {"torchrun": first}
        for pair in pairs:
            started = {name: programs.start(*command) for name, command in pair.items()}
            runs |= {name: program.wait() for name, program in started.items()}
        for name, run in runs.items():
            assert run.code == 0, f"{name}: {run.said}"
        hosts = sorted((runs.pop("two agents"), runs.pop("other host")), key=lambda run: len(left_over(run.folder)))
        yield Launched({**runs, "two agents": hosts[1]}, hosts[0], seed)


@pytest.mark.parametrize("launcher", RANKS)
def test_every_launcher_gives_the_same_latents(launched, launcher):
    """Also D21: they ran side by side while the usual port was taken."""
    assert launched.hash(launcher) == launched.hash("torchrun")


@pytest.mark.parametrize("launcher", ["mpirun", "--nproc", "two agents", "alone"])
def test_the_report_says_the_same_hash_and_seed_as_the_log(launched, launcher):
    report = json.loads((launched.runs[launcher].folder / "report.json").read_text())
    assert report["videos"][0]["latents_sha256"] == launched.hash(launcher)
    assert (report["base_seed"], report["videos"][0]["seed"]) == (launched.seed, launched.seed)
    assert report["world"]["size"] == (1 if launcher == "alone" else 4)
    assert report["mesh"] == ({"cfg": 1, "ulysses": 1} if launcher == "alone" else {"cfg": 2, "ulysses": 2})


def test_one_process_comes_close_to_four(launched):
    one, four = (
        load_file(launched.runs[name].folder / "latents.safetensors")["latents"] for name in ("alone", "mpirun")
    )
    assert torch.max(torch.abs(one - four)) <= 5e-5


@pytest.mark.parametrize("launcher", [*RANKS, "alone"])
def test_the_video_is_as_announced_with_a_contact_sheet_beside_it(launched, launcher):
    run = launched.runs[launcher]
    video, sheet = sorted((run.folder / "outputs").iterdir(), key=lambda file: file.suffix)
    (announced,) = run.lines("17 frames of 128x128", f"seed {launched.seed}")
    assert probe(video) == VideoInfo(17, 128, 128, 16), announced
    assert sheet.name == f"{video.stem}.sheet.png"
    assert Image.open(sheet).size == (3 * 128, 3 * 128)
    assert run.lines("video in", f"outputs/{video.name}")


@pytest.mark.parametrize("launcher", [*RANKS, "alone"])
def test_only_rank_zero_shows_how_far_it_is(launched, launcher):
    run = launched.runs[launcher]
    assert len(run.lines("s/step", "left", "1/8")) == len(run.lines("s/step", "left", "8/8")) == 1
    assert all("s/step" not in line for line in run.lines("rank "))
    assert "s/step" not in launched.other_host.said


def test_files_appear_on_the_host_of_rank_zero_only(launched):
    assert left_over(launched.other_host.folder) == []
    expected = {"latents.safetensors", "report.json", "outputs"}
    assert expected <= set(left_over(launched.runs["two agents"].folder))


def test_every_launchers_job_says_what_it_does_once(launched):
    for run in launched.runs.values():
        assert len(run.lines("no --prompt, so the default one")) == 1
        assert len(run.lines("mesh cfg")) == 1


@pytest.mark.parametrize("bad_first", [True, False])
def test_a_host_that_fails_its_checks_ends_the_other_one_too(tmp_path, bad_first):
    """One message among both hosts; nobody waits for ranks that will never come."""
    with Programs(tmp_path) as programs:
        agent = torchrun_agent(2, 1, port=free_port(), job=uuid4().hex)
        flags = [[GENERATE, "--prompt=boat"], [GENERATE, "--prompt=boat", "--ckpt_dir=missing/folder/here"]]
        started = [programs.start(*agent, *one) for one in (flags[::-1] if bad_first else flags)]
        runs = [program.wait() for program in started]
    assert all(run.code != 0 and run.seconds < 30 for run in runs), [(run.code, run.seconds) for run in runs]
    assert sum(run.said.count("there is no folder 'missing/folder/here'") for run in runs) == 1, runs
    assert sum(run.said.count("failed while") for run in runs) == 0, runs
