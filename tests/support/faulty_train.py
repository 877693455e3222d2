"""train_grpo.py, of which rank 1 is killed in its third update; for a launcher that executes its ranks.

The ranks that agents.py forks need no script of their own.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import apart  # noqa: E402
import pytest  # noqa: E402

from parallel_setup import Parallel  # noqa: E402

apart.strike("die", 1, (Parallel, "sync_gradients_", 3))(pytest.MonkeyPatch())
sys.argv[0] = str(ROOT / "train_grpo.py")
runpy.run_path(sys.argv[0], run_name="__main__")
