"""Time denoising steps of the real-size T2V-A14B transformer with random weights: both experts, both guidance branches.

    python scripts/real_size_steps.py --size 832*480 --frame_num 81
    torchrun --nproc-per-node 2 scripts/real_size_steps.py --size 832*480

One JSON line at the end: seconds per step, peak memory, sha256 of the latents, versions. Needs 57 GB of GPU memory for
the weights and 5 GB (480p) or 10 GB (720p) for the rest, per rank.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from usp.attention import choose_attention, of_all_ranks
from usp.layout import choose_mesh
from usp.models.wan.clip import Clip
from usp.models.wan.config import TEXT_LEN, TransformerConfig, kept_in_fp32
from usp.models.wan.parallel import ParallelDenoiser
from usp.models.wan.sampling import Experts, Prompt, SamplingConfig, initial_noise, make_scheduler, sample
from usp.models.wan.transformer import WanTransformer
from usp.transport import Transport, choose_transport, make_exchange, mesh_of, proven


def random_expert(config: TransformerConfig, *, seed: int, device: torch.device) -> WanTransformer:
    """bf16 weights of scale 1/sqrt(fan in), norms near one: activations of the size that a trained model has."""
    with torch.device("meta"):
        model = WanTransformer(config)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if kept_in_fp32(name) else torch.bfloat16
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        value.normal_(std=parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.02, generator=generator)
        if "norm" in name and name.endswith("weight"):
            value += 1
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    model.fuse()
    return model.eval()


def run(args: argparse.Namespace) -> dict[str, object]:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    width, height = map(int, args.size.split("*"))
    clip = Clip(args.frame_num, height, width)
    config = TransformerConfig(num_layers=args.layers, num_heads=args.heads, ffn_dim=args.ffn)
    chosen = choose_attention(
        args.attention, device=device, dtype=torch.bfloat16, head_dim=config.head_dim, gather=of_all_ranks
    )
    shape = choose_mesh(world=dist.get_world_size(), num_heads=config.num_heads, guided=True, cfg_size=args.cfg_size)
    transport = choose_transport(args.exchange, shape=shape, device=device)
    mesh = mesh_of(transport, shape)
    transport = proven(transport, args.exchange, mesh=mesh, device=device)
    with make_exchange(transport, clip.num_tokens, mesh=mesh, device=device) as exchange:
        denoiser = ParallelDenoiser(
            clip, config, mesh=mesh, exchange=exchange, attention=chosen.backend, device=device, dtype=torch.bfloat16
        )
        return {**measure(args, clip, config, denoiser, device, transport), "attention": chosen.reason}


def measure(
    args: argparse.Namespace,
    clip: Clip,
    config: TransformerConfig,
    denoiser: ParallelDenoiser,
    device: torch.device,
    transport: Transport,
) -> dict[str, object]:
    shape, on_gpu = denoiser.mesh.shape, device.type == "cuda"
    loaders = {"high": lambda: random_expert(config, seed=1, device=device)}
    loaders["low"] = lambda: random_expert(config, seed=2, device=device)
    experts = Experts(loaders, keep_one=False)
    for name in loaders:
        experts.get(name)
    text = (
        torch.randn(2, 1, TEXT_LEN, config.text_dim, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    )
    scheduler = make_scheduler({}, shift=12.0)
    # a boundary inside the first two steps, so that both experts work
    settings = SamplingConfig(args.steps, 12.0, 0.95, guidance_high=4.0, guidance_low=3.0)
    marks: list[tuple[str, float]] = []

    def mark(step: int, expert: str) -> None:
        if on_gpu:
            torch.cuda.synchronize()
        marks.append((expert, time.perf_counter()))

    latent = initial_noise((1, config.in_channels, *clip.latent_size), seed=0).to(device)
    for _ in range(1 + args.warmup):
        marks.clear()
        mark(-1, "start")
        prompt = Prompt(text[0], text[1])
        latents = sample(
            latent,
            config=settings,
            scheduler=scheduler,
            experts=experts,
            denoiser=denoiser,
            prompt=prompt,
            after_step=mark,
        )
    times = [(marks[i][0], round(marks[i][1] - marks[i - 1][1], 3)) for i in range(1, len(marks))]
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "size": args.size,
        "frames": args.frame_num,
        "tokens": clip.num_tokens,
        "layers": args.layers,
        "exchange": transport.name,
        "mesh": f"cfg {shape.cfg} x ulysses {shape.ulysses}",
        "dtype": "bf16",
        "s/step": times,
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 2) if on_gpu else None,
        "finite": bool(latents.isfinite().all()),
        "latents_sha256": hashlib.sha256(latents.cpu().numpy().tobytes()).hexdigest(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="832*480", help="width*height")
    parser.add_argument("--frame_num", type=int, default=81)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument(
        "--heads", type=int, default=40, help="of 128 columns; fewer than A14B's only to try things out"
    )
    parser.add_argument("--ffn", type=int, default=13824)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="untimed runs before the timed one")
    parser.add_argument("--cfg_size", type=int, default=1)
    parser.add_argument("--exchange", default="auto", choices=("auto", "ipc", "nccl", "gloo", "host"))
    parser.add_argument("--attention", default="auto")
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    result = run(args)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
