"""From flags and a checkpoint to a request: which value wins, and what is refused before anything loads."""

import json
import struct
from pathlib import Path

import pytest

from tests.unit.stand_ins import request
from usp.errors import UserError
from usp.launch import request as request_module
from usp.launch.prompts import DEFAULT_PROMPT, draw_base_seed
from usp.layout import MeshShape
from usp.models.wan.tasks import NEGATIVE_PROMPT, TASKS

CHECKPOINT_DEFAULTS = {
    "size": "80*48",
    "frames": 9,
    "fps": 8,
    "steps": 4,
    "shift": 3.0,
    "guidance_high": 2.0,
    "guidance_low": 1.5,
    "negative_prompt": "blurred",
}


def _settings(made):
    clip = made.clip
    return {
        "size": f"{clip.width}*{clip.height}",
        "frames": clip.frames,
        "fps": made.fps,
        "steps": made.steps,
        "shift": made.shift,
        "guidance_high": made.guidance_high,
        "guidance_low": made.guidance_low,
        "negative_prompt": made.negative_prompt,
    }


def _latents_file(folder: Path, shape: tuple[int, ...]) -> Path:
    nbytes = 4
    for length in shape:
        nbytes *= length
    header = json.dumps({"latents": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    file = folder / "latents.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    return file


def test_a_silent_checkpoint_leaves_everything_to_the_task():
    made = _settings(request())
    task = TASKS["t2v-A14B"]
    assert made == {key: getattr(task, key) for key in made}
    assert made["negative_prompt"] == NEGATIVE_PROMPT


def test_the_checkpoint_defaults_come_before_the_task():
    assert _settings(request(defaults=CHECKPOINT_DEFAULTS)) == CHECKPOINT_DEFAULTS


def test_flags_come_before_the_checkpoint_defaults():
    """D14: 0 and '' are values, not silence."""
    flags = "--size 32*16 --frame_num 5 --fps 24 --sample_steps 1 --sample_shift 7 --sample_guide_scale 0,-1"
    made = request(*flags.split(), "--negative_prompt", "", defaults=CHECKPOINT_DEFAULTS)
    assert _settings(made) == {
        "size": "32*16",
        "frames": 5,
        "fps": 24.0,
        "steps": 1,
        "shift": 7.0,
        "guidance_high": -1.0,
        "guidance_low": 0.0,
        "negative_prompt": "",
    }


@pytest.mark.parametrize("defaults", [{"guidance_low": 0, "guidance_high": 0}, {"negative_prompt": ""}])
def test_a_zero_or_empty_checkpoint_default_is_a_value(defaults):
    """D14."""
    made = _settings(request(defaults=defaults))
    assert {key: made[key] for key in defaults} == defaults


@pytest.mark.parametrize(
    ("sizes", "task"),
    [
        ({"experts": 2}, "t2v-A14B"),
        ({"experts": 1}, "t2v-1.3B"),
        ({"experts": 1, "heads": 40, "head_dim": 128}, "t2v-14B"),
    ],
)
def test_the_task_follows_from_the_checkpoint(sizes, task):
    assert request("--size", "48*80", **sizes).task == task


def test_the_checkpoint_may_name_its_task_and_the_flag_overrules_it():
    assert request(experts=1, defaults={"task": "t2v-14B"}).task == "t2v-14B"
    assert request("--task", "t2v-1.3B", experts=1, defaults={"task": "t2v-14B"}).task == "t2v-1.3B"
    with pytest.raises(UserError, match="t2v-99B"):
        request(defaults={"task": "t2v-99B"})


@pytest.mark.parametrize(("task", "experts"), [("t2v-1.3B", 2), ("t2v-A14B", 1)])
def test_a_task_of_another_number_of_experts_is_refused(task, experts):
    with pytest.raises(UserError, match=rf"{3 - experts} expert.* holds {experts}"):
        request("--task", task, experts=experts)


def test_the_boundary_is_the_checkpoints_and_else_the_tasks():
    assert request(boundary=0.5).boundary_ratio == 0.5
    assert request(boundary=0.0).boundary_ratio == 0.0
    assert request(boundary=None).boundary_ratio == 0.875
    assert request(experts=1).boundary_ratio is None


def test_guidance_goes_to_the_expert_of_its_name():
    """D13: the pair is low,high; high-noise 4, low-noise 3 is the A14B default."""
    made = request("--sample_guide_scale", "3,4")
    assert (made.guidance_high, made.guidance_low) == (4.0, 3.0)
    assert (request().guidance_high, request().guidance_low) == (4.0, 3.0)
    made = request("--guidance_scale_low", "7")
    assert (made.guidance_high, made.guidance_low) == (4.0, 7.0)


def test_one_expert_has_one_guidance():
    made = request("--sample_guide_scale", "2.5", experts=1)
    assert (made.guidance_high, made.guidance_low) == (2.5, 2.5)
    with pytest.raises(UserError, match="one expert"):
        request("--sample_guide_scale", "3,4", experts=1)


@pytest.mark.parametrize("frames", [-1, 0, 2, 48, 80])
def test_an_illegal_frame_count_names_the_nearest_legal_ones(frames):
    """D09."""
    below = (frames - 1) // 4 * 4 + 1
    nearest = f"{below} or {below + 4}" if frames > 1 else "1 or 5"
    with pytest.raises(UserError, match=f"frame_num is {frames}; .*{nearest}"):
        request("--frame_num", str(frames))


@pytest.mark.parametrize("frames", [1, 5, 81])
def test_a_legal_frame_count_is_kept(frames):
    """D09."""
    assert request("--frame_num", str(frames)).clip.frames == frames


@pytest.mark.parametrize(
    ("side", "nearest"), [(8, "16 or 32"), (24, "16 or 32"), (40, "32 or 48"), (50, "48 or 64"), (0, "16"), (-16, "16")]
)
@pytest.mark.parametrize("name", ["width", "height"])
def test_an_illegal_side_names_the_nearest_legal_ones(side, nearest, name):
    """D09."""
    size = f"{side}*64" if name == "width" else f"64*{side}"
    with pytest.raises(UserError, match=f"{name} is {side}; .*{nearest}"):
        request("--size", size)


def test_size_is_width_then_height():
    clip = request("--size", "80*48").clip
    assert (clip.width, clip.height) == (80, 48)
    assert request("--size", "80x48").clip == clip


def test_a_clip_beyond_the_rotary_table_is_refused():
    with pytest.raises(UserError, match=r"width: 1025 token positions, .* 1024"):
        request("--size", f"{1025 * 16}*16")


@pytest.mark.parametrize(
    ("heads", "ranks", "flags", "shape"),
    [
        (4, 4, "--cfg_size 1 --ulysses_size 4", (1, 4)),
        (4, 4, "--cfg_size 2 --ulysses_size 2", (2, 2)),
        (6, 3, "--cfg_size 1 --ulysses_size 3", (1, 3)),
        (5, 3, "", (1, 3)),
        (5, 4, "", (2, 2)),
        (5, 4, "--sample_guide_scale 1", (1, 4)),
        (6, 6, "--cfg_size 2", (2, 3)),
    ],
)
def test_a_mesh_that_fits_is_built(heads, ranks, flags, shape):
    """D06: legal sizes run, uneven shares included."""
    assert request(*flags.split(), ranks=ranks, heads=heads).mesh == MeshShape(*shape)


@pytest.mark.parametrize(
    ("heads", "ranks", "flags", "words"),
    [
        (4, 8, "--cfg_size 1 --ulysses_size 8", ["4 heads", "8 ulysses ranks", "at most 4"]),
        (5, 8, "--sample_guide_scale 1", ["5 heads", "8 ulysses ranks"]),
        (12, 4, "--ulysses_size 8", ["ulysses_size 8", "4"]),
        (4, 4, "--cfg_size 4 --ulysses_size 1", ["cfg_size is 4", "1", "2"]),
        (4, 4, "--cfg_size 2 --ulysses_size 4", ["cfg_size 2 x ulysses_size 4 = 8", "4 were started"]),
        (4, 4, "--cfg_size 1 --ulysses_size 3", ["cfg_size 1 x ulysses_size 3 = 3", "4 were started"]),
        (6, 3, "--cfg_size 2", ["cfg_size 2", "3 were started"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(heads, ranks, flags, words):
    """D06."""
    with pytest.raises(UserError) as caught:
        request(*flags.split(), ranks=ranks, heads=heads)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_rank_refuses_with_the_same_words():
    """D06, D09: no rank goes on where another stops."""
    for flags in ("--frame_num 80", "--cfg_size 2 --ulysses_size 4"):
        said = set()
        for rank in range(4):
            with pytest.raises(UserError) as caught:
                request(*flags.split(), ranks=4, rank=rank)
            said.add(str(caught.value))
        assert len(said) == 1


def test_a_prompt_file_gives_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa boat\r\n\n  \n一只猫 🐈\nlast".encode())
    assert request("--prompt_file", str(file)).prompts == ("a boat", "一只猫 🐈", "last")


def test_only_rank_zero_needs_the_prompt_file(tmp_path):
    missing = str(tmp_path / "missing.txt")
    assert request("--prompt_file", missing, ranks=2, rank=1).prompts is None
    with pytest.raises(UserError, match=r"missing\.txt"):
        request("--prompt_file", missing, ranks=2, rank=0)


@pytest.mark.parametrize(("content", "words"), [(b" \n\n", "no prompt"), (b"a\nb\xff\n", "line 2 holds 0xff")])
def test_a_prompt_file_that_is_empty_or_not_utf8_is_refused(tmp_path, content, words):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        request("--prompt_file", str(file))


def test_seeds_of_all_prompts_stay_in_range(tmp_path):
    """D07: prompt i uses base_seed + i."""
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\nc\n")
    largest = 2**63 - 1
    assert request("--base_seed", str(largest - 2), "--prompt_file", str(file)).base_seed == largest - 2
    assert request("--base_seed", str(largest)).base_seed == largest
    with pytest.raises(UserError, match=f"at most {largest - 2}"):
        request("--base_seed", str(largest - 1), "--prompt_file", str(file))


def test_drawn_seeds_differ_and_can_be_given_back():
    """D07."""
    seeds = {draw_base_seed() for _ in range(20)}
    assert len(seeds) > 1
    assert {request("--base_seed", str(seed)).base_seed for seed in seeds} == seeds


def test_a_rate_or_shift_that_cannot_be_is_refused_wherever_it_comes_from():
    """D23: before the run, with the writer's own limits."""
    from usp.launch.video import MAX_FPS

    assert request_module.MAX_FPS == MAX_FPS
    for fps in (MAX_FPS, 1 / MAX_FPS, 23.976):
        assert request("--fps", str(fps)).fps == fps
    for flags, defaults in (("--fps 1001", {}), ("--fps 0.0001", {}), ("", {"fps": 0}), ("", {"shift": -1})):
        with pytest.raises(UserError, match=r"fps is .* use 0\.001 to 1000|shift is -1"):
            request(*flags.split(), defaults=defaults)


def test_a_silent_prompt_is_announced_and_an_empty_one_is_honoured():
    made = request()
    assert made.prompts == (DEFAULT_PROMPT,)
    assert any(DEFAULT_PROMPT in line for line in made.notices)
    assert request("--prompt", "").prompts == ("",)
    assert not request("--prompt", "").notices


def test_a_scheduler_file_of_another_shift_is_mentioned_once():
    made = request("--prompt", "a", scheduler={"flow_shift": 3.0})
    assert made.shift == 12.0
    assert [line for line in made.notices if "flow_shift" in line] == [
        "shift 12 is used; the checkpoint's scheduler file says flow_shift 3.0"
    ]
    assert not request("--prompt", "a", "--sample_shift", "3", scheduler={"flow_shift": 3.0}).notices


@pytest.mark.parametrize("flag", ["--dit_fsdp", "--t5_fsdp", "--convert_model_dtype"])
def test_flags_that_do_something_else_here_say_so_in_one_line(flag):
    assert [line.partition(":")[0] for line in request("--prompt", "a", flag).notices] == [flag]


def test_device_dtype_and_exchange_follow_from_the_host(monkeypatch):
    monkeypatch.setattr(request_module, "why_no_cuda", lambda _environ: None)
    made = request()
    assert (made.device, made.dtype, made.exchange) == ("cuda", "bf16", "auto")
    made = request("--device", "cpu")
    assert (made.device, made.dtype, made.exchange) == ("cpu", "fp32", "auto")
    made = request("--dtype", "fp16", "--exchange", "gloo")
    assert (made.device, made.dtype, made.exchange) == ("cuda", "fp16", "gloo")


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(request_module, "why_no_cuda", lambda _environ: "this host has no GPU device file")
    assert request().device == "cpu"
    with pytest.raises(UserError, match="no GPU device file; use --device cpu"):
        request("--device", "cuda")
    with pytest.raises(UserError, match=r"nccl .* use --exchange host or gloo"):
        request("--exchange", "nccl")


@pytest.mark.parametrize(
    ("flags", "ranks", "experts", "offloads"),
    [
        ("", 1, 2, True),
        ("", 4, 2, False),
        ("--offload_model true", 4, 2, True),
        ("--offload_model false", 1, 2, False),
        ("", 1, 1, False),
    ],
)
def test_one_process_offloads_and_several_do_not_unless_told(flags, ranks, experts, offloads):
    assert request(*flags.split(), ranks=ranks, experts=experts).offload_model is offloads


def test_saved_latents_say_how_large_the_clip_is(tmp_path):
    file = _latents_file(tmp_path, (1, 16, 3, 6, 10))
    clip = request("--load_latents", str(file)).clip
    assert (clip.frames, clip.height, clip.width) == (9, 48, 80)
    assert request("--load_latents", str(file), "--frame_num", "9", "--size", "80*48").clip == clip
    for flags in ("--frame_num 0", "--frame_num 5", "--size 48*80"):
        with pytest.raises(UserError, match=r"9 frames of 80\*48"):
            request("--load_latents", str(file), *flags.split())


@pytest.mark.parametrize("flags", ["--save_latents b.safetensors", "--prompt_file p.txt"])
def test_decoding_saved_latents_refuses_flags_of_sampling(tmp_path, flags):
    file = _latents_file(tmp_path, (1, 16, 1, 2, 2))
    with pytest.raises(UserError, match="nothing to do"):
        request("--load_latents", str(file), *flags.split())


def test_latents_that_are_missing_or_of_another_model_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        request("--load_latents", str(tmp_path / "none.safetensors"))
    with pytest.raises(UserError, match=r"\[1, 16, F, H, W\], found \(1, 48, 1, 2, 2\)"):
        request("--load_latents", str(_latents_file(tmp_path, (1, 48, 1, 2, 2))))
    with pytest.raises(UserError, match="2 were started"):
        request("--load_latents", str(tmp_path / "any.safetensors"), ranks=2)
