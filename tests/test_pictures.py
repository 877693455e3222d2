"""The pictures and the list of files follow from the code: what is drawn exists, and nothing is left out."""

from __future__ import annotations

import re
import sys

from source import FILES, ROOT

sys.path.insert(0, str(ROOT / "docs"))
import draw_pictures  # noqa: E402


def test_every_file_is_listed_once() -> None:
    listed = [path for files in draw_pictures.sections().values() for path in files]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in FILES.values())


def test_pictures_are_as_the_code_is() -> None:
    for name in ("architecture", "step"):
        stored = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert stored == getattr(draw_pictures, name)(), "run: python docs/draw_pictures.py"


def test_steps_of_the_picture_are_those_of_the_readme_and_of_the_loop_and_its_functions_exist() -> None:
    readme, loop = (ROOT / "README.md").read_text(), (ROOT / "train_grpo.py").read_text()
    for title, calls in draw_pictures.STEP:
        number, words = title.split(". ", 1)
        assert f"{number}. **{words}" in readme and f"# {title}" in loop, title
        for name, *_ in calls:
            module = max((m for m in FILES if name.startswith(f"{m}.")), key=len)
            for part in name.removeprefix(f"{module}.").split("."):
                there = re.search(rf"^ *(?:def|class) {part}\b", FILES[module].read_text(), re.M)
                assert there, f"{name}: {module} has no {part}"
