"""Whether this host seems to have a GPU that torch can use, found out in a millisecond and without importing torch.

A guess for the checks that come before anything heavy: device files, CUDA_VISIBLE_DEVICES and the installed torch's own
version file. The heavy phase makes sure, and raises where the guess was too hopeful.
"""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "nvhost-gpu")  # Linux; Linux under Windows; Jetson


def why_no_cuda(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> str | None:
    """Why CUDA cannot work here, or None if it probably can."""
    if not any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES):
        return "this host has no GPU device file"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU"
    if not _torch_has_cuda():
        return "the installed torch is built without CUDA"
    return None


def _torch_has_cuda() -> bool:
    spec = find_spec("torch")  # finds, but does not import
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", version, re.MULTILINE)
    return match is not None and match[1] != "None"
