"""Says whether a run fits and how long a step takes. The answer takes seconds and needs no devices, weights or data.

    python preflight.py CONFIG [section.key=value ...] [--ranks N] [--json]
    python preflight.py CONFIG --values                                       every value that a run would read
    python preflight.py CONFIG --fastest [--ranks N]                       the fastest layouts (plan/search.py)
    python preflight.py CONFIG --calibrate TIMING               with the speed of a finished run (plan/calibrate.py)
    python preflight.py CONFIG --dry-run [--rank R] [--json]              run a step without data (checks/dry_run.py)
    python preflight.py --doctor [CONFIG]                                     examine this machine (plan/doctor.py)
    python preflight.py --adapter DIR --stack PROGRAM        does a program apply an adapter? (checks/adapter_check.py)
    python preflight.py --self-test [CONFIG] [section.key=value ...] [--ranks N]                 (checks/self_test.py)
    torchrun --nproc_per_node=N preflight.py --groups|--operators|--layers CONFIG [section.key=value ...]

The first form prints the layout of the ranks and their groups, the batch equation, a rank's memory in every phase, an
estimate of a step's time, and a verdict. It does not import torch. Exit code 0: the run fits. 1: the run is refused,
and the nearest layouts that fit are listed. 2: the input cannot be used.
--groups tests and times the process groups (checks/groups.py). --operators tests and times the kernels at the model's
sizes (checks/kernels_check.py). --layers compares two layers in trainer and sampler (checks/layers_check.py).
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

# With PYTHONSAFEPATH or `python -P`, Python does not search the folder of this file.
sys.path.insert(0, __file__.rpartition("/")[0])

from facts.architectures import Architecture
from facts.devices import HARDWARE, three_digits
from facts.exits import InputError
from facts.root import ROOT
from inputs import hf_config
from inputs.config import command, command_line, path_option, resolve_config, to_yaml
from inputs.files import MOST_RANKS, shown
from inputs.rules import divisors, nearest
from knobs import Config, Merging, ModelConfig, RolloutConfig
from plan import calibrate, grid, memory, roofline, update_kept, whole_run
from plan.search import Setting, Verdict, alternatives, fastest, judge, overrides, scripts

# ---------------------------------------------------------------------------------------------------------- the report


def as_json(verdict: Verdict, others: list[Verdict], setting: Setting, started: dict[int, str]) -> dict:
    """Return the report as one object for JSON, with sizes in bytes and times in seconds.

    If a rule is broken, the keys groups and per_rank are empty. For ``others`` and ``started`` see as_text.
    """
    layout, needs, times = verdict.layout, verdict.memory, verdict.times
    report: dict = {
        "verdict": "refused" if verdict.reasons else "fits",
        "reasons": verdict.reasons,
        "ranks": verdict.ranks,
        "device": setting.device,
        "layout": {
            "tensor": layout.tensor,
            "data": layout.data,
            "expert": layout.expert,
            "expert_data": layout.expert_data,
            "rollout_tensor": layout.engine_tensor,
            "rollout_replicas": layout.replicas,
        },
        "alternatives": [
            {
                "ranks": other.ranks,
                "script": started.get(other.ranks),
                "overrides": overrides(other, verdict),
                "peak_bytes": other.memory.peak,
                "step_seconds": round(other.times.total, 3),
            }
            for other in others
        ],
        "per_rank": {},
        "groups": {},
    }
    if needs is None or times is None:
        return report
    groups = grid.groups(layout)
    run = whole_run.whole_run(verdict, setting.arch)
    return report | {
        "groups": groups,
        "groups_across_nodes": {
            kind: grid.crossing(members, setting.ranks_per_node) for kind, members in groups.items()
        },
        "per_rank": {
            "base_bytes": needs.parts["base"],
            "lora_parameters": needs.parts["lora"] // 4,
            "parts": needs.parts,
            "phases": needs.phases,
            "fullest_phase": needs.fullest,
            "peak_bytes": needs.peak,
            "capacity_bytes": needs.capacity,
        },
        "step_s": times.step._asdict(),
        "decode_s": {name: seconds._asdict() for name, seconds in times.decoding.items()},
        "step_seconds": {
            "total": times.total,
            "phases": times.phases,
            "causes": times.causes,
            "advice": {name: advice(verdict.cfg.rollout, verdict.cfg.model, times, name) for name in times.long_phases},
        },
        "update_kept": _kept(verdict, setting),
        "run_seconds": {"steps": run.steps, "evaluations": run.evaluations},
    }


def as_text(
    verdict: Verdict, others: list[Verdict], setting: Setting, source: str, started: dict[int, str], by_time: bool
) -> str:
    """Return the report as text. ``started`` maps a number of ranks to the script that starts this many ranks.

    ``source`` is the source of the model's description. If ``by_time`` is true, ``others`` are the fastest layouts on
    the same number of ranks. Otherwise they are the layouts that fit and are nearest to the requested layout.
    """
    lines = [f"{verdict.cfg.name}: {verdict.ranks} ranks, device {setting.device}, model from {source}"]
    if verdict.times is not None:
        lines += _layout_lines(verdict, setting) + _memory_lines(verdict, setting)
        lines += _time_lines(verdict, setting)
    lines += ["", f"verdict: {'refused' if verdict.reasons else 'fits'}", *(f"  {each}" for each in verdict.reasons)]
    listed = "the fastest that fit" if by_time else "the nearest that fit"
    head = f"{listed}, with memory per rank (margin included) and estimated step:"
    none = "no layout of these ranks fits" if by_time else "no layout on up to 8 times as many ranks fits"
    if others or verdict.reasons:
        lines.append(head if others else none)
    for other in others:
        script = f"  ({started[other.ranks]})" if other.ranks in started else ""
        typed = f"--ranks {other.ranks} {' '.join(overrides(other, verdict))}{script}"
        lines.append(f"  {other.memory.peak / memory.GIB:6.1f} GiB {other.times.total:8.1f} s  {typed}")
    return "\n".join(lines)


def _layout_lines(verdict: Verdict, setting: Setting) -> list[str]:
    layout, arch, cfg = verdict.layout, setting.arch, verdict.cfg
    prompts, group, update = cfg.rollout.prompts_per_step, cfg.rollout.group_size, cfg.optim.prompts_per_update
    tokens = memory.micro_batch_tokens(cfg.optim, layout, group, cfg.row_tokens)
    node = setting.ranks_per_node
    return [
        "",
        f"layout: {layout.ranks} ranks"
        f" on {-(-layout.ranks // node)} node{'s' * (layout.ranks > node)} of {node}"
        f" = tensor {layout.tensor} x data {layout.data}"
        f" = expert {layout.expert} x expert_data {layout.expert_data}",
        *grid.describe(layout, node),
        f"each rank has {arch.num_heads // layout.tensor} of {arch.num_heads} heads,"
        f" {arch.num_kv_heads // layout.tensor} of {arch.num_kv_heads} key/value heads,"
        f" {arch.num_experts // layout.expert} of {arch.num_experts} experts,"
        f" {arch.vocab_size // layout.tensor:,} of {arch.vocab_size:,} tokens, all {arch.num_layers} layers",
        f"each step: {prompts} prompts x {group} = {prompts * group} sequences"
        f" = {_shared(prompts, layout.replicas, 'replica', 'prompts')} x {group};"
        f" {prompts // update} update{'s' * (prompts > update)} of {update} x {group} = {update * group} sequences"
        f" = {_shared(update * group, layout.data, 'data rank', 'sequences')}",
        f"a forward pass has at most {tokens:,} tokens per rank",
    ]


def _shared(number: int, ranks: int, kind: str, what: str) -> str:
    """Describe how ``ranks`` replicas or data ranks (``kind``) share ``number`` prompts or sequences (``what``).

    If the shares are unequal, the run works, but some ranks wait.
    """
    most = -(-number // ranks)
    uneven = "" if number % ranks == 0 else f" at most (uneven: {number} / {ranks})"
    return f"{ranks} {kind}{'s' * (ranks > 1)} of {most} {what}{uneven}"


def _memory_lines(verdict: Verdict, setting: Setting) -> list[str]:
    needs = verdict.memory
    cached = f"; the key-value cache holds {needs.cached_rows} of a replica's {needs.wanted_rows} sequences at once"

    def row(name: str, size: int, note: str) -> str:
        shown = f"{size / memory.GIB:8.3f} GiB" if size >= memory.GIB / 32 else f"{size / 2**20:8.3f} MiB"
        return f"  {name:22} {shown}{note}"

    return [
        "",
        f"memory of the fullest rank, which has {needs.capacity / memory.GIB:.1f} GiB:",
        *(row(name, size, ", within activations" * (name == "logits chunk")) for name, size in needs.parts.items()),
        "  in each phase, including everything that stays in memory, without the margin:",
        *(row(name, size, "  <- fullest" * (name == needs.fullest)) for name, size in needs.phases.items()),
        row("fullest and margin", needs.peak, f" of {needs.capacity / memory.GIB:.1f}"),
        f"  assumed: the busiest experts get {memory.IMBALANCE} x the mean number of rows,"
        f" a runtime takes {memory.RUNTIME_BYTES[setting.device] / memory.GIB:g} GiB, vLLM's workspace and graphs"
        f" {memory.GRAPH_BYTES[setting.device] / memory.GIB:g} GiB (also without graphs), and the margin is"
        f" {memory.MARGIN:.0%}"
        f"{cached}",
        "  preflight.py CONFIG --dry-run compares these figures with a step without data, in about a minute",
    ]


def _time_lines(verdict: Verdict, setting: Setting) -> list[str]:
    times, longest = verdict.times, verdict.cfg.rollout.max_new_tokens
    mean = f"a mean of {setting.completion_tokens:g}" if setting.completion_tokens < longest else "the maximum"
    lines = [
        "",
        f"estimated step: {times.step} s, expected {three_digits(times.total)} s, if answers have {mean} of {longest} "
        "tokens",
        whole_run.sentence(whole_run.whole_run(verdict, setting.arch), verdict.cfg.train.steps),
        *_kept_lines(verdict, setting),
        "expected seconds of each phase, with its longest part:",
    ]
    if setting.hardware.eager_layer_seconds:  # a CPU has no graphs
        decoding = [f"{seconds} s {name}" for name, seconds in times.decoding.items()]
        lines.insert(2, f"decoding: {', '.join(decoding)}")
    for name, seconds in times.phases.items():
        bound = times.bound(name)
        change = f"; {advice(verdict.cfg.rollout, verdict.cfg.model, times, name)}" if name in times.long_phases else ""
        if seconds:
            lines.append(f"  {name:22} {seconds:8.3f} s  {bound} {times.causes[name][bound] / seconds:.0%}{change}")
    rollout = verdict.cfg.rollout
    assumed = roofline.assumptions(
        setting.hardware,
        setting.prompt_tokens,
        setting.completion_tokens,
        longest,
        rollout.dynamic_rounds,
        setting.turn_seconds if rollout.environment else 0.0,
    )
    return [*lines, f"  assumed: {assumed}"]


def _kept(verdict: Verdict, setting: Setting) -> dict[str, list[float]]:
    """Return the shares of the update that merged bf16 weights keep, as plan/update_kept.py computes them.

    The result is {} if the trainer does not compute with merged bf16 weights.
    """
    cfg = verdict.cfg
    if cfg.merging < Merging.PASSES:
        return {}
    return update_kept.shares(cfg.optim, cfg.lora, setting.arch, cfg.rollout.prompts_per_step, cfg.train.steps)


def _kept_lines(verdict: Verdict, setting: Setting) -> list[str]:
    shares = [
        f"{100 * low:.2g} to {100 * high:.2g} % after {when}" if low != high else f"{100 * low:.2g} % after {when}"
        for when, (low, high) in _kept(verdict, setting).items()
    ]
    said = f"share of the update in the merged bf16 weights: {', '.join(shares)}; the factors keep the rest for later"
    return [said] if shares else []


def advice(rollout: RolloutConfig, model: ModelConfig, times: roofline.Times, phase: str) -> str:
    """Return a change that would shorten ``phase``: the first change in the table whose condition is true."""
    bound = times.bound(phase)
    larger = "optim.tokens_per_micro_batch" if times.micro_batches > 1 else "optim.prompts_per_update"
    table = (
        (phase == "decode" and times.waves > 1, f"{times.waves} waves: raise rollout.kv_cache_mib, or add replicas"),
        (phase == "decode" and bound == "launches" and rollout.enforce_eager, "set rollout.enforce_eager=false"),
        (phase == "decode" and bound == "launches", "sample more sequences per step, which costs almost nothing"),
        (phase == "decode" and bound == "weights", "raise rollout.tensor, or sample more sequences per step"),
        (phase == "old policy", "skip it with optim.prompts_per_update = rollout.prompts_per_step"),
        (phase == "update backward" and model.recompute, "set model.recompute=false, if the activations fit"),
        (bound == "launches", f"raise {larger}"),
        (bound == "expert exchange", "lower parallel.expert, if the experts fit"),
        (bound == "tensor exchange", "lower parallel.tensor, if attention and vocabulary fit"),
        (phase == "reference", "skip it with loss.kl=none"),
        (phase == "sync", "adapt fewer lora.targets"),
        (phase == "optimizer", "lower lora.expert_rank, or make fewer updates per step"),
    )
    return next((change for holds, change in table if holds), "use more ranks")


# --------------------------------------------------------------------------------------------------------- the command

OTHER_QUESTIONS = {  # option -> its help; each option has a separate command line
    "--dry-run": "run a rank's step at its real size without data, and show what it stores, computes and sends",
    "--doctor": "show what is wrong with this machine",
    "--groups": "under torchrun: test and time the process groups",
    "--operators": "under torchrun: compare every operator with its formula",
    "--layers": "under torchrun: compare trainer and sampler on two layers",
    "--adapter": "check whether another program applies an adapter; export.py --probes makes DIR",
    "--self-test": "alone or under torchrun: test model, gradients, a step and operators on this machine",
}


def answer(option: str, arguments: list[str]) -> int:
    """Run the program of ``option``, a key of OTHER_QUESTIONS, and return its exit code. Most programs import torch."""
    if option in ("--doctor", "--dry-run") and os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun, one process is enough
    if option == "--doctor":
        from plan import doctor

        return doctor.main(arguments)
    if option == "--self-test":
        from checks import self_test

        return self_test.main(arguments)
    if option == "--dry-run":  # in a separate process, because it changes torch and must load no backend
        paths = str(ROOT), os.environ.get("PYTHONPATH")  # PYTHONPATH may contain the packages
        environment = os.environ | {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        return subprocess.run([sys.executable, "-P", "-m", "checks.dry_run", *arguments], env=environment).returncode
    import parallel_setup
    from checks import adapter_check, groups, kernels_check, layers_check

    questions = {"--adapter": adapter_check, "--groups": groups, "--operators": kernels_check, "--layers": layers_check}
    return parallel_setup.run_command(questions[option].main, arguments)


LARGEST = {
    "--ranks": MOST_RANKS,
    "--ranks-per-node": MOST_RANKS,
    "--device-gib": 10**6,
    "--prompt-tokens": 2**20,
    "--completion-tokens": 2**20,
    "--turn-seconds": 10**6,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises InputError for a number that is out of range."""
    parser = command_line("preflight.py", __doc__, nargs="?")
    parser.add_argument("--ranks", type=int, help="default: one node, or on a CPU the fewest that the layout allows")
    parser.add_argument("--ranks-per-node", type=int, default=16, help="devices of one server")
    parser.add_argument("--device-gib", type=float, help="memory of one rank, instead of the device's")
    parser.add_argument("--prompt-tokens", type=float, help="mean length, for the seconds; default: the longest")
    parser.add_argument("--completion-tokens", type=float, help="mean length, for the seconds; default: max_new_tokens")
    parser.add_argument("--turn-seconds", type=float, help="wait for rollout.environment at each turn; default: 1")
    parser.add_argument("--fastest", action="store_true", help="list the fastest layouts that fit")
    parser.add_argument("--calibrate", type=path_option, metavar="TIMING", help="use the speed in a run's timing.jsonl")
    parser.add_argument("--json", action="store_true", help="print one JSON object, or none if the input is unusable")
    parser.add_argument("--values", action="store_true", help="only print every value that a run would read")
    parser.add_argument("--where", action="store_true", help="only print the line that first_hour.sh reads")
    for option, question in OTHER_QUESTIONS.items():
        parser.add_argument(option, action="store_true", help=f"instead: {question}")
    args = parser.parse_intermixed_args(arguments)
    for option, largest in LARGEST.items():
        value = getattr(args, option[2:].replace("-", "_"))
        if value is not None and not 0 < value <= largest:
            raise InputError(f"{option}: {shown(value)} is out of range; give more than 0 and at most {largest:,}")
    if args.config is None:
        raise InputError("CONFIG: missing; give a YAML file, e.g. configs/qwen3.yaml, or use --doctor")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 0 if the run fits, 1 if it is refused, and 2 if the input cannot be used."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for option in OTHER_QUESTIONS:
        if option in arguments:
            return answer(option, [argument for argument in arguments if argument != option])
    return judge_layout(arguments)


def for_first_hour(cfg: Config, device: str, ranks: int) -> str:
    """Return the line that first_hour.sh reads: device, ranks, whether graphs could be tried, name and folder."""
    graphs = device != "cpu" and cfg.rollout.kind.reserves and cfg.rollout.enforce_eager
    return "\t".join([device, str(ranks), "yes" if graphs else "no", cfg.name, cfg.train.out_dir])


def setting_of(
    args: argparse.Namespace, cfg: Config, arch: Architecture, device: str, ranks: int, timing: dict[str, float]
) -> Setting:
    """Return the machine and the lengths of prompts and completions that the command line describes.

    If ``timing`` has the speed of a finished run, both are calibrated with it.
    """
    mean = calibrate.completion_tokens(cfg.rollout, timing) if timing else cfg.rollout.max_new_tokens
    hardware = HARDWARE[device]
    setting = Setting(
        arch=arch,
        device=device,
        hardware=dataclasses.replace(hardware, memory_gib=args.device_gib or hardware.memory_gib),
        ranks_per_node=args.ranks_per_node,
        prompt_tokens=args.prompt_tokens or cfg.data.max_prompt_tokens,
        completion_tokens=args.completion_tokens or mean,
        turn_seconds=args.turn_seconds or roofline.TURN_SECONDS,
    )
    return calibrate.calibrated(cfg, ranks, setting, timing) if timing else setting


@command
def judge_layout(arguments: list[str]) -> int:
    """Print the layout of CONFIG with its memory and the times of a step, and return the exit code."""
    args = parse(arguments)
    cfg, notes = resolve_config(args.config, args.overrides, layout=False)
    if args.values:
        print("".join(f"note: {note}\n" for note in notes), end="", file=sys.stderr)
        print(to_yaml(cfg), end="")
        return 0
    arch, source = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)
    if (args.completion_tokens or 0) > cfg.rollout.max_new_tokens:
        raise InputError(
            f"--completion-tokens: the mean, {args.completion_tokens:g}, is above the longest, rollout.max_new_tokens "
            f"{cfg.rollout.max_new_tokens}; give at most that"
        )
    node = args.ranks_per_node
    timing = calibrate.read(args.calibrate) if args.calibrate else {}
    device = grid.device_of(cfg.device)
    ranks = args.ranks or grid.default_ranks(cfg.parallel, cfg.rollout, device, node)
    if args.where:
        print(for_first_hour(cfg, device, ranks))
        return 0
    if ranks > node and ranks % node:
        raise InputError(
            f"--ranks-per-node: {node} does not divide --ranks {ranks}, so nodes would differ; the nearest that do: "
            f"{nearest(node, divisors(ranks))}"
        )
    setting = setting_of(args, cfg, arch, device, ranks, timing)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    verdict = judge(cfg, ranks, setting)
    others = fastest(verdict, setting) if args.fastest else alternatives(verdict, setting)
    started = scripts(Path(args.config), device)
    if args.json:
        print(json.dumps(as_json(verdict, others, setting, started)))
    else:
        print(as_text(verdict, others, setting, source, started, args.fastest))
    return 1 if verdict.reasons else 0


if __name__ == "__main__":
    sys.exit(main())
