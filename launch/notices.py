"""What a run says at its start: each line is one thing that is not quite as the user, or a file, might think."""

from collections.abc import Iterator

from usp.launch.flags import Flags
from usp.launch.prompts import DEFAULT_PROMPT
from usp.models.wan.checkpoint.folder import Checkpoint


def notices(flags: Flags, checkpoint: Checkpoint, shift: float) -> Iterator[str]:
    file_shift = checkpoint.scheduler.get("flow_shift")
    if flags.load_latents is not None:
        yield "--load_latents: only the decoder runs; prompts, seed and sampling flags are not used"
        return
    if flags.prompt is None and flags.prompt_file is None:
        yield f"no --prompt, so the default one: {DEFAULT_PROMPT!r}"
    if file_shift is not None and file_shift != shift:
        yield f"shift {shift:g} is used; the checkpoint's scheduler file says flow_shift {file_shift}"
    if flags.dit_fsdp:
        yield "--dit_fsdp: weights are not sharded, every rank holds whole experts; --offload_model true, one at a time"
    if flags.t5_fsdp:
        yield "--t5_fsdp: the text encoder runs on rank 0 alone and leaves before sampling; --t5_cpu: on the CPU"
    if flags.convert_model_dtype:
        yield "--convert_model_dtype: weights always load as --dtype, but for those that the model keeps in fp32"
