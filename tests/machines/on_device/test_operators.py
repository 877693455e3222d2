"""The operators of hardware/kernels.py at small sizes, forward and backward in bf16 and fp32, against their formulas.

`preflight.py --operators` asks the same at the sizes of a run; checks/kernels_check.py has the formulas.
"""

from pathlib import Path

import operators
import pytest
import torch.distributed as dist
import world
from world import Place

from checks import kernels_check
from inputs import hf_config
from inputs.config import load_config

pytestmark = [pytest.mark.device, pytest.mark.xdist_group("on_device")]
TINY = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
SMALL = ["device=cpu", "optim.tokens_per_micro_batch=352", "rollout.max_new_tokens=24"]  # 4 rows of 88 tokens


def wrong(tensor: int, quantisation: str) -> list[str]:
    """What is wrong on this rank's device at the sizes of a rank of so many tensor ranks."""
    cfg = load_config(TINY, [*SMALL, f"parallel.tensor={tensor}", f"model.quantisation={quantisation}"])
    arch, rank = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0], dist.get_rank()
    rows = []
    cases = kernels_check.cases_of(cfg, arch, tensor, seed=rank)
    if quantisation == "none":
        cases += operators.more_cases(cases) + operators.odd_widths(cases)
    for case in cases:
        rows += kernels_check.check_operator(case, Place.device, rank)
    return [f"{row['operator']} in {row['dtype']}: {row['wrong']} {row['error']}" for row in rows if row["wrong"]]


@pytest.mark.parametrize("quantisation", ["none", "int4"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_operator_equals_its_formula_up_to_rounding(tensor: int, quantisation: str) -> None:
    for rank, found in enumerate(world.run(world.launched(), wrong, tensor, quantisation)):
        assert not found, f"rank {rank}: {'; '.join(found)}"
