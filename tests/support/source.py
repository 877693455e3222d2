"""Find the source files of the product, the imports of any file, and the packages that requirements/ pins."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Used if installed; no CPU run needs them.
OPTIONAL = {"torch_npu", "mindspeed", "vllm", "peft", "ray", "tensorboard", "wandb", "swanlab"}
# import name -> name on PyPI
PACKAGE = {"yaml": "PyYAML", "megatron": "megatron-core", "PIL": "pillow", "math_verify": "math-verify"}
FOLDERS = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks"}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for pattern in ("*.py", *(f"{folder}/*.py" for folder in sorted(FOLDERS)))
    for path in sorted(ROOT.glob(pattern))
    if path.name != "__init__.py"
}
# Files that must not need torch.
REPORTING = {name for name in FILES if name.startswith("lab.") or name in ("report", "sweep")}


@functools.cache
def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """The modules that a file imports; with ``top_level`` only those that an import of the file imports.

    Modules of the product have their names of FILES, others the first part of their names. Imports under
    `if TYPE_CHECKING` never run, so ``top_level`` leaves them out.
    """
    tree = ast.parse(path.read_text())
    skipped = []
    if top_level:
        skipped = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
        skipped += [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for outer in skipped for node in ast.walk(outer)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    ours = found & FILES.keys()
    return ours | {name.split(".")[0] for name in found - ours} - FOLDERS - {"benchmarks"} - FILES.keys()


def pins(*lists: str) -> dict[str, str]:
    """name -> version of every package that one of these requirements/*.txt pins, without the "+cpu" of a build."""
    text = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in lists)
    return {
        name.lower().replace("_", "-"): version for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M)
    }
