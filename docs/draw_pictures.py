"""Draws docs/pictures/architecture.svg from SECTIONS and the imports, and step.svg from STEP below.

    python docs/draw_pictures.py            tests/test_pictures.py fails when a picture is older than the code
    python docs/draw_pictures.py --files    prints what each file is for, by section: the first line of its docstring

The bytes of a picture follow from the input alone, so that a test can compare them.
"""

import ast
import math
import sys
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
COLOURS = {  # section of SECTIONS -> background
    "Commands": "#fde7c8",
    "checks/": "#e3eefb",
    "Training": "#fde7c8",
    "plan/": "#e3eefb",
    "lab/": "#e3eefb",
    "Method": "#e4f4e1",
    "engines/": "#f6e3ef",
    "Model": "#efeaf9",
    "System": "#eeeeee",
    "inputs/": "#f3f0e6",
    "Tables": "#eeeeee",
}
SECTIONS = {  # section -> its files, or nothing for a whole folder; a section imports from itself and from those below
    "Commands": "preflight report sweep export",
    "checks/": "",
    "Training": "train_grpo startup sampling_ranks",
    "plan/": "",
    "lab/": "",
    "Method": "learner grpo rollout weight_sync aqn routing_replay reward_gsm8k data_gsm8k evaluate "
    "tiny_model smol_model",
    "engines/": "",
    "Model": "model_megatron packing lora_megatron weights_hf adapter_weights",
    "System": "parallel_setup device hardware/__init__ hardware/kernels quantisation checkpoint runlog run_record "
    "tripwires config",
    "inputs/": "",
    "Tables": "knobs architecture engines/kinds",
}
TITLES = {
    "plan/": "plan/  before a run",
    "checks/": "checks/  the code on this machine",
    "inputs/": "inputs/  what a user gives",
    "lab/": "lab/  after a run",
    "engines/": "engines/  what samples",
}
FONT = 'font-family="Helvetica, Arial, sans-serif"'

# What a step passes on, in order: its title, and (function, what it takes, what it gives). test_pictures.py checks
# that every function exists. P prompts, G completions a prompt, S = P x G, b rows, T tokens, R LoRA rank.
STEP = [
    ("1. Give the sampler the current policy", [
        ("weights_hf.export", "base W, LoRA A and B of all ranks", "merged W + (alpha / R) B A, tensor by tensor"),
        ("aqn.perturb", "RMSNorm weights, sigma(step)", "noisy RMSNorm weights, if aqn is on"),
        ("engines.interface.Engine.load_weights", "named tensors", "the sampler's copy of the policy"),
    ]),
    ("2. Sample and score G completions for each of P questions", [
        ("data_gsm8k.Questions.pick", "(seed, step)", "P questions as prompt tokens"),
        ("engines.interface.Engine.sample", "prompts, seeds", "S completions: tokens, log-probs, routes"),
        ("reward_gsm8k.score", "text, gold answer", "rewards (P, G)"),
    ]),
    ("3. Compare each score with its group's", [
        ("grpo.group_advantages", "rewards (P, G)", "advantages (P, G)"),
    ]),
    ("4. Update the adapters on the clipped objective", [
        ("rollout.pack", "sequences of this data rank", "micro-batches (b, T)"),
        ("model_megatron.token_logprobs", "tokens (b, T); LoRA off, then on", "reference, old, new log-probs (b, T)"),
        ("grpo.policy_loss", "new and old log-probs, advantages", "loss"),
        ("grpo.kl", "new and reference log-probs", "KL a token (b, T)"),
        ("parallel_setup.Parallel.sync_gradients_", "gradients of A and B", "sums over the ranks that share a factor"),
    ]),
    ("5. Record, check, evaluate, save", [
        ("runlog.RunLog.log_step", "metrics", "metrics.jsonl, timing.jsonl, progress line"),
        ("tripwires.Tripwires.after_step", "metrics", "nothing, or the run ends with exit code 3"),
        ("evaluate.evaluate", "held-out questions", "accuracy with its interval"),
        ("checkpoint.save", "LoRA factors, AdamW moments", "checkpoints/step-NNNNNN/"),
    ]),
]  # fmt: skip


def sections() -> dict[str, list[str]]:
    """Section -> its files, as paths from the repository's folder."""
    listed = {section: [f"{name}.py" for name in names.split()] for section, names in SECTIONS.items()}
    elsewhere = sum(listed.values(), [])
    for folder in (section for section, files in listed.items() if not files):
        inside = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"{folder}*.py"))
        listed[folder] = [file for file in inside if file not in elsewhere]
    return listed


def imported(path: str, files: set[str]) -> set[str]:
    """The files among ``files`` that the file at ``path`` imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {file for name in names if (file := name.replace(".", "/") + ".py") in files}


def arrows() -> dict[tuple[str, str], int]:
    """(section, section that it imports from) -> number of such imports."""
    home = {file: section for section, files in sections().items() for file in files}
    pairs = [(section, home[other]) for file, section in home.items() for other in imported(file, set(home))]
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def svg(width: int, height: int, parts: list[str]) -> str:
    """The parts as one picture on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, size: int = 13, more: str = "") -> str:
    """One line of text that starts at (x, y)."""
    return f'<text x="{x:g}" y="{y:g}" {FONT} font-size="{size}" {more}>{escape(words)}</text>'


def architecture() -> str:
    """The sections as boxes with their files, and an arc for each pair of sections that an import joins."""
    width, left, box, row, columns = 980, 16, 700, 24, 5
    head = "A number counts the imports between two sections. One runs upwards: data files use the reward's gold_answer"
    parts, middle, y = [text(left, 26, head, 15)], {}, 44
    for section, files in sections().items():
        height = 34 + row * math.ceil(len(files) / columns)
        parts += [
            f'<rect x="{left}" y="{y}" width="{box}" height="{height}" rx="8" fill="{COLOURS[section]}"/>',
            text(left + 12, y + 20, TITLES.get(section, section), 14, 'font-weight="bold"'),
        ]
        for index, file in enumerate(files):
            x, line = left + 12 + (index % columns) * 138, y + 42 + row * (index // columns)
            parts.append(text(x, line, Path(file).stem, 12))
        middle[section] = y + height / 2
        y += height + 14
    for (above, below), count in sorted(arrows().items(), key=lambda item: middle[item[0][0]] - middle[item[0][1]]):
        start, end, right = middle[above] - 6, middle[below] + 6, left + box
        reach = right + 24 + 0.42 * (end - start)
        colour = "#c0392b" if start > end else "#5b6b7b"
        parts += [
            f'<path d="M {right} {start:g} C {reach:g} {start:g} {reach:g} {end:g} {right + 7} {end:g}" fill="none" '
            f'stroke="{colour}" stroke-opacity="0.55" stroke-width="{1 + count / 12:.2f}"/>'
            f'<path d="M {right} {end:g} l 9 -4 v 8 z" fill="{colour}"/>',
            text(right + 18 + 0.315 * (end - start), (start + end) / 2 + 4, str(count), 10, 'fill="#333"'),
        ]
    return svg(width, y, parts)


def step() -> str:
    """One step of the training loop: what each function takes and gives."""
    width, y = 980, 44
    head = "One step of train_grpo.py.  P questions, G completions of each, S = P x G, b rows, T tokens"
    parts = [text(16, 26, head, 15)]
    for number, ((title, calls), colour) in enumerate(zip(STEP, COLOURS.values(), strict=False)):
        height = 34 + 30 * len(calls)
        parts += [
            f'<rect x="16" y="{y}" width="{width - 32}" height="{height}" rx="8" fill="{colour}"/>',
            text(28, y + 21, title, 14, 'font-weight="bold"'),
        ]
        for index, (function, takes, gives) in enumerate(calls):
            line = y + 46 + 30 * index
            name = ".".join(function.split(".")[-3:]).removeprefix("interface.")
            parts += [
                text(296, line, takes, 12, 'text-anchor="end"'),
                text(304, line, "→", 13),
                f'<rect x="322" y="{line - 16}" width="276" height="23" rx="5" fill="white" stroke="#5b6b7b"/>'
                + text(460, line, name, 12, 'text-anchor="middle" font-weight="bold"'),
                text(604, line, "→", 13) + text(624, line, gives, 12),
            ]
        if number + 1 < len(STEP):
            arrow = f"M {width / 2:g} {y + height} v 9 m -5 -5 l 5 6 l 5 -6"
            parts.append(f'<path d="{arrow}" fill="none" stroke="#5b6b7b"/>')
        y += height + 14
    return svg(width, y, parts)


def purposes() -> str:
    """Every file with the first line of its docstring, by section."""
    lines = []
    for section, files in sections().items():
        lines.append(TITLES.get(section, section))
        for file in files:
            written = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
            lines.append(f"  {file:30} {written.splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--files" in sys.argv:
        print(purposes())
        sys.exit()
    (PICTURES / "architecture.svg").write_text(architecture())
    (PICTURES / "step.svg").write_text(step())
