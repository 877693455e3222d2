"""What is wrong with this machine, before a run finds out: CANN, versions, devices, ports, limits, model, data, disk.

    python preflight.py --doctor [CONFIG] [section.key=value ...] [--ranks N] [--json]

One line each: ok, warn or fail, what was found, what to do. Exit code 0 without a fail, 1 with one, 2 for a
configuration that cannot be read. What only an NPU machine has is in doctor_npu.py and doctor_variables.py. No torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hf_config
from config import load_config
from input_files import BAD_INPUT, MOST_RANKS, SETTINGS_MIB, InputError, read_object, refuse_special, refused
from knobs import Config
from plan import doctor_npu, doctor_variables
from plan.machine import Finding, Machine, fail, memory_findings, ok, warn

GIB = 2**30
FILES_WANTED = 32768  # open at once: sockets of the ranks, weight files, shared memory


# ------------------------------------------------------------------------------------------------------------ system


def check_open_files(machine: Machine) -> Finding:
    if machine.open_files < FILES_WANTED:
        return warn("open files", f"ulimit -n is {machine.open_files}", f"ulimit -n {FILES_WANTED}")
    return ok("open files", f"ulimit -n is {machine.open_files}")


def check_shared_memory(machine: Machine) -> Finding:
    """Processes of one machine hand tensors over in /dev/shm, which a container has 64 MiB of by default."""
    shm = machine.root / "dev" / "shm"
    if not shm.is_dir() and not (machine.root / "proc").is_dir():
        return ok("/dev/shm", "this system has none and needs none")
    if not shm.is_dir():
        return warn("/dev/shm", "not there", "docker run --shm-size=64g")
    if (gib := machine.free_bytes(shm) / GIB) < 1:
        return warn("/dev/shm", f"{gib * 1024:.0f} MiB free", "docker run --shm-size=64g")
    return ok("/dev/shm", f"{gib:.1f} GiB free")


def check_ram(machine: Machine) -> Finding:
    """Main memory for the processes themselves and, on a CPU, for the weights: the trainer's and the sampler's."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", machine.text("proc/meminfo"), re.M)
    if not found:
        return ok("memory", "not known on this system")
    ranks, available = machine.ranks or 1, int(found[1]) * 1024 / GIB
    needed = ranks * (0.7 if machine.kind == "cpu" else 2.0)  # measured for a CPU process, 0.65 GiB; guessed for others
    if machine.kind == "cpu" and machine.run is not None:
        needed += ranks * 2 * sum(p.stat().st_size for p in Path(machine.run.model.path).glob("*.safetensors")) / GIB
    if available < needed:
        todo = "fewer ranks, or a machine with more"
        return warn("memory", f"{available:.1f} GiB available, {needed:.1f} wanted by {ranks} ranks", todo)
    return ok("memory", f"{available:.1f} GiB available, {needed:.1f} wanted by {ranks} ranks")


# -------------------------------------------------------------------------------------------------------------- cuda


def check_cuda(machine: Machine) -> list[Finding]:
    """Driver, device files, visible devices, and a torch that is built for CUDA."""
    findings = []
    if not (driver := re.search(r"Kernel Module\s+(\S+)", machine.text("proc/driver/nvidia/version"))):
        todo = "install the driver; in a container: docker run --gpus all"
        findings.append(fail("driver", "no /proc/driver/nvidia/version", todo))
    nodes, shown = machine.device_nodes("nvidia"), machine.env.get("CUDA_VISIBLE_DEVICES")
    count = len(nodes) if shown is None else len([part for part in shown.split(",") if part.strip()])
    if count < (machine.ranks or 1):
        found = f"{len(nodes)} in /dev, {count} visible, {machine.ranks or 1} wanted"
        findings.append(fail("devices", found, "unset CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all"))
    version = machine.version("torch")
    if not version or "+cu" not in version:
        findings.append(fail("torch build", f"{version} is not for CUDA", "install torch for CUDA (pytorch.org)"))
    return findings or [ok("CUDA", f"driver {driver[1]}, {count} devices, torch {version}")]


def check_cuda_runtime(machine: Machine) -> list[Finding]:
    if error := machine.accelerator.get("error"):
        return [fail("CUDA", f"torch cannot open the devices: {error}", "nvidia-smi; a driver new enough for torch?")]
    memory = machine.accelerator["memory"]
    if len(memory) < (machine.ranks or 1):
        found = f"torch counts {len(memory)} devices, {machine.ranks or 1} wanted"
        return [fail("CUDA", found, "unset CUDA_VISIBLE_DEVICES; nvidia-smi")]
    return [ok("NCCL", machine.accelerator["nccl"]), *memory_findings(memory, "nvidia-smi shows whose process it is")]


# --------------------------------------------------------------------------------------------------- this very run


def check_model_files(machine: Machine) -> Finding:
    """Every weight file that the index names is there, and as long as its own header says."""
    folder = Path(machine.run.model.path)
    if machine.run.tiny_model is not None and not (folder / "config.json").exists():
        return ok("model", f"{folder} will be made")
    todo = f"download it again into {folder} (docs/npu.md); a broken download is resumed by the same command"
    if not (folder / "config.json").is_file():
        return fail("model", f"no config.json in {folder}", todo)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return fail("model", f"no tokenizer.json and no vocab.json in {folder}", todo)
    try:
        index = folder / "model.safetensors.index.json"
        names = sorted(set(read_object(index, ("weight_map",))["weight_map"].values())) if index.exists() else []
        files = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return fail("model", f"{index} cannot be read ({error})", todo)
    if not files:
        return fail("model", f"no *.safetensors in {folder}", todo)
    if broken := [f"{path.name} {fault}" for path in files if (fault := file_fault(path))]:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        return fail("model", f"{', '.join(broken[:3])}{more}, of {len(files)} files in {folder}", todo)
    size = sum(path.stat().st_size for path in files) / GIB
    return ok("model", f"{folder}: {len(files)} weight files, {size:.1f} GiB, all complete")


def file_fault(path: Path) -> str:
    """What is wrong with a safetensors file ("" if nothing): 8 bytes of length, that much JSON, then the tensors."""
    try:
        size = path.stat().st_size
        refuse_special(path, path.stat().st_mode)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 8 <= length + 8 <= size or length > SETTINGS_MIB * 2**20:
                return "is empty" if size == 0 else "is no safetensors file, or cut off"
            header = json.loads(file.read(length))
        ends = [int(t["data_offsets"][1]) for k, t in header.items() if k != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"cannot be read ({error})"
    return "" if size == expected else f"has {size} of {expected} bytes"


def check_data_files(machine: Machine) -> Finding:
    data = machine.run.data
    keys = ["train_path", "test_path"] if data.source == "gsm8k" else []
    keys += ["few_shot_path"] if data.few_shot_path else []
    for key in keys:
        path = Path(getattr(data, key))
        if not path.is_file() or path.stat().st_size == 0:
            todo = f"put GSM8K there, as .jsonl or .parquet (docs/npu.md), or data.{key}=FILE"
            return fail("data", f"data.{key}: {path} is {'empty' if path.is_file() else 'not there'}", todo)
    return ok("data", ", ".join(getattr(data, key) for key in keys) or "generated")


def lora_parameters(cfg: Config, arch: hf_config.Architecture) -> int:
    """Elements of all LoRA factors together: R x (inputs + outputs) for each pair."""
    rank, expert_rank = cfg.lora.rank, cfg.lora.expert_rank or cfg.lora.rank
    hidden, heads = arch.hidden_size, arch.num_heads * arch.head_dim

    def mlp(width: int, rank: int) -> dict[str, int]:
        return {"linear_fc1": rank * (hidden + 2 * width), "linear_fc2": rank * (width + hidden)}

    total = 0
    for is_moe in arch.moe_layers:
        sizes = {"linear_qkv": rank * (hidden + arch.qkv_size), "linear_proj": rank * (heads + hidden)}
        if is_moe:
            sizes["router"] = rank * (hidden + arch.num_experts)
            shared = mlp(arch.shared_expert_ffn_size, rank) if arch.shared_expert_ffn_size else {}
            for key, size in mlp(arch.expert_ffn_size, expert_rank).items():
                sizes[key] = arch.num_experts * size + shared.get(key, 0)
        else:
            sizes |= mlp(arch.dense_ffn_size, rank)
        total += sum(sizes[target] for target in cfg.lora.targets)
    return total


def check_disk(machine: Machine) -> Finding:
    """Room for the checkpoints that are kept and the one that is being written: fp32 factors and two moments."""
    cfg, folder = machine.run, Path(machine.run.train.out_dir)
    free = machine.free_bytes(folder) / GIB
    try:
        one = 12 * lora_parameters(cfg, hf_config.read(cfg.model.path)) / GIB
        size = f"of {one:.1f}"
    except InputError:  # the model's own check says what is wrong with it; a tiny model is yet to be made
        one, size = 0.0, "of a size that the model will tell"
    needed = one * (cfg.train.keep_last + 1) + 0.5  # 0.5: logs, completions, evaluations
    found = f"{free:.1f} GiB free for {folder}, {needed:.1f} needed: {cfg.train.keep_last + 1} checkpoints {size}"
    if free < needed:
        return fail("disk", found, "train.out_dir=<a larger disk>, or train.keep_last=1")
    return ok("disk", found)


def check_git(machine: Machine) -> Finding:
    code, output = machine.command(["git", "-C", str(Path(__file__).resolve().parent), "status", "--porcelain"])
    if code:
        return warn("git", "no git checkout: the run's record cannot name a commit", "git clone the repository")
    if changed := output.splitlines():
        found = f"{len(changed)} changed or new files, e.g. {changed[0][3:]}"
        return warn("git", found, "git commit: the run's record keeps tracked changes only as a patch")
    return ok("git", "clean")


# --------------------------------------------------------------------------------------------------------- the doctor

Check = Callable[[Machine], Finding | list[Finding]]
SYSTEM: dict[Check, bool] = {check_open_files: True, check_shared_memory: False, check_ram: False}
CUDA: dict[Check, bool] = {check_cuda: True, check_cuda_runtime: False, doctor_npu.check_torch_build: True}
CPU: dict[Check, bool] = {doctor_npu.check_autoload: False, check_shared_memory: False, check_ram: False}
RUN: dict[Check, bool] = {check_model_files: False, check_data_files: False, check_disk: False, check_git: False}


def checks(machine: Machine, quick: bool = False) -> Iterator[Check]:
    """Those that apply to this kind of machine and, without a configuration, need none."""
    tables = {
        "npu": [doctor_npu.CHECKS, doctor_variables.CHECKS, SYSTEM],
        "cuda": [CUDA, SYSTEM],
        "cpu": [CPU],
    }[machine.kind]
    for table in tables + ([RUN] if machine.run is not None else []):
        yield from (check for check, is_quick in table.items() if is_quick or not quick)


def examine(machine: Machine, quick: bool = False) -> list[Finding]:
    """What every check that applies says, in their order."""
    findings: list[Finding] = []
    for check in checks(machine, quick):
        found = check(machine)
        findings += found if isinstance(found, list) else [found]
    return findings


def quick(cfg: Config) -> None:
    """At every start of a run, once a machine: print what is not ok and can be seen in milliseconds."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for finding in examine(Machine(run=cfg, ranks=ranks), quick=True):
        if finding.level != "ok":
            print(finding, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Examine this machine, for the run of a configuration if one is named; --ranks: processes on this machine."""
    parser = argparse.ArgumentParser(prog="preflight.py --doctor", description=__doc__.split("\n\n")[0])
    parser.add_argument("config", nargs="?", help="YAML file of the run that is meant to go on this machine")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--ranks", type=int, help="processes on this machine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_intermixed_args(arguments)
    config, overrides, ranks = args.config, args.overrides, args.ranks
    try:
        cfg = load_config(config, overrides) if config else None
        if ranks is not None and not 1 <= ranks <= MOST_RANKS:
            raise InputError(f"--ranks: found {ranks}; needed: a whole number from 1 to {MOST_RANKS}")
    except BAD_INPUT as error:
        return refused(error)
    machine = Machine(run=cfg, ranks=ranks)
    findings = examine(machine)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        count = {level: sum(finding.level == level for finding in findings) for level in ("ok", "warn", "fail")}
        print("\n".join(map(str, findings)))
        print(f"{machine.kind}: {', '.join(f'{number} {level}' for level, number in count.items())}")
    return int(any(finding.level == "fail" for finding in findings))
