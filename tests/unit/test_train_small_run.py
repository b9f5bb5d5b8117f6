"""All stages with tiny sizes: what they leave is a checkpoint that both libraries read, sample alike, and film."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from PIL import Image

from scripts.train_small.pack import LIMIT_BYTES
from scripts.train_small.run import Training
from scripts.train_small.sampler import CLIP, Guidance, Sampler
from scripts.train_small.settings import FULL, RECORD, SMOKE
from tests.tiny import reference_pipeline
from usp.launch.video import VideoInfo, probe
from usp.models.wan.checkpoint.folder import open_checkpoint

ROOT = Path(__file__).parents[2]
PROMPT = "a red ball moves left slowly on a dark background"
pytestmark = pytest.mark.timeout(900)  # the first test waits for all stages


@cache
def trained() -> Path:
    """The folder of one tiny training, made by the command."""
    folder = Path(mkdtemp(prefix="usp-train-small-"))
    run_stages(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def removed():
    yield
    if trained.cache_info().currsize:
        subprocess.run(["rm", "-rf", str(trained())], check=True)


def run_stages(folder: Path, *flags: str) -> str:
    command = [
        sys.executable,
        "-m",
        "scripts.train_small.run",
        "--out",
        str(folder),
        "--smoke",
        "--device",
        "cpu",
        *flags,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_stages_leave_a_whole_small_checkpoint():
    folder = trained() / "model"
    checkpoint = open_checkpoint(folder)
    assert checkpoint.low is not None and checkpoint.boundary_ratio == SMOKE.sampling.boundary
    assert checkpoint.defaults["steps"] == SMOKE.sampling.steps
    stored = {one.info.dtype for part in (checkpoint.high, checkpoint.low) for one in part.tensors.values()}
    assert stored == {"F16"}
    record = json.loads((folder / RECORD).read_text())
    assert record["commit"] and set(record["stages"]) == {"vae", "text", "cache", "high", "low"}


def test_the_experts_are_two_and_were_trained():
    checkpoint, weights = open_checkpoint(trained() / "model"), []
    for name in ("high", "low"):
        state = torch.load(trained() / f"{name}_weights.pt", weights_only=True)
        assert state["proj_out.weight"].abs().max() > 0  # zero before the first step
        weights.append(state["patch_embedding.weight"])
    assert not torch.equal(*weights)
    assert checkpoint.high.folder != checkpoint.low.folder


def test_losses_are_logged_and_drawn():
    for name in ("vae", "text", "high", "low"):
        lines = [json.loads(line) for line in (trained() / f"{name}.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == 3 and lines[-1]["loss"] > 0
    for picture in ("losses.png", "data.png", "clips.png"):
        with Image.open(trained() / picture) as image:
            assert min(image.size) > 50


def test_a_second_run_trains_nothing_again():
    before = (trained() / "high_weights.pt").read_bytes()
    said = run_stages(trained(), "--stage", "data", "vae", "text", "experts")
    assert said.count("done before") == 6  # data, vae, text, cache, high, low
    assert (trained() / "high_weights.pt").read_bytes() == before


def test_the_program_films_a_prompt_with_it(tmp_path: Path):
    command = [sys.executable, str(ROOT / "generate.py"), "--ckpt_dir", str(trained() / "model"), "--prompt", PROMPT]
    command += ["--save_file", str(tmp_path / "clip.mp4"), "--base_seed", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert probe(tmp_path / "clip.mp4") == VideoInfo(17, 64, 64, 8)


@torch.inference_mode()
def test_the_reference_pipeline_makes_the_same_clip():
    """At the folder's own steps and guidance, from the same prompt and seed: pixels of 0..255 within rounding."""
    sampling = SMOKE.sampling
    ours = Sampler(trained() / "model", torch.device("cpu")).clips(
        [PROMPT],
        first_seed=5,
        guidance=Guidance(sampling.guidance_high, sampling.guidance_low),
        steps=sampling.steps,
    )
    theirs = reference_pipeline(trained() / "model")(
        prompt=PROMPT,
        negative_prompt="",
        height=CLIP.height,
        width=CLIP.width,
        num_frames=CLIP.frames,
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance_high,
        guidance_scale_2=sampling.guidance_low,
        generator=torch.Generator("cpu").manual_seed(5),
        output_type="pt",
    ).frames  # [1, T, 3, H, W] in 0..1
    assert ours.std() > 1
    assert (ours[0] - 255 * theirs[0].permute(0, 2, 3, 1)).abs().max() <= 0.6


def test_the_full_model_fits_its_limit():
    from scripts.train_small.experts import count_parameters, new_expert
    from scripts.train_small.text import new_encoder
    from scripts.train_small.vae import new_vae

    parts = [new_expert(FULL), new_expert(FULL), new_vae(FULL.vae), new_encoder(FULL.text, 600)]
    assert 2 * sum(count_parameters(part) for part in parts) < 0.95 * LIMIT_BYTES


def test_a_model_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from scripts.train_small import pack

    training = Training(trained(), SMOKE, torch.device("cpu"))
    monkeypatch.setattr(pack, "LIMIT_BYTES", 1000)
    with pytest.raises(ValueError, match="the package takes at most 1000"):
        pack.pack(trained(), SMOKE, training.report)


def test_doing_a_part_again_forgets_what_was_learnt_from_it(tmp_path: Path):
    parts = ("vae", "text", "cache", "high", "low")
    (tmp_path / "report.json").write_text(json.dumps({part: {} for part in parts}))
    for part in parts:
        (tmp_path / f"{part}.pt").touch()
    training = Training(tmp_path, SMOKE, torch.device("cpu"))
    training.forget("high")
    assert set(training.report) == {"vae", "text", "cache", "low"} and (tmp_path / "high.pt").exists()
    training.forget("vae")
    assert set(training.report) == {"text"}
    assert not any((tmp_path / f"{part}.pt").exists() for part in ("cache", "high", "low"))
    assert (tmp_path / "vae.pt").exists()  # its training goes on
