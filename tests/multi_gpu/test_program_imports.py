"""What a rank imports before it can sample, in CPU time and measured against torch itself, so on any machine alike."""

import subprocess
import sys
import textwrap

import pytest

from tests.multi_gpu.programs import ROOT

OF_TORCH = 1.7  # it is 1.25; transformers or the VAE alone would bring it above 2
MEASURE = textwrap.dedent("""
    import time
    start = time.process_time()
    import torch, torch.distributed
    torch_done = time.process_time()
    import usp.launch.run
    from usp.models.wan.sampling import make_scheduler
    make_scheduler({}, shift=3.0)
    print((time.process_time() - torch_done) / (torch_done - start))
""")


def _ratio() -> float:
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return float(measured.stdout)


@pytest.mark.timeout(600)
def test_a_rank_that_only_samples_imports_little_more_than_torch():
    assert min(_ratio() for _ in range(2)) < OF_TORCH  # the first one may have to compile
