"""The command line: spellings, aliases, values that are values, and sentences for the rest."""

import shlex
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from usp.errors import UserError
from usp.launch.flags import Flags, build_parser, parse, without_flag

SILENT = asdict(parse([]))

# For every field of Flags one way to set it, and what it then holds.
SETTINGS = {
    "task": ("--task t2v-14B", "t2v-14B"),
    "ckpt_dir": ("--ckpt_dir folder", "folder"),
    "prompt": ("--prompt 'a boat'", "a boat"),
    "prompt_file": ("--prompt_file list.txt", Path("list.txt")),
    "negative_prompt": ("--negative_prompt ''", ""),
    "size": ("--size 1280*720", (1280, 720)),
    "frame_num": ("--frame_num 17", 17),
    "fps": ("--fps 23.976", 23.976),
    "sample_steps": ("--sample_steps 7", 7),
    "sample_shift": ("--sample_shift 3", 3.0),
    "guidance_scale_high": ("--guidance_scale_high 0", 0.0),
    "guidance_scale_low": ("--guidance_scale_low -1.5", -1.5),
    "base_seed": ("--base_seed 0", 0),
    "cfg_size": ("--cfg_size 1", 1),
    "ulysses_size": ("--ulysses_size 3", 3),
    "exchange": ("--exchange gloo", "gloo"),
    "attention": ("--attention fa3", "fa3"),
    "stall_timeout": ("--stall_timeout 5", 5.0),
    "nproc": ("--nproc 4", 4),
    "device": ("--device cpu", "cpu"),
    "dtype": ("--dtype bf16", "bf16"),
    "cpu_threads": ("--cpu_threads 2", 2),
    "offload_model": ("--offload_model False", False),
    "t5_cpu": ("--t5_cpu", True),
    "dit_fsdp": ("--dit_fsdp", True),
    "t5_fsdp": ("--t5_fsdp", True),
    "convert_model_dtype": ("--convert_model_dtype", True),
    "save_file": ("--save_file a.mp4", Path("a.mp4")),
    "save_latents": ("--save_latents a.safetensors", Path("a.safetensors")),
    "load_latents": ("--load_latents b.safetensors", Path("b.safetensors")),
    "report": ("--report r.json", Path("r.json")),
}


def test_every_field_has_a_setting_here():
    assert list(SETTINGS) == [field.name for field in fields(Flags)]


@pytest.mark.parametrize("name", SETTINGS)
def test_each_flag_changes_its_own_field_and_no_other(name):
    """D14: every option arrives, 0 and '' included."""
    text, value = SETTINGS[name]
    assert value != SILENT[name]
    assert asdict(parse(shlex.split(text))) == {**SILENT, name: value}


@pytest.mark.parametrize("name", SETTINGS)
def test_dashes_and_underscores_are_alike(name):
    flag, *value = shlex.split(SETTINGS[name][0])
    dashed = flag[:2] + flag[2:].replace("_", "-")
    assert parse([dashed, *value]) == parse([flag, *value])
    if value:
        assert parse([f"{dashed}={value[0]}"]) == parse([flag, *value])


@pytest.mark.parametrize("alias", ["--ulysses_degree", "--ulysses-degree", "--usp"])
def test_ulysses_aliases_mean_ulysses_size(alias):
    assert parse([alias, "3"]) == parse(["--ulysses_size", "3"])


@pytest.mark.parametrize("alias", ["--cfg_parallel_degree 2", "--cfg-parallel-size 2", "--enable-cfg-parallel"])
def test_cfg_aliases_mean_cfg_size(alias):
    assert parse(alias.split()) == parse(["--cfg_size", "2"])


@pytest.mark.parametrize(("text", "seed"), [("-1", None), ("0", 0), (str(2**63 - 1), 2**63 - 1)])
def test_seeds_from_minus_one_to_the_largest_are_taken(text, seed):
    """D07: -1 means drawn at random, like a silent flag; 0 is a seed."""
    assert parse(["--base_seed", text]).base_seed == seed
    assert parse([]).base_seed is None


def test_a_guidance_pair_is_ordered_low_high():
    """D13."""
    flags = parse(["--sample_guide_scale", "3,4"])
    assert (flags.guidance_scale_low, flags.guidance_scale_high) == (3.0, 4.0)


@pytest.mark.parametrize("value", [0.0, 1.0, 1.0001, -2.5])
def test_one_guidance_value_is_for_both_experts(value):
    """D14: 0 and 1 are values."""
    flags = parse(["--sample_guide_scale", str(value)])
    assert (flags.guidance_scale_low, flags.guidance_scale_high) == (value, value)


def test_a_named_guidance_may_repeat_the_pair():
    assert parse(["--sample_guide_scale", "3,4", "--guidance_scale_high", "4"]).guidance_scale_high == 4.0


def test_a_value_may_begin_with_a_dash():
    assert parse(["--prompt", "-20 degrees, a frozen lake"]).prompt == "-20 degrees, a frozen lake"
    assert parse(["--prompt=--a title"]).prompt == "--a title"


def test_a_wan22_command_is_taken_as_it_is():
    command = (
        "--task t2v-A14B --size 1280*720 --ckpt_dir ./Wan2.2-T2V-A14B --dit_fsdp --t5_fsdp --ulysses_size 8 "
        "--offload_model True --convert_model_dtype --sample_solver unipc --prompt 'Two cats box on a stage.'"
    )
    flags = parse(shlex.split(command))
    assert (flags.task, flags.size, flags.ulysses_size, flags.offload_model) == ("t2v-A14B", (1280, 720), 8, True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--sample_guide_scale 3,4 --guidance_scale_high 5", ["5.0", "4.0", "high"]),
        ("--sample_guide_scale 1,2,3", ["3 values", "low,high"]),
        ("--enable_cfg_parallel --cfg_size 1", ["--cfg_size is 1"]),
        ("--ulysses_size 2 --usp 4", ["twice", "2", "4"]),
        ("--prompt a --prompt_file b", ["--prompt_file", "one of them"]),
        ("--sample_steps 0", ["--sample_steps", "0", "at least 1"]),
        ("--sample_steps 2.5", ["'2.5'", "whole number"]),
        ("--cpu_threads 0", ["at least 1"]),
        ("--nproc 0", ["at least 1"]),
        ("--sample_shift 0", ["--sample_shift", "above 0"]),
        ("--sample_shift nan", ["not finite"]),
        ("--fps 0", ["--fps", "above 0"]),
        ("--fps inf", ["not finite"]),
        ("--guidance_scale_low nan", ["not finite"]),
        ("--sample_guide_scale 3,inf", ["not finite"]),
        (f"--base_seed {2**63}", [str(2**63), str(2**63 - 1)]),
        ("--base_seed -2", ["-2", "-1"]),
        ("--size 1280", ["WIDTH*HEIGHT"]),
        ("--size 12.5*16", ["WIDTH*HEIGHT"]),
        ("--task i2v-A14B", ["only text-to-video", "t2v-A14B"]),
        ("--task ti2v-5B", ["only text-to-video"]),
        ("--task s2v-14B", ["only text-to-video"]),
        ("--sample_solver dpm++", ["dpm++", "unipc"]),
        ("--exchange mpi", ["ipc", "host", "nccl", "gloo"]),
        ("--attention fa5", ["fa5", "auto", "fa3", "flashinfer-fa2", "math"]),
        ("--use_prompt_extend", ["--use_prompt_extend", "as written"]),
        ("--image a.jpg", ["--image", "only text-to-video"]),
        ("--audio=a.wav", ["--audio", "only text-to-video"]),
        ("--ring-size 2", ["--ring_size", "--ulysses_size"]),
        ("--offload_model maybe", ["maybe", "true", "false"]),
        ("--save_file=", ["--save_file", "empty"]),
        ("--prompt --size 16*16", ["--prompt", "expected one argument"]),
    ],
)
def test_a_bad_value_gets_a_sentence_with_its_numbers(argv, words):
    with pytest.raises(UserError) as caught:
        parse(argv.split())
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("--promt", "--prompt"),
        ("--frames_num", "--frame_num"),
        ("--base-sed=3", "--base_seed"),
        ("--save", "--save_file"),
    ],
)
def test_an_unknown_flag_names_the_nearest_known_one(typo, nearest):
    with pytest.raises(UserError, match=f"nearest known one is {nearest} "):
        parse([typo])


def test_a_stray_word_is_named():
    with pytest.raises(UserError, match="unexpected argument 'boat'"):
        parse(["--prompt", "a", "boat"])


def test_help_names_every_flag_and_no_refused_one():
    text = build_parser().format_help()
    assert all(f"--{name}" in text for name in SETTINGS)
    assert "--sample_guide_scale" in text and "--image" not in text and "ring" not in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("argv", ["--nproc 4 --prompt a", "--prompt a --nproc=4", "--prompt a --nproc 4 --t5-cpu"])
def test_the_ranks_get_all_arguments_but_nproc(argv):
    left = without_flag(argv.split(), "nproc")
    assert parse(left) == parse([word for word in argv.split() if "nproc" not in word and word != "4"])
