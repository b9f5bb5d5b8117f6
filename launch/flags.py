"""The command line: every flag, its aliases, and the values that are refused whatever the model.

Takes Wan2.2's own flag names, with dashes and underscores alike. Imports nothing heavy, so `--help` and a bad value
are answered at once. `parse` gives `Flags`, where None means that the flag was silent: 0 and '' are values.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from usp.backends.names import NAMES
from usp.errors import UserError
from usp.launch import values
from usp.launch.parser import Parser, Refuse, StoreOnce, explain_unknown, join_values
from usp.models.wan.tasks import TASKS

_OTHER_INPUTS = (
    *("image", "audio", "pose_video", "num_clip", "infer_frames", "start_from_ref"),
    *("enable_tts", "tts_prompt_audio", "tts_prompt_text", "tts_text"),
    *("src_root_path", "refert_num", "replace_flag", "use_relighting_lora"),
    *("first_frame", "last_frame", "src_video", "src_mask", "src_ref_images"),
)
_PROMPT_EXTENSION = (
    "use_prompt_extend",
    "prompt_extend_method",
    "prompt_extend_model",
    "prompt_extend_target_lang",
)
# Flags of the Wan programs that ask for what is not done here, and what to do instead.
_REFUSED = {
    **dict.fromkeys(_OTHER_INPUTS, "only text-to-video is supported: no input image, video, pose or sound"),
    **dict.fromkeys(
        _PROMPT_EXTENSION, "prompts are used as written; extend the prompt first, then give it to --prompt"
    ),
    "ring_size": "there is no ring attention; use --ulysses_size, up to the number of heads",
}


@dataclass(frozen=True)
class Flags:
    """What was asked on the command line; None where a flag was silent."""

    task: str | None
    ckpt_dir: str | None
    prompt: str | None
    prompt_file: Path | None
    negative_prompt: str | None
    size: tuple[int, int] | None  # width, height
    frame_num: int | None
    fps: float | None
    sample_steps: int | None
    sample_shift: float | None
    guidance_scale_high: float | None
    guidance_scale_low: float | None
    base_seed: int | None  # None: drawn at random
    cfg_size: int | None
    ulysses_size: int | None
    exchange: str
    attention: str
    stall_timeout: float
    nproc: int | None
    device: str
    dtype: str | None
    cpu_threads: int
    offload_model: bool | None
    t5_cpu: bool
    dit_fsdp: bool
    t5_fsdp: bool
    convert_model_dtype: bool
    save_file: Path | None
    save_latents: Path | None
    load_latents: Path | None
    report: Path | None


def parse(argv: Sequence[str]) -> Flags:
    """Flags of an argument list without the program name. Raises UserError with one sentence."""
    parser = build_parser()
    found, unknown = parser.parse_known_args(join_values(argv, parser))
    if unknown:
        raise UserError(explain_unknown(unknown[0], parser))
    found.cfg_size = _merged_cfg_size(found)
    found.guidance_scale_low, found.guidance_scale_high = _merged_guidance(found)
    if found.prompt is not None and found.prompt_file is not None:
        raise UserError("--prompt and --prompt_file are both given; use one of them")
    return Flags(**{field.name: getattr(found, field.name) for field in fields(Flags)})


def wants_help(argv: Sequence[str]) -> bool:
    return any(argument in ("-h", "--help") for argument in join_values(argv, build_parser()))


def without_flag(argv: Sequence[str], name: str) -> list[str]:
    """The arguments less `--name VALUE` and `--name=VALUE`, however they are spelled."""
    joined = join_values(argv, build_parser())
    return [argument for argument in joined if not argument.startswith(f"--{name}=")]


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="generate.py",
        usage="%(prog)s [--flag value ...]",
        description="Text to video with Wan2.2, on one process or on several (torchrun, mpirun, or --nproc).",
        epilog="Dashes and underscores are alike: --base-seed is --base_seed. A silent flag takes its value from "
        "usp_defaults.json in the checkpoint folder, then from the task.",
        allow_abbrev=False,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    for add_group in (_add_what, _add_sampling, _add_ranks, _add_device, _add_files):
        add_group(parser)
    for name, reason in _REFUSED.items():
        parser.add_argument(f"--{name}", nargs="*", action=Refuse, const=reason, help=argparse.SUPPRESS)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to make")
    group.add_argument("-h", "--help", action="store_true", help="show this text")
    _one(group, "task", values.task, "TASK", f"{', '.join(TASKS)} (default: what the checkpoint is)")
    _one(
        group, "ckpt_dir", str, "FOLDER", "checkpoint folder, or a Hugging Face name (default: the packaged tiny model)"
    )
    _one(group, "prompt", str, "TEXT", "what the video shows")
    _one(group, "prompt_file", values.path, "FILE", "one prompt a line, one video each; prompt i uses base_seed + i")
    _one(group, "negative_prompt", str, "TEXT", "what it should not show; '' is honoured")
    _one(group, "size", values.size, "W*H", "width*height in pixels, multiples of 16, such as 1280*720")
    _one(group, "frame_num", values.integer(), "N", "number of frames, 4k+1, such as 81")
    _one(group, "fps", values.positive, "FPS", "frames per second of the file")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    _one(group, "sample_steps", values.integer(1), "N", "denoising steps")
    _one(group, "sample_shift", values.positive, "S", "shift of the noise schedule")
    _one(
        group,
        "sample_guide_scale",
        values.guide_scale,
        "G|LOW,HIGH",
        "guidance of both experts, or low-noise,high-noise",
    )
    _one(group, "guidance_scale_high", values.finite, "G", "guidance of the high-noise expert, or of the only one")
    _one(group, "guidance_scale_low", values.finite, "G", "guidance of the low-noise expert")
    _one(group, "base_seed", values.seed, "SEED", "0 to 2^63-1; -1 or silent: drawn at random and printed")
    _one(group, "sample_solver", values.solver, "unipc", "the only solver", default="unipc")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks (cfg_size x ulysses_size = number of processes)")
    _one(group, "nproc", values.integer(1), "N", "start N processes on this host; without torchrun and mpirun only")
    aliases = ("cfg_parallel_degree", "cfg_parallel_size")
    _one(group, "cfg_size", values.integer(1), "1|2", "2: one guidance branch on each half of the ranks", *aliases)
    group.add_argument("--enable_cfg_parallel", action="store_true", help="the same as --cfg_size 2")
    _one(
        group, "ulysses_size", values.integer(1), "N", "ranks that share the tokens of a clip", "ulysses_degree", "usp"
    )
    _choice(
        group,
        "exchange",
        ("auto", "ipc", "host", "nccl", "gloo"),
        "auto",
        "what carries attention's exchange; auto: the first that can, of ipc, nccl, gloo on cuda and host, gloo on cpu",
    )
    text = f"the attention kernel, tried at the start: {', '.join(NAMES)}; auto: the fastest that this GPU can run"
    _choice(group, "attention", ("auto", *NAMES), "auto", text, metavar="auto|NAME")
    text = "of ipc and host: give up when an attention call is not done after so long (default: 300)"
    _one(group, "stall_timeout", values.positive, "SECONDS", text, default=300.0)


def _add_device(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device and memory")
    _choice(group, "device", ("auto", "cpu", "cuda"), "auto", "auto: cuda where there is a GPU and torch can use it")
    _choice(group, "dtype", ("fp32", "bf16", "fp16"), None, "of the transformer (default: bf16 on cuda, fp32 on cpu)")
    _one(group, "cpu_threads", values.integer(1), "N", "threads of each process on cpu (default: 1)", default=1)
    _switch(
        group, "offload_model", None, "keep one expert on the device (default: true on one process, false on several)"
    )
    _switch(group, "t5_cpu", False, "run the text encoder on the CPU")
    for name in ("dit_fsdp", "t5_fsdp", "convert_model_dtype"):
        _switch(group, name, False, "taken for Wan2.2 commands; one line says what is done instead")


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    _one(
        group, "save_file", values.path, "FILE", ".mp4, or .png for one frame (default: a name of its own in outputs/)"
    )
    _one(group, "save_latents", values.path, "FILE", ".safetensors with the final latents")
    _one(group, "load_latents", values.path, "FILE", "decode saved latents; nothing is sampled")
    _one(group, "report", values.path, "FILE", ".json with times, mesh, seeds, versions and the hash of the latents")


def _one(
    group: Any, name: str, kind: Callable[[str], object], metavar: str, text: str, *aliases: str, default: object = None
) -> None:
    options = [f"--{option}" for option in (name, *aliases)]
    group.add_argument(*options, dest=name, type=kind, metavar=metavar, default=default, action=StoreOnce, help=text)


def _choice(
    group: Any, name: str, choices: tuple[str, ...], default: str | None, text: str, *, metavar: str | None = None
) -> None:
    group.add_argument(f"--{name}", choices=choices, default=default, action=StoreOnce, metavar=metavar, help=text)


def _switch(group: Any, name: str, default: bool | None, text: str) -> None:
    group.add_argument(
        f"--{name}",
        type=values.boolean,
        nargs="?",
        const=True,
        default=default,
        action=StoreOnce,
        metavar="BOOL",
        help=text,
    )


def _merged_cfg_size(found: argparse.Namespace) -> int | None:
    size: int | None = found.cfg_size
    if not found.enable_cfg_parallel:
        return size
    if size not in (None, 2):
        raise UserError(f"--enable_cfg_parallel means --cfg_size 2, but --cfg_size is {size}; leave one of them out")
    return 2


def _merged_guidance(found: argparse.Namespace) -> tuple[float | None, float | None]:
    """(low, high) from the pair flag and the two named ones, which must not contradict it."""
    pair: values.GuideScale | None = found.sample_guide_scale
    if pair is None:
        return found.guidance_scale_low, found.guidance_scale_high
    for name, wanted in pair._asdict().items():
        named = getattr(found, f"guidance_scale_{name}")
        if named not in (None, wanted):
            raise UserError(
                f"--guidance_scale_{name} is {named}, but --sample_guide_scale sets {wanted} for the {name}-noise "
                "expert (one value for both, or low,high); leave one of them out"
            )
    return pair.low, pair.high
