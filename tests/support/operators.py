"""The operators of a configuration, and more uses of them: few rows, odd widths, the sampler's shapes."""

import torch
from torch import Tensor

from checks.kernels_check import Case


def more_cases(cases: list[Case]) -> list[Case]:
    """No rows, one expert, counts of another type, and the rotary embedding of the sampler. Formulas are the same."""
    by_name = {case.name: case for case in cases}
    turned = by_name["rotary"].inputs
    rows_of_tokens = turned["x"].shape[0], 1, turned["x"].shape[3]  # (T, 1, d)
    angles = {name: turned[name].view(rows_of_tokens)[None] for name in ("cos", "sin")}
    prefill = {"x": turned["x"].transpose(0, 1)} | angles
    decode = {name: x[:, 0] for name, x in turned.items()}
    uses: list[tuple[str, str, dict[str, Tensor]]] = [("rotary", "prefill", prefill), ("rotary", "decode", decode)]
    for name, case in by_name.items():
        if name == "weighted_swiglu":
            uses.append((name, "no rows", {key: x[:0] for key, x in case.inputs.items()}))
        if name.startswith("grouped_mm"):
            x, weight, counts = case.inputs.values()
            uses.append((name, "no rows", {"x": x[:0], "counts": torch.zeros_like(counts)}))
            uses.append((name, "one expert", {"weight": weight[:1], "counts": torch.tensor([len(x)])}))
            uses.append((name, "int32 counts", {"counts": counts.int()}))
    changed = []
    for name, note, inputs in uses:
        case = by_name[name]
        changed.append(case._replace(name=f"{name}, {note}", inputs=case.inputs | inputs))
    return changed


def odd_widths(cases: list[Case]) -> list[Case]:
    """Grouped products whose rows do not begin at multiples of 16 bytes, and one with a transposed weight."""
    by_name = {case.name: case for case in cases}
    case = by_name["grouped_mm (LoRA B)"]
    x, weight, _ = case.inputs.values()
    narrow = {"x": x[:, :5], "weight": weight[:, :5, :3]}
    turned = {"weight": weight.transpose(1, 2).contiguous().transpose(1, 2)}
    return [
        case._replace(name="grouped_mm, widths of 5 and 3", inputs=case.inputs | narrow),
        case._replace(name="grouped_mm, transposed weight", inputs=case.inputs | turned),
    ]
