"""The same parity on the newest megatron-core; all other tests run on the oldest, that of requirements/cpu.txt.

A process of its own has NEW_MEGATRON_DIR before everything else on its path, computes what test_model.py and
test_lora.py compute in a few layouts, and prints the errors as JSON:

    python tests/machines/test_megatron_versions.py FOLDER

For a version between them, here 0.18.2:
    pip install --no-deps --ignore-requires-python --target .cache/megatron-core-0.18.2 megatron-core==0.18.2
    NEW_MEGATRON_DIR=.cache/megatron-core-0.18.2 bash run_tests.sh tests/machines/test_megatron_versions.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lora_reference
import pytest
import reference
import torch
import world
from lora_reference import KINDS
from measured import CONTROLS, log_probs, measure

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
TEMPERATURE = 0.7
LAYOUTS = ["TP2_EP2_DP2", "TP2_EP4"]
SAME_BITS = "zero B", "disabled", "round trip", "without gradients"  # of measured.measure


def main(folder: Path) -> dict:
    """Errors against transformers by layout and kind, the worst of all ranks (of controls the least)."""
    paths, tokens, references = lora_reference.save_and_compute(folder)
    with torch.no_grad():
        logits = {kind: reference.load(path)(tokens).logits for kind, path in paths.items()}
    truth = {kind: reference.distribution(logits[kind], tokens, TEMPERATURE) for kind in KINDS}
    forwards = world.in_layouts(LAYOUTS, log_probs, paths, tokens, TEMPERATURE)
    adapted = world.in_layouts(LAYOUTS, measure, paths, references, tokens)
    import megatron.core  # after world, which prepares the import

    version, *_ = megatron.core.__version__.split("+")  # then the commit of the repository that contains the folder
    answers = {"version": version, "file": megatron.core.__file__}
    for layout in LAYOUTS:
        for kind in KINDS:
            gaps = []
            for rank in forwards[layout]:
                share, found = rank[kind]
                shares = len({other[kind][0] for other in forwards[layout]})
                gaps += [
                    float((mine[:, 1:] - true.chunk(shares)[share]).abs().max())
                    for mine, true in zip(found[:2], truth[kind], strict=True)
                ]
            ranks = [rank[kind] for rank in adapted[layout]]
            answers[f"{layout} {kind}"] = {
                "log-probs": max(gaps),
                "gradients": max(rank["error"] for rank in ranks),
                "with recompute": max(rank["error with recompute"] for rank in ranks),
                "merged": max(rank["merged error"] for rank in ranks),
                "norm": max(abs(rank["norm"] / references[kind].norm - 1) for rank in ranks),
                "bit-equal": all(rank[name] for rank in ranks for name in SAME_BITS),
            } | {control: min(rank[control] for rank in ranks) for control in CONTROLS if layout in CONTROLS[control]}
    return answers


@pytest.fixture(scope="module")
def newest(new_megatron: Path, tmp_path_factory) -> dict:
    paths = os.pathsep.join(str(path) for path in (new_megatron, ROOT, ROOT / "tests" / "support"))
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path_factory.mktemp("newest"))],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_newest_version_is_what_ran(newest, new_megatron):
    assert f"megatron_core-{newest['version']}.dist-info" in (path.name for path in new_megatron.iterdir())
    assert str(new_megatron) in newest["file"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_and_lora_are_those_of_the_unsharded_model_and_every_reduction_matters(newest, layout, kind):
    answers = newest[f"{layout} {kind}"]
    assert answers["log-probs"] < 1e-5 and answers["norm"] < 1e-5
    assert answers["gradients"] < 1e-4 and answers["with recompute"] < 1e-4
    assert answers["merged"] < 1e-6 and answers["bit-equal"]
    left_out = [control for control in CONTROLS if layout in CONTROLS[control]]
    assert len(left_out) > 1 and all(answers[control] > 1e-2 for control in left_out)  # the negative controls


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
