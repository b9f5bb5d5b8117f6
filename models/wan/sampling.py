"""The denoising loop: which expert and which guidance at which step, and the scheduler from `diffusers`.

Knows no rank: it asks a denoiser for a prediction and steps. Used by `usp.launch.run` and the parity tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from usp.errors import CheckpointError
from usp.models.wan.transformer import WanTransformer

ExpertName = Literal["high", "low"]
UNIPC = "UniPCMultistepScheduler"
# What the released Wan checkpoints ask of the scheduler; used where a checkpoint has no scheduler file.
SCHEDULER_DEFAULTS = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000}


@dataclass(frozen=True)
class SamplingConfig:
    """How one clip is sampled. `boundary_ratio` is None when there is one expert; then only the high values count."""

    steps: int
    shift: float
    boundary_ratio: float | None
    guidance_high: float
    guidance_low: float

    def expert_at(self, timestep: float, *, num_train_timesteps: int) -> tuple[ExpertName, float]:
        """The expert and its guidance at a timestep; in full precision, since bf16 misplaces steps at the boundary."""
        if self.boundary_ratio is None or timestep >= self.boundary_ratio * num_train_timesteps:
            return "high", self.guidance_high
        return "low", self.guidance_low


class Denoiser(Protocol):
    def predict(
        self, model: WanTransformer, latent: torch.Tensor, *, timestep: float, guidance: float, prompt: "Prompt"
    ) -> torch.Tensor:
        """Guided prediction for the whole latent [1, C, F, H, W], fp32."""
        ...


class Prompt:
    """Text states of one request, [1, L, text_dim] each, and their keys and values under the expert in use.

    The cache belongs to the request: another expert's first use drops it, and so does `drop()`, called before decode.
    It notices another model, device or dtype; whoever changes a model's weights in place calls `drop()`.
    """

    def __init__(self, positive: torch.Tensor, negative: torch.Tensor | None) -> None:
        self.states = {"positive": positive, "negative": negative}
        self._model: WanTransformer | None = None
        self._place: tuple[torch.device, torch.dtype] | None = None
        self._projected: dict[str, Any] = {}

    def project(self, model: WanTransformer, branch: str) -> Any:
        """Keys and values of every block for one branch, computed at its first use under this model on this device."""
        weight = next(model.parameters())
        if self._model is not model or self._place != (weight.device, weight.dtype):
            self.drop()
            self._model, self._place = model, (weight.device, weight.dtype)
        if branch not in self._projected:
            states = self.states[branch]
            assert states is not None, "a guided step needs the negative prompt's states"
            self._projected[branch] = model.project_text(states.to(weight.device))
        return self._projected[branch]

    def drop(self) -> None:
        for blocks in self._projected.values():
            blocks.clear()  # the frames of an error may still hold the list
        self._model, self._projected = None, {}


class Experts:
    """The transformers of a checkpoint, loaded when first needed. With `keep_one`, the other one is let go first."""

    def __init__(self, loaders: Mapping[ExpertName, Callable[[], WanTransformer]], *, keep_one: bool) -> None:
        self.keep_one = keep_one
        self._loaders = loaders
        self._loaded: dict[ExpertName, WanTransformer] = {}

    def get(self, name: ExpertName) -> WanTransformer:
        if name not in self._loaded:
            if self.keep_one:
                self.drop()
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]

    def drop(self) -> None:
        """Let go of all weights; the next `get` loads again."""
        self._loaded.clear()


def make_scheduler(config: Mapping[str, Any], *, shift: float) -> Any:
    """The UniPC scheduler of `diffusers` with a checkpoint's settings, but our `flow_shift`."""
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    kind = config.get("_class_name", UNIPC)
    if kind != UNIPC:
        raise CheckpointError(f"scheduler_config.json asks for {kind}; only {UNIPC} is supported")
    return UniPCMultistepScheduler.from_config({**SCHEDULER_DEFAULTS, **config, "flow_shift": shift})


def initial_noise(shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """fp32 noise on the CPU: the same on every device and mesh, and as the reference pipeline draws it."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)


@torch.inference_mode()
def sample(
    latent: torch.Tensor,
    *,
    config: SamplingConfig,
    scheduler: Any,
    experts: Experts,
    denoiser: Denoiser,
    prompt: Prompt,
    before_step: Callable[[int, ExpertName], None] = lambda step, expert: None,
    after_step: Callable[[int, ExpertName], None] = lambda step, expert: None,
) -> torch.Tensor:
    """Denoise [1, C, F, H, W] fp32 noise to the scheduler's last output; the VAE's mean and std are not undone."""
    scheduler.set_timesteps(config.steps, device=latent.device)
    scheduler.set_begin_index(0)
    num_train_timesteps = scheduler.config.num_train_timesteps
    timesteps = scheduler.timesteps.tolist()  # on the host once, so that no step waits for the device
    current, model = None, None
    for step, timestep in enumerate(timesteps):
        expert, guidance = config.expert_at(timestep, num_train_timesteps=num_train_timesteps)
        before_step(step, expert)
        if expert != current:
            current, model = expert, None  # no reference may outlive the switch, where only one expert fits
            prompt.drop()
            model = experts.get(expert)
        assert model is not None
        velocity = denoiser.predict(model, latent, timestep=timestep, guidance=guidance, prompt=prompt)
        latent = scheduler.step(velocity, scheduler.timesteps[step], latent, return_dict=False)[0]
        after_step(step, expert)
    return latent
