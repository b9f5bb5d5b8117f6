"""The house: one import name, imports that point one way, pins that fit, and targets that exist."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import usp

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("ipc", "models", "launch")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Who may be imported by whom: launch -> models.wan -> usp -> ipc. Errors are everybody's.
FORBIDDEN = {
    "launch": (),
    "models": ("usp.launch",),
    "usp": ("usp.launch", "usp.models"),
    "ipc": ("usp.launch", "usp.models", "usp.exchange", "usp.mesh", "usp.ulysses", "usp.attention", "usp.backends"),
}
LIGHT = [
    *("usp", "usp.errors", "usp.layout", "usp.launch.main", "usp.backends.names"),
    *(f"usp.models.wan.{name}" for name in ("clip", "config", "tasks", "text", "checkpoint.folder")),
]
HEAVY = ("torch", "numpy", "diffusers", "transformers", "tokenizers", "safetensors", "av", "PIL", "ftfy")


def python_files(folder: str) -> list[Path]:
    """Files of one top-level folder; for usp those that are not behind a link."""
    return [path for path in (ROOT / folder).rglob("*.py") if not set(LINKED) & set(path.relative_to(ROOT).parts[1:2])]


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in requirements}


@pytest.mark.parametrize("name", LINKED)
def test_top_folders_enter_the_package_through_relative_links(name):
    link = ROOT / "usp" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


@pytest.mark.parametrize("folder", ["usp", *LINKED])
def test_every_package_folder_has_an_init_file_and_so_ships(folder):
    assert [path for path in python_files(folder) if not (path.parent / "__init__.py").is_file()] == []


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_point_one_way(folder):
    for path in python_files(folder):
        backwards = [name for name in imported_names(path) if name.startswith(FORBIDDEN[folder])]
        assert not backwards, f"{path.relative_to(ROOT)} imports {backwards}"


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("statement", ["import {}", "from {} import anything", "import {}.anything"])
def test_linter_refuses_bare_names(name, statement):
    source = statement.format(name)
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", "launch/probe_.py", "-"]
    done = subprocess.run(command, input=source, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"import usp.{name}" in done.stdout


def test_linter_reads_every_file_once():
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    linted = sorted(Path(line) for line in done.stdout.splitlines() if line.endswith(".py"))
    assert [path for path in linted if path.parts[len(ROOT.parts)] in ("usp", *LINKED)] == sorted(
        path for folder in ("usp", *LINKED) for path in python_files(folder)
    )


def test_light_modules_import_nothing_heavy():
    program = f"import sys, {', '.join(LIGHT)}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(line) for line in (*PROJECT["dependencies"], *extras["dev"], *extras["mpi"])]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_its_bounds(requirement):
    version = pins()[requirement.name.lower().replace("_", "-")]
    assert Version(version) in requirement.specifier


def test_pins_name_public_releases():
    local = {name: version for name, version in pins().items() if Version(version).local}
    assert local == {}  # "2.13.0+cpu" exists on some indexes only


def test_changelog_has_an_entry_for_this_version():
    assert re.search(rf"^## {re.escape(usp.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_documented_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / ".ci" / "run"]:
        named = set(re.findall(r"(?:^|`| {4})make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.relative_to(ROOT)} names {sorted(named - targets)}"


# Cases of other programs' faults that are not of this program yet: tiled decoding.
LATER = {"D19"}


def test_every_case_is_named_in_a_test():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"\bD(?:0[1-9]|1\d|2[0-5])\b", text))
    assert named | LATER == {f"D{number:02d}" for number in range(1, 26)}
