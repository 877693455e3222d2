"""The tests of LoRA on the newest megatron-core; all other tests run on the oldest, that of requirements/cpu.txt.

They compare log-probs, gradients, their norm and merged weights of each kind of model with the unsharded one of
transformers, and leave out each reduction once. For a version between them, here 0.18.2:

    pip install --no-deps --ignore-requires-python --target .cache/megatron-core-0.18.2 megatron-core==0.18.2
    NEW_MEGATRON_DIR=.cache/megatron-core-0.18.2 bash run_tests.sh --all tests/machines/test_megatron_versions.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from source import ROOT

PROGRAM = """
import sys, pytest
code = pytest.main(sys.argv[1:])
import megatron.core
print(megatron.core.__version__.partition("+")[0], megatron.core.__file__)
sys.exit(code)
"""


@pytest.mark.nightly
def test_log_probs_and_lora_are_those_of_the_unsharded_model_and_every_reduction_matters(new_megatron: Path) -> None:
    options = ["--ci", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", "TP2_EP2_DP2 or TP2_EP4"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options, "tests/machines/on_device/test_lora.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(new_megatron), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    version, file = done.stdout.splitlines()[-1].split()
    assert f"megatron_core-{version}.dist-info" in (path.name for path in new_megatron.iterdir())
    assert str(new_megatron) in file
