"""Which expert and which guidance at which step, and who owns the text's keys and values (D13)."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from usp.errors import CheckpointError
from usp.models.wan.sampling import Experts, Prompt, SamplingConfig, initial_noise, make_scheduler, sample

NOISE = torch.randn(1, 16, 1, 2, 2)


class Recorder:
    """A denoiser whose predictions do not matter; it notes what it was asked."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, str, float]] = []

    def predict(self, model, latent, *, timestep, guidance, prompt):
        self.steps.append((timestep, model, guidance))
        return torch.zeros_like(latent)


def _run(config: SamplingConfig, *, keep_one: bool = False) -> tuple[Recorder, list[str]]:
    recorder, loads = Recorder(), []

    def load(name: str):
        loads.append(name)
        return f"{name} expert"

    experts = Experts({name: lambda name=name: load(name) for name in ("high", "low")}, keep_one=keep_one)
    scheduler = make_scheduler({}, shift=config.shift)
    sample(NOISE, config=config, scheduler=scheduler, experts=experts, denoiser=recorder, prompt=Prompt(NOISE, None))
    return recorder, loads


def test_guidance_goes_with_the_expert_that_the_timestep_picks() -> None:
    """D13: the high-noise expert has its own value, and it comes first in the schedule, not in a pair."""
    recorder, loads = _run(SamplingConfig(40, 12.0, 0.875, guidance_high=4.0, guidance_low=3.0))
    expected = [(t, "high expert", 4.0) if t >= 875 else (t, "low expert", 3.0) for t, _, _ in recorder.steps]
    assert recorder.steps == expected
    assert len(expected) == 40 and 0 < sum(guidance == 4.0 for _, _, guidance in expected) < 40
    assert [t for t, _, _ in expected] == sorted((t for t, _, _ in expected), reverse=True)
    assert loads == ["high", "low"]


def test_one_expert_has_one_guidance() -> None:
    recorder, loads = _run(SamplingConfig(4, 5.0, None, guidance_high=5.0, guidance_low=99.0))
    assert {step[1:] for step in recorder.steps} == {("high expert", 5.0)} and loads == ["high"]


@pytest.mark.parametrize(
    ("timestep", "expert"), [(900.0, "high"), (899.999, "low"), (899.64, "low"), (900.0001, "high"), (0.0, "low")]
)
def test_the_boundary_is_compared_in_full_precision(timestep: float, expert: str) -> None:
    """bf16 rounds 899.64 to 900."""
    assert torch.tensor(899.64, dtype=torch.bfloat16).item() == 900.0
    config = SamplingConfig(40, 3.0, 0.9, guidance_high=1.0, guidance_low=2.0)
    assert config.expert_at(timestep, num_train_timesteps=1000)[0] == expert


def test_keeping_one_expert_lets_the_other_go_first() -> None:
    alive: set[str] = set()

    class Expert:
        def __init__(self, name: str) -> None:
            assert not alive, f"{alive} still there when {name} loads"
            self.name = name
            alive.add(name)

        def __del__(self) -> None:
            alive.discard(self.name)

    experts = Experts({name: lambda name=name: Expert(name) for name in ("high", "low")}, keep_one=True)  # type: ignore[dict-item]
    for name in ("high", "high", "low", "high"):
        assert experts.get(name).name == name  # type: ignore[arg-type, attr-defined]
    experts.drop()
    assert not alive


def test_text_is_projected_once_per_branch_and_dropped_with_the_expert() -> None:
    projected: list[tuple[str, int]] = []

    devices = {"high": torch.device("cpu"), "low": torch.device("cpu")}

    def expert(name: str):
        return SimpleNamespace(
            project_text=lambda states: projected.append((name, int(states[0, 0, 0]))) or [name],
            parameters=lambda: iter([SimpleNamespace(device=devices[name], dtype=torch.float32)]),
        )

    prompt = Prompt(torch.full((1, 1, 1), 1), torch.full((1, 1, 1), 2))
    high, low = expert("high"), expert("low")
    for model in (high, high, low, high):
        for branch in ("positive", "negative", "positive"):
            prompt.project(model, branch)
    assert projected == [(name, branch) for name in ("high", "low", "high") for branch in (1, 2)]
    devices["high"] = torch.device("cpu", 0)  # as good as another one
    prompt.project(high, "positive")
    assert projected[6:] == [("high", 1)]
    prompt.drop()
    assert not prompt._projected and prompt._model is None


def test_dropped_text_is_gone_also_where_an_error_still_holds_the_list() -> None:
    states = torch.ones(1, 1, 1)
    model = SimpleNamespace(
        project_text=lambda states: [states.clone(), states.clone()],
        parameters=lambda: iter([SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)]),
    )
    prompt = Prompt(states, None)
    held = prompt.project(model, "positive")  # as the frames of an error hold it
    gone = [weakref.ref(one) for one in held]
    prompt.drop()
    assert held == [] and all(one() is None for one in gone)


def test_the_checkpoints_scheduler_settings_count_but_its_shift_yields() -> None:
    config = {
        "_class_name": "UniPCMultistepScheduler",
        "flow_shift": 3.0,
        "solver_order": 3,
        "num_train_timesteps": 500,
    }
    made = make_scheduler(config, shift=7.0).config
    assert (made.flow_shift, made.solver_order, made.num_train_timesteps) == (7.0, 3, 500)
    assert made.prediction_type == "flow_prediction" and made.use_flow_sigmas


def test_another_scheduler_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="FlowMatchEuler"):
        make_scheduler({"_class_name": "FlowMatchEulerDiscreteScheduler"}, shift=3.0)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_noise_is_what_the_reference_draws_with_a_cpu_generator(seed: int) -> None:
    """D07: and seed 0 is a seed like any other."""
    from diffusers.utils.torch_utils import randn_tensor

    shape = (1, 16, 3, 6, 10)
    generator = torch.Generator("cpu").manual_seed(seed)
    expected = randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(initial_noise(shape, seed=seed), expected)
