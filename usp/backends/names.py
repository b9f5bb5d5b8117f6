"""What the attention backends are called and in which order `auto` tries them. Plain words, nothing imported."""

FLASHINFER = ("flashinfer-fa2", "flashinfer-fa3", "flashinfer-cutlass", "flashinfer-cudnn")
NAMES = ("sdpa", "fa3", "fa4", "cudnn", "flashinfer", *FLASHINFER, "flash", "efficient", "math")

# Fastest first, by kind of device; whatever does not run on the GPU at hand is passed over with its reason.
AUTO = {
    "cuda": ("fa3", "fa4", "cudnn", "flashinfer", "flash", "efficient", "math"),
    "cpu": ("sdpa",),
}
