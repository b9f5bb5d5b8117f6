"""Build the wheel and prove what it brings: every file of the package, one import name, and checks that need no torch.

Works in a temporary folder and downloads nothing. Run by `make wheel`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "usp", "ipc", "models", "launch")
LINKS = ("ipc", "models", "launch")  # folders of this repository that must not become import names
NOT_SHIPPED = ("__pycache__", "*.pyc")

IMPORTS = f"""
import importlib.util, sys
import usp, usp.ipc, usp.layout, usp.errors, usp.launch.main, usp.launch.flags, usp.models.wan.tasks
import usp.models.wan.checkpoint.folder as folder
assert "torch" not in sys.modules and importlib.util.find_spec("torch") is None
assert (folder.packaged_checkpoint() / "model_index.json").is_file(), folder.packaged_checkpoint()
found = [name for name in {LINKS} if importlib.util.find_spec(name)]
assert not found, f"importable beside usp: {{found}}"
"""


class WheelError(Exception):
    """The wheel is not what it should be."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="usp-wheel-") as folder:
        wheel = build_wheel(Path(folder))
        check_names(wheel)
        check_complete(wheel)
        check_installed(wheel, Path(folder))
        print(f"{wheel.name}: {wheel.stat().st_size / 1024:.0f} KiB, brings only `usp`, runs its checks without torch")


def build_wheel(folder: Path) -> Path:
    """Build from a copy, so that neither build/ nor an egg-info appears in the tree."""
    source, out = folder / "source", folder / "wheel"
    source.mkdir()
    for name in SOURCES:
        copy(ROOT / name, source / name)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    else:
        shutil.copy(source, target)


def check_names(wheel: Path) -> None:
    """Only `usp` and the wheel's own metadata stand at the top."""
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    others = {top for top in tops if top != "usp" and not top.endswith(".dist-info")}
    if others or "usp" not in tops:
        raise WheelError(f"the wheel's top-level names are {sorted(tops)}; expected usp alone")


def check_complete(wheel: Path) -> None:
    """The files below usp/, links followed, and those in the wheel are the same."""
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("usp/") and not name.endswith("/")}
    wanted = set(package_files())
    if shipped != wanted:
        missing, extra = sorted(wanted - shipped), sorted(shipped - wanted)
        raise WheelError(f"files missing from the wheel: {missing}; files too many: {extra}")


def package_files() -> list[str]:
    files = []
    for folder, names, found in os.walk(ROOT / "usp", followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        files += [str((Path(folder) / name).relative_to(ROOT)) for name in found]
    return files


def check_installed(wheel: Path, folder: Path) -> None:
    """In an environment that holds nothing else, the light modules import and the command answers."""
    env = folder / "env"
    run(sys.executable, "-m", "venv", "--without-pip", str(env))
    python = str(env / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    run(python, "-I", "-c", IMPORTS, cwd=env)
    run(str(env / "bin" / "usp-generate"), "--help", cwd=env)


def run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise WheelError(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout}")


if __name__ == "__main__":
    try:
        main()
    except WheelError as error:
        sys.exit(f"check_wheel: {error}")
