"""Does a run fit, and what will it take? Says so in seconds, without devices, weights or data.

    python preflight.py CONFIG [section.key=value ...] [--ranks N] [--json]
    python preflight.py --doctor [CONFIG]                                     examines this machine (plan/doctor.py)
    python preflight.py --self-test [CONFIG] [section.key=value ...]          trains a tiny model (plan/self_test.py)
    torchrun --nproc_per_node=N preflight.py --groups|--operators|--layers CONFIG [section.key=value ...]

Without an option: rank grid and groups, the batch equation, bytes a rank in every phase, a roofline of a step's time,
and a verdict: exit 0 it fits, 1 it is refused, with the nearest layouts that fit, 2 the input cannot be read. This
imports no torch. --groups proves and times the process groups (plan/groups.py), --operators the kernels at the model's
sizes (plan/kernels_check.py), --layers two layers in trainer and sampler (plan/layers_check.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import hf_config
from config import load_config
from config_rules import OTHER_RULES
from input_files import BAD_INPUT, MOST_RANKS, InputError, refused, shown
from plan import grid, roofline
from plan import memory as memory_plan
from plan.grid import Layout
from plan.memory import GIB
from plan.search import Plan, Setting, alternatives, judge, overrides

# ------------------------------------------------------------------------------------------------------------- telling


def as_json(plan: Plan, others: list[Plan], setting: Setting) -> dict:
    """The plan as one object; bytes and seconds. Without a layout there are no groups and no bytes."""
    report: dict = {
        "verdict": "refused" if plan.reasons else "fits",
        "reasons": plan.reasons,
        "ranks": plan.layout.ranks,
        "device": setting.device,
        "layout": _sizes(plan.layout),
        "alternatives": [
            {
                "ranks": other.layout.ranks,
                "overrides": overrides(other, plan.cfg),
                "peak_bytes": other.memory.peak,
                "step_seconds": round(other.times.total, 3),
            }
            for other in others
        ],
        "per_rank": {},
        "groups": {},
    }
    if plan.memory is None:
        return report
    parts = plan.memory.parts
    report["groups"] = grid.groups(plan.layout)
    report["groups_across_nodes"] = {
        kind: grid.crossing(members, setting.ranks_per_node) for kind, members in report["groups"].items()
    }
    report["per_rank"] = {
        "base_bytes": parts["base"],
        "lora_parameters": parts["lora"] // 4,
        "parts": parts,
        "phases": plan.memory.phases,
        "fullest_phase": plan.memory.fullest,
        "peak_bytes": plan.memory.peak,
        "capacity_bytes": plan.memory.capacity,
    }
    report["step_seconds"] = {
        "total": plan.times.total,
        "phases": plan.times.phases,
        "bottleneck": plan.times.bottleneck,
        "causes": plan.times.causes,
        "advice": {name: roofline.advice(plan.cfg, plan.times, plan.memory, name) for name in _told(plan.times)},
        "decode_step": plan.times.decode,
    }
    return report


def _sizes(layout: Layout) -> dict[str, int]:
    return {
        "tensor": layout.tensor,
        "data": layout.data,
        "expert_tensor": layout.expert_tensor,
        "expert": layout.expert,
        "expert_data": layout.expert_data,
        "rollout_tensor": layout.engine_tensor,
        "rollout_replicas": layout.replicas,
    }


def as_text(plan: Plan, others: list[Plan], setting: Setting, source: str) -> str:
    """The plan for a reader."""
    layout, device = plan.layout, setting.device
    lines = [f"{plan.cfg.name}: {layout.ranks} ranks, device {device}, model from {source}"]
    if plan.memory is not None:
        lines += _layout_lines(plan, setting) + _memory_lines(plan, device) + _time_lines(plan, setting)
    if not plan.reasons:
        return "\n".join([*lines, "", "verdict: fits"])
    lines += ["", "verdict: refused", *(f"  {reason}" for reason in plan.reasons)]
    if not others:
        lines.append("no layout on up to 8 times as many ranks fits")
    else:
        lines.append("the nearest that fit, by memory a rank and estimated step:")
    for other in others:
        memory, seconds = other.memory.peak / GIB, other.times.total
        given = " ".join(overrides(other, plan.cfg))
        lines.append(f"  {memory:6.1f} GiB {seconds:8.1f} s  --ranks {other.layout.ranks} {given}")
    return "\n".join(lines)


def _layout_lines(plan: Plan, setting: Setting) -> list[str]:
    layout, arch, cfg = plan.layout, setting.arch, plan.cfg
    prompts, group, update = cfg.rollout.prompts_per_step, cfg.rollout.group_size, cfg.optim.prompts_per_update
    node = setting.ranks_per_node
    return [
        "",
        f"layout: {layout.ranks} ranks on {-(-layout.ranks // node)} node{'s' * (layout.ranks > node)} of {node}"
        f" = tensor {layout.tensor} x data {layout.data}"
        f" = expert_tensor {layout.expert_tensor} x expert {layout.expert} x expert_data {layout.expert_data}",
        *grid.describe(layout, node),
        f"a rank holds {arch.num_heads // layout.tensor} of {arch.num_heads} heads,"
        f" {arch.num_kv_heads // layout.tensor} of {arch.num_kv_heads} key/value heads,"
        f" {arch.num_experts // layout.expert} of {arch.num_experts} experts"
        f"{f', each cut in {layout.expert_tensor}' * (layout.expert_tensor > 1)},"
        f" {arch.vocab_size // layout.tensor:,} of {arch.vocab_size:,} tokens, all {arch.num_layers} layers",
        f"a step: {prompts} prompts x {group} = {prompts * group} sequences"
        f" = {_shared(prompts, layout.replicas, 'replica', 'prompts')} x {group};"
        f" {prompts // update} update{'s' * (prompts > update)} of {update} x {group} = {update * group} sequences"
        f" = {_shared(update * group, layout.data, 'data rank', 'sequences')}",
        f"a forward takes at most {memory_plan.micro_batch_tokens(cfg, layout):,} tokens a rank",
    ]


def _shared(number: int, ranks: int, kind: str, what: str) -> str:
    """``number`` things over ``ranks``; an uneven share runs, and some ranks wait."""
    most = -(-number // ranks)
    uneven = "" if number % ranks == 0 else f" at most (uneven: {number} / {ranks})"
    return f"{ranks} {kind}{'s' * (ranks > 1)} of {most} {what}{uneven}"


def _memory_lines(plan: Plan, device: str) -> list[str]:
    memory = plan.memory
    lines = ["", f"memory of the fullest rank, of {memory.capacity / GIB:.1f} GiB:"]
    for name, size in memory.parts.items():
        lines.append(f"  {name:22} {_size(size)}{', within the activations' * (name == 'logits chunk')}")
    lines.append("  in each phase, all that stays included:")
    for name, size in memory.phases.items():
        lines.append(f"  {name:22} {_size(size)}{'  <- fullest' * (name == memory.fullest)}")
    lines.append(
        f"  assumed: {memory_plan.IMBALANCE} x the mean rows on the busiest experts,"
        f" {memory_plan.RUNTIME_BYTES[device] / GIB:g} GiB for runtime, {memory_plan.MARGIN:.0%} margin;"
        f" {memory.cached_rows} of a replica's {memory.wanted_rows} sequences in the key-value cache at once"
    )
    return lines


def _size(size: int) -> str:
    """GiB, or MiB where that would be nearly nothing."""
    return f"{size / GIB:8.3f} GiB" if size >= GIB / 32 else f"{size / 2**20:8.3f} MiB"


def _time_lines(plan: Plan, setting: Setting) -> list[str]:
    times = plan.times
    lines = ["", f"estimated step: {times.total:.3g} s"]
    told = _told(times)
    for name, seconds in times.phases.items():
        shares = [f"{cause} {part / seconds:.0%}" for cause, part in times.causes[name].items() if part > seconds / 20]
        what = f"; {roofline.advice(plan.cfg, times, plan.memory, name)}" if name in told else ""
        lines += [f"  {name:22} {seconds:8.3f} s  {', '.join(shares)}{what}"] * bool(shares)
    parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in times.decode.items())
    lines.append(f"  a decode step, ms: {parts}; {times.waves} wave{'s' * (times.waves > 1)}")
    machine, forward = roofline.MACHINES[setting.device], times.causes["update forward"]
    if plan.layout.expert > 1 and "arithmetic" in forward:
        link = machine.link * forward["expert exchange"] / forward["arithmetic"]
        lines.append(f"  a link of {link / 1e9:.3g} GB/s or less: experts' traffic takes as long as the arithmetic")
    lines.append(f"  assumed: {roofline.assumptions(machine, setting.prompt_tokens, setting.completion_tokens)}")
    lines.append(f"  longest: {times.bottleneck}, bound by {times.bound(times.bottleneck)}")
    return lines


def _told(times: roofline.Times) -> list[str]:
    """The phases that are worth shortening: a tenth of the step or more."""
    return [name for name, seconds in times.phases.items() if seconds >= 0.1 * times.total]


# --------------------------------------------------------------------------------------------------------- the command


MOST = {"ranks": MOST_RANKS, "ranks_per_node": MOST_RANKS, "device_gib": 10**6}
MOST |= {"prompt_tokens": 2**20, "completion_tokens": 2**20}


def _doctor(arguments: list[str]) -> int:
    from plan import doctor

    return doctor.main(arguments)


def _self_test(arguments: list[str]) -> int:
    import parallel_setup
    from plan import self_test

    return parallel_setup.run_command(self_test.main, arguments)


def _groups(arguments: list[str]) -> int:
    import parallel_setup
    from plan import groups

    return parallel_setup.run_command(groups.main, arguments)


def _operators(arguments: list[str]) -> int:
    import parallel_setup
    from plan import kernels_check

    return parallel_setup.run_command(kernels_check.main, arguments)


def _layers(arguments: list[str]) -> int:
    import parallel_setup
    from plan import layers_check

    return parallel_setup.run_command(layers_check.main, arguments)


# option -> what answers it, with a command line of its own, and the question
OTHER_QUESTIONS = {
    "--doctor": (_doctor, "what is wrong with this machine?"),
    "--groups": (_groups, "under torchrun: do the process groups work, and how fast?"),
    "--operators": (_operators, "under torchrun: does every operator give its formula's answer?"),
    "--layers": (_layers, "under torchrun: do trainer and sampler agree on two layers?"),
    "--self-test": (_self_test, "does a tiny model learn here?"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", nargs="?", help="YAML file, e.g. configs/qwen3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--ranks", type=int, help="default: one node, or on a CPU the fewest that the layout takes")
    parser.add_argument("--ranks-per-node", type=int, default=16, help="devices of one server")
    parser.add_argument("--device-gib", type=float, help="memory of one rank, in place of the device's own")
    parser.add_argument("--prompt-tokens", type=float, help="mean, for the seconds; default: the longest")
    parser.add_argument("--completion-tokens", type=float, help="mean, for the seconds; default: the longest")
    parser.add_argument("--json", action="store_true", help="print one JSON object; for unusable input none")
    for option, (_, what) in OTHER_QUESTIONS.items():
        parser.add_argument(option, action="store_true", help=f"instead: {what}")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 fits, 1 refused, 2 on an InputError."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for option, (answer, _) in OTHER_QUESTIONS.items():
        if option in arguments:
            return answer([argument for argument in arguments if argument != option])
    args = parse(arguments)
    notes: list[str] = []
    try:
        for option in ("ranks", "ranks_per_node", "device_gib", "prompt_tokens", "completion_tokens"):
            value = getattr(args, option)
            if value is not None and not 0 < value <= MOST[option]:
                found = f"--{option.replace('_', '-')}: found {shown(value)}"
                raise InputError(f"{found}; needed: more than 0, at most {MOST[option]:,}")
        if args.config is None:
            raise InputError("CONFIG: missing; needed: a YAML file, e.g. configs/qwen3.yaml, or --doctor")
        cfg = load_config(args.config, args.overrides, notes, OTHER_RULES)
        arch, source = hf_config.planned(cfg)
    except BAD_INPUT as error:
        return refused(error)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    device = grid.device_of(cfg)
    setting = Setting(
        arch,
        device,
        args.ranks_per_node,
        args.device_gib,
        args.prompt_tokens or cfg.data.max_prompt_tokens,
        args.completion_tokens or cfg.rollout.max_new_tokens,
    )
    plan = judge(cfg, args.ranks or grid.default_ranks(cfg, device, args.ranks_per_node), setting)
    others = alternatives(plan, setting) if plan.reasons else []
    if args.json:
        print(json.dumps(as_json(plan, others, setting)))
    else:
        print(as_text(plan, others, setting, source))
    return 1 if plan.reasons else 0


if __name__ == "__main__":
    sys.exit(main())
