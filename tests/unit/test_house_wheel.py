"""The wheel's inspector refuses what a wheel must not be."""

import zipfile
from pathlib import Path

import pytest

import check_wheel

METADATA = "usp_runtime-0.1.0.dist-info/METADATA"


def made_wheel(folder: Path, names: list[str]) -> Path:
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in [*names, METADATA]:
            wheel.writestr(name, "")
    return path


def test_a_wheel_with_every_file_of_the_package_passes(tmp_path):
    wheel = made_wheel(tmp_path, check_wheel.package_files())
    check_wheel.check_names(wheel)
    check_wheel.check_complete(wheel)


@pytest.mark.parametrize("name", ["ipc/__init__.py", "models/wan/text.py", "tests/tiny.py", "generate.py"])
def test_a_second_top_level_name_is_refused(tmp_path, name):
    with pytest.raises(check_wheel.WheelError, match=name.split("/")[0]):
        check_wheel.check_names(made_wheel(tmp_path, [*check_wheel.package_files(), name]))


@pytest.mark.parametrize(
    "name",
    ["usp/py.typed", "usp/models/wan/text.py", "usp/launch/__init__.py", "usp/models/wan/packaged/model_index.json"],
)
def test_a_missing_file_is_named(tmp_path, name):
    names = check_wheel.package_files()
    names.remove(name)
    with pytest.raises(check_wheel.WheelError, match=f"missing from the wheel: .*{name}"):
        check_wheel.check_complete(made_wheel(tmp_path, names))


def test_a_file_that_is_not_in_the_tree_is_named(tmp_path):
    with pytest.raises(check_wheel.WheelError, match=r"too many: .*usp/left_over\.py"):
        check_wheel.check_complete(made_wheel(tmp_path, [*check_wheel.package_files(), "usp/left_over.py"]))


def test_a_command_that_fails_shows_its_output():
    with pytest.raises(check_wheel.WheelError, match="ended with 3:\nsome reason"):
        check_wheel.run("sh", "-c", "echo some reason; exit 3")
