"""Defaults per task, the last of the places where a setting is looked for. Imports no torch.

Source of the numbers and of the default negative prompt: the released Wan2.1 and Wan2.2 task configurations.
"""

from dataclasses import dataclass

# The phrase that the Wan models are sampled against when the user gives none.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True)
class Task:
    """What a model is sampled with when neither a flag nor the checkpoint's `usp_defaults.json` says otherwise."""

    name: str
    steps: int
    shift: float
    boundary_ratio: float | None  # share of the schedule (by noise level) above which the high-noise expert works
    guidance_high: float  # of the high-noise expert, or of the only one
    guidance_low: float
    size: str = "1280*720"
    frames: int = 81
    fps: float = 16.0
    negative_prompt: str = NEGATIVE_PROMPT


TASKS = {
    "t2v-A14B": Task("t2v-A14B", steps=40, shift=12.0, boundary_ratio=0.875, guidance_high=4.0, guidance_low=3.0),
    "t2v-14B": Task("t2v-14B", steps=50, shift=5.0, boundary_ratio=None, guidance_high=5.0, guidance_low=5.0),
    "t2v-1.3B": Task(
        "t2v-1.3B", steps=50, shift=5.0, boundary_ratio=None, guidance_high=5.0, guidance_low=5.0, size="832*480"
    ),
}
