"""Times one denoising step of real-size T2V-A14B against the transformer of diffusers on the same weights, by turns.

    python scripts/bench_step.py --attention fa3 --size 1280*720 --repeats 3 --json step.json

Random weights, one expert, both guidance branches: two forward passes. Both use the same attention kernel; diffusers
runs eagerly, as its pipeline does. The two predictions are compared first. Memory is what a step adds to the weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from bench_block import attending_with, peak_memory
from bench_kernels import versions
from kernel_designs.timing import time_alternating
from real_size_steps import random_expert
from scripts.git_commit import commit_here
from usp.attention import choose_attention
from usp.exchange import CollectiveExchange
from usp.layout import MeshShape
from usp.mesh import make_mesh
from usp.models.wan.clip import Clip
from usp.models.wan.config import TransformerConfig
from usp.models.wan.parallel import ParallelDenoiser
from usp.models.wan.sampling import Prompt
from usp.models.wan.text import TEXT_LEN
from usp.models.wan.transformer import WanTransformer

DEVICE = torch.device("cuda")
GUIDANCE, TIMESTEP = 4.0, 700.0


def theirs_with(weights: WanTransformer) -> Any:
    """diffusers' model over our tensors: nothing is held twice."""
    from diffusers import WanTransformer3DModel

    config = weights.config
    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=config.num_layers)
    for name, parameter in weights.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)
    model.rope = type(model.rope)(config.head_dim, (1, 2, 2), 1024).to(DEVICE)
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    return model.eval()


def steps(
    clip: Clip, model: WanTransformer, attention: Any
) -> tuple[dict[str, Callable[[], torch.Tensor]], Callable[[], None]]:
    """One guided prediction each, [1, C, F, H, W] fp32; and what lets go of the text's keys and values that ours keeps
    from step to step."""
    config = model.config
    mesh = make_mesh(MeshShape(1, 1), device_type="cpu")
    denoiser = ParallelDenoiser(
        clip,
        config,
        mesh=mesh,
        exchange=CollectiveExchange(clip.num_tokens, axis=mesh.ulysses),
        attention=attention,
        device=DEVICE,
        dtype=torch.bfloat16,
    )
    states = torch.randn(2, 1, TEXT_LEN, config.text_dim, device=DEVICE).bfloat16()
    latent = torch.randn(1, config.in_channels, *clip.latent_size, device=DEVICE)
    prompt, theirs = Prompt(states[0], states[1]), theirs_with(model)
    time = torch.tensor([TIMESTEP], device=DEVICE)

    def ours() -> torch.Tensor:
        return denoiser.predict(model, latent, timestep=TIMESTEP, guidance=GUIDANCE, prompt=prompt)

    def reference() -> torch.Tensor:
        with attending_with(attention):
            positive, negative = (
                theirs(latent.bfloat16(), time, one, return_dict=False)[0].float() for one in (states[0], states[1])
            )
        return negative + GUIDANCE * (positive - negative)

    return {"ours": ours, "diffusers": reference}, prompt.drop


def measure(flags: argparse.Namespace, size: str, model: WanTransformer, attention: Any) -> dict[str, Any]:
    width, height = map(int, size.split("*"))
    clip = Clip(flags.frame_num, height, width)
    runs, forget = steps(clip, model, attention)
    found = {name: run() for name, run in runs.items()}
    difference = float((found["ours"] - found["diffusers"]).norm() / found["diffusers"].norm())
    assert difference < flags.tolerance, f"predictions differ by {difference:.3g}"
    memory = peak_memory(runs, before=forget)
    timed = time_alternating(runs, nbytes=0, repeats=flags.repeats, warmup=0)
    seconds = {one.name: one.median / 1e6 for one in timed}
    return {
        "size": size,
        "tokens": clip.num_tokens,
        "relative_difference": difference,
        "s": seconds,
        "samples_s": {one.name: [sample / 1e6 for sample in one.samples] for one in timed},
        "ratio": seconds["diffusers"] / seconds["ours"],
        "added_GB": memory,
    }


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    chosen = choose_attention(flags.attention, device=DEVICE, dtype=torch.bfloat16, head_dim=128)
    model = random_expert(TransformerConfig(num_layers=flags.layers), seed=1, device=DEVICE)
    records = []
    with torch.inference_mode():
        for size in flags.size:
            records.append(measure(flags, size, model, chosen.backend))
            print(json.dumps(records[-1], indent=1), flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "commit": commit_here(), "command": sys.argv}
    if flags.json:
        flags.json.write_text(json.dumps({**about, "attention": chosen.reason, "records": records}, indent=1))
    dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--size", nargs="+", default=["832*480", "1280*720"], help="width*height")
    parser.add_argument("--frame_num", type=int, default=81)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative difference of the predictions")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
