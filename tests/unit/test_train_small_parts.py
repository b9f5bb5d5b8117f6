"""The training of the small model: the loop, the flow, text without padding, and the start of an expert."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from scripts.train_small import experts
from scripts.train_small.cache import Cache, _captions, _misnamed
from scripts.train_small.captions import plain_caption
from scripts.train_small.data import draw_clips, draw_scenes
from scripts.train_small.ema import Ema
from scripts.train_small.experts import Loss, new_expert
from scripts.train_small.flow import PaddedText, even_level, level_range, noise_level, predict
from scripts.train_small.kernels import training_kernels
from scripts.train_small.loop import Limits, Loop, Moment, rate_share
from scripts.train_small.settings import FULL, SMOKE, TEXT_POSITIONS
from scripts.train_small.tokens import load_small_tokenizer, token_ids, write_small_tokenizer
from scripts.train_small.vae import _pixel_error, decoded, encoded, measure, new_vae
from scripts.train_small.world import STILL, all_combinations, is_held_out
from usp.attention import sdpa
from usp.kernels import Kernels, twins
from usp.models.wan.config import TEXT_LEN
from usp.models.wan.rope import rope_table
from usp.models.wan.sampling import Experts, Prompt, SamplingConfig, make_scheduler, sample
from usp.models.wan.text import tokenize

CPU = torch.device("cpu")
LIMITS = Limits(seconds=1e6, max_steps=12)


def small_loop(folder: Path, limits: Limits = LIMITS) -> Loop[nn.Linear]:
    torch.manual_seed(0)
    return Loop("toy", nn.Linear(3, 2), folder=folder, limits=limits, rate=0.1, decay=0.9, seed=1)


def toy_loss(loop: Loop[nn.Linear], *, stops_at: int | None = None):
    def loss(moment: Moment) -> torch.Tensor:
        if moment.step == stops_at:
            raise InterruptedError
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(moment.seed))
        return (loop.model(inputs) - inputs[:, :2]).square().mean()

    return loss


def test_a_loop_that_was_interrupted_ends_like_one_that_was_not(tmp_path: Path):
    whole = small_loop(tmp_path / "a")
    (tmp_path / "a").mkdir()
    whole.run(toy_loss(whole))
    (tmp_path / "b").mkdir()
    first = small_loop(tmp_path / "b")
    with pytest.raises(InterruptedError):
        first.run(toy_loss(first, stops_at=7))
    first.save()
    second = small_loop(tmp_path / "b")
    assert second.step == 7
    second.run(toy_loss(second))
    for mine, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(second.ema.model.parameters(), whole.ema.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_loop_ends_when_its_time_is_over(tmp_path: Path):
    loop = small_loop(tmp_path, Limits(seconds=0.2, max_steps=10**9))
    loop.run(toy_loss(loop))
    assert 0 < loop.step < 10**9 and 0.2 <= loop.seconds < 5
    assert (tmp_path / "toy.pt").exists() and (tmp_path / "toy.jsonl").read_text().count('"loss"') >= 1


def test_a_loss_that_is_not_finite_stops_the_loop(tmp_path: Path):
    loop = small_loop(tmp_path)
    with pytest.raises(RuntimeError, match="toy: the loss is nan"):
        loop.run(lambda moment: loop.model.weight.sum() * float("nan"))


def test_the_learning_rate_rises_then_falls_to_nothing():
    shares = [rate_share(progress / 1000) for progress in range(1001)]
    assert shares[0] < 0.1 and max(shares) > 0.99 and shares[-1] < 1e-6
    assert shares.index(max(shares)) < 50


def test_the_running_mean_of_constant_weights_is_those_weights():
    model = nn.Linear(2, 2)
    ema = Ema(model, decay=0.9)
    nn.init.constant_(model.weight, 3.0)
    for step in range(1, 200):
        ema.update(step)
    assert torch.allclose(ema.model.weight, model.weight, atol=1e-5)


def test_noise_levels_are_those_of_the_sampler():
    """And the boundary splits them as the sampler splits its steps."""
    sampling = FULL.sampling
    scheduler = make_scheduler({}, shift=sampling.shift)
    scheduler.set_timesteps(sampling.steps)
    even = torch.linspace(1, 1 / 1000, sampling.steps + 1)[:-1]
    assert torch.allclose(noise_level(even, sampling.shift), scheduler.sigmas[:-1].float(), atol=1e-5)
    low, high = level_range("low", sampling), level_range("high", sampling)
    assert low[1] == high[0] and (low[0], high[1]) == (0.0, 1.0)
    assert float(noise_level(torch.tensor(high[0]), sampling.shift)) == pytest.approx(sampling.boundary)
    assert even_level(1.0, 3.0) == 1.0


class Oracle:
    """Knows the clip: predicts the velocity that training teaches."""

    def __init__(self, clip: torch.Tensor, noise: torch.Tensor) -> None:
        self.velocity = noise - clip

    def predict(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.velocity


def test_the_velocity_that_is_taught_leads_the_sampler_to_the_clip():
    clip, noise = torch.randn(2, 16, 3, 4, 4), torch.randn(2, 16, 3, 4, 4)
    sampling = FULL.sampling
    found = sample(
        noise,
        config=SamplingConfig(sampling.steps, sampling.shift, sampling.boundary, 1.0, 1.0),
        scheduler=make_scheduler({}, shift=sampling.shift),
        experts=Experts({name: lambda: new_expert(SMOKE) for name in ("high", "low")}, keep_one=False),
        denoiser=Oracle(clip, noise),
        prompt=Prompt(torch.zeros(1, 1, 1), None),
    )
    assert torch.allclose(found, clip, atol=0.02)


def random_expert():
    """Nothing silent: every parameter has a say."""
    torch.manual_seed(3)
    model = new_expert(SMOKE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def gradients(kernels: Kernels) -> dict[str, torch.Tensor]:
    model = random_expert()
    loss = Loss("high", model, some_cache(), SMOKE)
    loss.kernels = kernels
    loss(Moment(0, 7, 0.5)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_training_has_the_gradients_of_the_twins():
    """Norm weights in the dtype of the rows: in fp32 that is nothing."""
    wanted, found = gradients(twins()), gradients(training_kernels())
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_in_bf16_training_errs_at_most_twice_as_much_as_the_twins(monkeypatch):
    exact = gradients(twins())
    monkeypatch.setattr(experts, "lower_precision", lambda device: torch.autocast("cpu", dtype=torch.bfloat16))
    errors = []
    for kernels in (twins(), training_kernels()):
        found = gradients(kernels)
        errors.append(sum(float((found[name] - exact[name]).square().sum()) for name in exact) ** 0.5)
    assert 0 < errors[1] <= 2 * errors[0]


def test_what_stands_still_is_asked_for_without_a_speed():
    scenes = [scene for scene in draw_scenes(500, all_combinations(), random=Random(4)) if scene.motion == STILL]
    assert scenes and not any("slow" in plain_caption(one) or "quick" in plain_caption(one) for one in scenes)


@torch.no_grad()
def test_one_empty_position_stands_for_all_of_them():
    model, width = random_expert(), SMOKE.text.width
    states = torch.zeros(2, TEXT_LEN, width)
    states[0, :9], states[1, : TEXT_POSITIONS - 1] = torch.randn(9, width), torch.randn(TEXT_POSITIONS - 1, width)
    noisy, sigma = torch.randn(2, 16, 3, 4, 4), torch.tensor([0.3, 0.9])
    rope = rope_table((3, 2, 2), model.config.head_dim)
    whole = predict(model, noisy, sigma, states, rope=rope, cross_attention=sdpa)
    padded = PaddedText(TEXT_POSITIONS, CPU)
    short = predict(model, noisy, sigma, states[:, :TEXT_POSITIONS], rope=rope, cross_attention=padded)
    assert (whole - short).abs().max() <= 1e-5
    unweighted = predict(model, noisy, sigma, states[:, :TEXT_POSITIONS], rope=rope, cross_attention=sdpa)
    assert (whole - unweighted).abs().max() > 1e-3


def test_every_parameter_of_a_new_expert_is_set_and_all_of_them_learn():
    torch.manual_seed(0)
    first = new_expert(SMOKE)
    torch.manual_seed(0)
    second = new_expert(SMOKE)
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other) and one.isfinite().all() and one.abs().max() <= 1.0, name
    before = {name: one.clone() for name, one in first.named_parameters()}
    batch = replace(SMOKE, expert=replace(SMOKE.expert, batch=8))
    latents, states = torch.randn(8, 16, 5, 8, 8), torch.randn(8, TEXT_POSITIONS, SMOKE.text.width)
    states[:, -1] = 0
    loss = Loss("low", first, Cache(latents, states, torch.zeros(TEXT_POSITIONS, SMOKE.text.width)), batch)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        value = loss(Moment(0, 0, 0.0))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0]
    assert all(not torch.equal(one, before[name]) for name, one in first.named_parameters())


@pytest.mark.parametrize(("name", "least", "most"), [("high", 0.875, 1.0), ("low", 0.0, 0.875)])
def test_an_expert_sees_its_side_of_the_boundary_and_all_of_it(name: str, least: float, most: float):
    loss = Loss(name, new_expert(SMOKE), some_cache(), SMOKE)
    sigma = loss._levels(512, torch.Generator().manual_seed(0))
    assert least <= sigma.min() < least + 0.01 and most - 0.01 < sigma.max() <= most


def some_cache() -> Cache:
    return Cache(torch.randn(64, 16, 5, 8, 8), torch.ones(64, TEXT_POSITIONS, 32), torch.zeros(TEXT_POSITIONS, 32))


def test_prompts_are_dropped_as_often_as_asked():
    expert = replace(SMOKE.expert, batch=4000, dropped_prompts=0.12)
    loss = Loss("high", new_expert(SMOKE), some_cache(), SMOKE)
    _, states = loss._batch(expert, torch.Generator().manual_seed(1))
    dropped = float((states.amax(dim=(1, 2)) == 0).float().mean())
    assert dropped == pytest.approx(0.12, abs=0.02)


def test_captions_are_wrong_as_often_as_asked():
    random, scenes = Random(2), draw_scenes(4000, all_combinations(), random=Random(1))
    assert [_misnamed(random, scene, 0.0) for scene in scenes] == scenes
    wrong = [_misnamed(random, scene, 0.1) for scene in scenes]
    assert not any(is_held_out(one.combination) for one, scene in zip(wrong, scenes, strict=True) if one != scene)
    share = sum(one.colour != scene.colour for one, scene in zip(wrong, scenes, strict=True)) / len(scenes)
    assert share == pytest.approx(0.1 * 7 / 8, abs=0.02)  # a little less, for what is held out
    assert all(
        (one.speed, one.background) == (scene.speed, scene.background) for one, scene in zip(wrong, scenes, strict=True)
    )
    assert all(scene.colour in text for scene, text in zip(scenes[:50], _captions(scenes[:50], 3, 0.0), strict=True))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_small_tokenizer(folder)
    return load_small_tokenizer(folder)


def test_words_of_captions_are_one_token_each_and_anything_else_has_some(tokenizer):
    known = "a red triangle moves diagonally quickly against cyan"
    assert len(tokenize(tokenizer, known).ids) == len(known.split()) + 1
    for text in ("xylophone", "数字", "🎈", "red, blue"):
        ids = tokenize(tokenizer, text).ids
        assert len(ids) > 1 and tokenizer.unk_token_id not in ids


def test_captions_in_training_have_the_tokens_of_prompts(tokenizer):
    texts = ["a red ball moves left", "", "word " * 100]
    ids, mask = token_ids(tokenizer, texts)
    for row, text in enumerate(texts[:2]):
        assert tuple(ids[row][mask[row].bool()].tolist()) == tokenize(tokenizer, text).ids
    assert mask[2].sum() == TEXT_POSITIONS - 1 and int(ids[2, TEXT_POSITIONS - 2]) == tokenizer.eos_token_id
    assert (mask[:, -1] == 0).all()  # stands for the empty positions


@torch.no_grad()
def random_vae():
    torch.manual_seed(5)
    vae = new_vae(SMOKE.vae)
    for parameter in vae.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return vae


@pytest.mark.parametrize("frames", [1, 5, 9, 17])
@torch.no_grad()
def test_training_encodes_and_decodes_as_the_vae_does_but_for_the_clipping(frames):
    vae, pixels = random_vae(), torch.rand(2, 3, frames, 32, 16) * 2 - 1
    posterior, (mean, log_variance) = vae.encode(pixels).latent_dist, encoded(vae, pixels)
    assert (mean - posterior.mean).abs().max() <= 1e-5 * posterior.mean.abs().max()
    assert (log_variance - posterior.logvar).abs().max() <= 1e-4
    vae.decoder.conv_out.weight.mul_(3)  # so that some pixels lie beyond the ends
    made, reference = decoded(vae, mean), vae.decode(mean).sample
    assert made.abs().max() > 1.1
    assert (made.clamp(-1, 1) - reference).abs().max() <= 1e-5


def test_measuring_tells_a_channel_that_says_nothing_from_noise(monkeypatch):
    def certain(vae, pixels):
        mean = torch.stack([pixels.mean(dim=(1, 2, 3, 4)), torch.zeros(len(pixels))], dim=1)[:, :, None, None, None]
        return mean, torch.tensor([-30.0, 0.0]).view(1, 2, 1, 1, 1).expand_as(mean)

    remembered = []
    monkeypatch.setattr("scripts.train_small.vae.encoded", lambda vae, x: (remembered.append(x), certain(vae, x))[1])
    monkeypatch.setattr("scripts.train_small.vae.decoded", lambda vae, latent: remembered[-1] + 0.02)
    found = measure(None, replace(SMOKE.vae, batch=16, measured_clips=32), CPU)
    assert found.deviation[1] == pytest.approx(1.0, rel=1e-3) and 0 < found.deviation[0] < 1
    assert found.psnr == pytest.approx(40.0, abs=0.3) and found.right > 0.95


def test_errors_on_the_thing_weigh_more():
    pixels = draw_clips(draw_scenes(2, all_combinations(), random=Random(0)), seed=0, device=CPU, frames=1).pixels
    is_thing = (pixels != pixels[..., :1, :1]).any(dim=1, keepdim=True)
    on_thing, beside = (_pixel_error(pixels + 0.1 * mask, pixels, 8.0) for mask in (is_thing, ~is_thing))
    share = float(is_thing.float().mean())
    assert float(on_thing) == pytest.approx(8 * 0.11 * share, rel=0.05)
    assert float(beside) == pytest.approx(0.11 * (1 - share), rel=0.05)
