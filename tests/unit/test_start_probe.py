"""The guess whether CUDA works here, which must not import torch and must say why not."""

import pytest

from usp.launch import probe
from usp.launch.probe import why_no_cuda


@pytest.fixture
def devices(tmp_path):
    (tmp_path / "nvidia0").touch()
    return tmp_path


def _torch(folder, monkeypatch, version):
    (folder / "version.py").write_text(version)
    spec = type("Spec", (), {"origin": str(folder / "__init__.py")})
    monkeypatch.setattr(probe, "find_spec", lambda _name: spec)


def test_a_gpu_and_a_cuda_torch_are_enough(devices, monkeypatch):
    _torch(devices, monkeypatch, "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    assert why_no_cuda({}, devices) is None
    assert why_no_cuda({"CUDA_VISIBLE_DEVICES": "3"}, devices) is None
    assert why_no_cuda({"CUDA_VISIBLE_DEVICES": "GPU-1234,1"}, devices) is None


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_gpus_are_no_gpus(devices, monkeypatch, hidden):
    _torch(devices, monkeypatch, "cuda: Optional[str] = '13.0'\n")
    assert "CUDA_VISIBLE_DEVICES" in why_no_cuda({"CUDA_VISIBLE_DEVICES": hidden}, devices)


@pytest.mark.parametrize("version", ["cuda: Optional[str] = None\n", "cuda = None\n", "__version__ = '2'\n"])
def test_a_torch_without_cuda_is_named(devices, monkeypatch, version):
    _torch(devices, monkeypatch, version)
    assert why_no_cuda({}, devices) == "the installed torch is built without CUDA"


def test_a_host_without_device_files_has_no_gpu(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert why_no_cuda({}, tmp_path) == "this host has no GPU device file"


def test_the_installed_torch_is_read_as_it_says_itself():
    import torch

    assert probe._torch_has_cuda() == (torch.version.cuda is not None)
