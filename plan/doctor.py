"""Finds what is wrong with this machine before a run starts: CANN, versions, devices, ports, limits, model, data, disk.

    python preflight.py --doctor [CONFIG] [section.key=value ...] [--ranks N] [--json]

Each finding is one line: ok, warn or fail; what was found; what to do. Exit code 0: no fail. 1: a fail. 2: the
configuration cannot be used. doctor_npu.py and doctor_variables.py hold the checks of an NPU machine. Nothing here
imports torch.
"""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import run_record
from config import command, command_line, load_config
from inputs import environment, hf_config
from inputs.files import (
    MOST_RANKS,
    SETTINGS_MIB,
    InputError,
    first_three,
    opened,
    read_object,
    variable,
)
from knobs import Config
from plan import doctor_npu, doctor_variables
from plan.machine import Check, Finding, Machine, every, first, memory_findings
from plan.memory import GIB
from plan.parameters import checkpoint_bytes

FILES_WANTED = 32768  # open at once: sockets of the ranks, weight files, shared memory


# ------------------------------------------------------------------------------------------------------------ system


def check_open_files(machine: Machine) -> list[Finding]:
    said = f"ulimit -n is {machine.open_files}"
    return first("open files", said, (machine.open_files < FILES_WANTED, "warn", said, f"ulimit -n {FILES_WANTED}"))


def check_shared_memory(machine: Machine) -> list[Finding]:
    """The processes of one machine exchange tensors in /dev/shm. A container has only 64 MiB there by default."""
    shm, todo = machine.root / "dev" / "shm", "docker run --shm-size=64g"
    exists, gib = shm.is_dir(), machine.free_bytes(shm) / GIB
    return first(
        "/dev/shm",
        f"{gib:.1f} GiB free" if exists else "this system has none and needs none",
        (not exists and (machine.root / "proc").is_dir(), "warn", "not there", todo),
        (exists and gib < 1, "warn", f"{gib * 1024:.0f} MiB free", todo),
    )


def check_ram(machine: Machine) -> list[Finding]:
    """Main memory for the processes and, on a CPU, for the weights of the trainer and of the sampler."""
    line = re.search(r"^MemAvailable:\s+(\d+) kB", machine.text("proc/meminfo"), re.M)
    if not line:
        return first("memory", "not known on this system")
    ranks, available = machine.ranks or 1, int(line[1]) * 1024 / GIB
    needed = ranks * (0.7 if machine.kind == "cpu" else 2.0)  # a CPU process had 0.65 GiB; the others are a guess
    if machine.kind == "cpu" and machine.run is not None:
        needed += ranks * 2 * sum(p.stat().st_size for p in Path(machine.run.model.path).glob("*.safetensors")) / GIB
    said = f"{available:.1f} GiB available, {needed:.1f} wanted by {ranks} ranks"
    return first("memory", said, (available < needed, "warn", said, "fewer ranks, or a machine with more"))


LISTS = {  # kind of machine -> how to install what the code imports
    "npu": "pip install --no-deps -r requirements/npu-image.txt in vllm-ascend's image, requirements/npu.txt elsewhere "
    "(docs/npu.md)",
    "cuda": "pip install --no-deps -r requirements/cuda.txt",
}


def check_packages(machine: Machine) -> list[Finding]:
    """The other packages that the code of this repository imports."""
    missing = [name for name in environment.OUR_PACKAGES if machine.version(name) is None]
    return first(
        "packages",
        f"{len(environment.OUR_PACKAGES)} that the code imports are installed",
        (missing, "fail", f"not installed: {', '.join(missing)}", LISTS[machine.kind]),
    )


# -------------------------------------------------------------------------------------------------------------- cuda


def check_cuda(machine: Machine) -> list[Finding]:
    """The driver, and as many visible devices as ranks. Some sandboxes hide the driver's file from a working device."""
    driver = re.search(r"Kernel Module\s+(\S+)", machine.text("proc/driver/nvidia/version"))
    nodes, shown = machine.device_nodes("nvidia"), machine.env.get("CUDA_VISIBLE_DEVICES")
    count = len(nodes) if shown is None else len([part for part in shown.split(",") if part.strip()])
    wanted, container = machine.ranks or 1, "in a container: docker run --gpus all"
    said = f"{len(nodes)} in /dev, {count} visible, {wanted} wanted"
    return [
        *first(
            "driver",
            driver[1] if driver else "",
            (not driver, "warn", "unknown: no /proc/driver/nvidia/version", f"nvidia-smi; {container}"),
        ),
        *first("devices", said, (count < wanted, "fail", said, f"unset CUDA_VISIBLE_DEVICES; {container}")),
    ]


def check_cuda_versions(machine: Machine) -> list[Finding]:
    """Compare with the versions of requirements/cuda.txt."""
    installed = {name: machine.version(name) for name in environment.CUDA_SET}
    said = ", ".join(f"{name} {version}" for name, version in installed.items())
    rows = doctor_npu.version_rows(machine, environment.CUDA_SET, installed, "requirements/cuda.txt")
    return every("versions", said, *rows)


def check_cuda_runtime(machine: Machine) -> list[Finding]:
    """torch counts the same devices, and every device has free memory."""
    error, memory = machine.accelerator.get("error"), machine.accelerator.get("memory", [])
    wanted = machine.ranks or 1
    count = f"torch counts {len(memory)} devices, {wanted} wanted"
    return first(
        "CUDA",
        f"NCCL {machine.accelerator.get('nccl')}, {count}",
        (error, "fail", f"torch cannot open the devices: {error}", "nvidia-smi; a driver new enough for torch?"),
        (len(memory) < wanted, "fail", count, "unset CUDA_VISIBLE_DEVICES; nvidia-smi"),
    ) + (memory_findings(memory, "nvidia-smi shows whose process it is") if memory else [])


# ---------------------------------------------------------------------------------------------------- files of the run


def check_model_files(machine: Machine) -> list[Finding]:
    """Every weight file that the index names exists, and has the length that its header gives."""
    folder, wrong, files = Path(machine.run.model.path), "", []
    settings, index = folder / "config.json", folder / "model.safetensors.index.json"
    if machine.run.tiny_model is not None and not settings.exists():
        return first("model", f"{folder} will be made")
    try:
        names = sorted(set(read_object(index, ("weight_map",))["weight_map"].values())) if index.exists() else []
        files = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        wrong = f"{index} cannot be read ({error})"
    broken = [f"{path.name} {fault}" for path in files if (fault := file_fault(path))]
    size = sum(path.stat().st_size for path in files if not broken) / GIB
    tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    todo = f"download it again into {folder} (docs/npu.md); a broken download is resumed by the same command"
    return first(
        "model",
        f"{folder}: {len(files)} weight files, {size:.1f} GiB, all complete",
        (not settings.is_file(), "fail", f"no config.json in {folder}", todo),
        (not tokenizer, "fail", f"no tokenizer.json and no vocab.json in {folder}", todo),
        (wrong, "fail", wrong, todo),
        (not files, "fail", f"no *.safetensors in {folder}", todo),
        (broken, "fail", f"{first_three(broken)}, of {len(files)} files in {folder}", todo),
    )


def file_fault(path: Path) -> str:
    """What is wrong with a safetensors file; "" if nothing is.

    Such a file has 8 bytes that give the length of a JSON header, the header, and the tensors.
    """
    try:
        size = path.stat().st_size
        with opened(path) as file:
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


def check_data_files(machine: Machine) -> list[Finding]:
    paths = {key: Path(path) for key, path in run_record.data_files(machine.run).items()}
    return every(
        "data",
        ", ".join(map(str, paths.values())) or "generated",
        *(
            (
                not path.is_file() or path.stat().st_size == 0,
                "fail",
                f"{key}: {path} is {'empty' if path.is_file() else 'not there'}",
                f"put the questions there (GSM8K: docs/npu.md), or {key}=FILE",
            )
            for key, path in paths.items()
        ),
    )


def check_disk(machine: Machine) -> list[Finding]:
    """Disk space for the checkpoints that are kept and the one being written."""
    cfg, folder = machine.run, Path(machine.run.train.out_dir)
    free = machine.free_bytes(folder) / GIB
    try:
        one = checkpoint_bytes(cfg, hf_config.read(cfg.model.path)) / GIB
        size = f"of {one:.1f}"
    except InputError:  # check_model_files reports it; a tiny model does not exist before the run
        one, size = 0.0, "of unknown size, because the model cannot be read"
    needed = one * (cfg.train.keep_last + 1) + 0.5  # 0.5: logs, completions, evaluations
    space = f"{free:.1f} GiB free for {folder}, {needed:.1f} needed: {cfg.train.keep_last + 1} checkpoints {size}"
    return first("disk", space, (free < needed, "fail", space, "train.out_dir=<a larger disk>, or train.keep_last=1"))


def check_git(machine: Machine) -> list[Finding]:
    folder = str(Path(__file__).resolve().parent)
    code, output = machine.command(["git", "-c", "safe.directory=*", "-C", folder, "status", "--porcelain"])
    changed = output.splitlines() or [""]
    return first(
        "git",
        "clean",
        (code, "warn", "no git checkout: the run's record cannot name a commit", "git clone the repository"),
        (
            output,
            "warn",
            f"{len(changed)} changed or new files, e.g. {changed[0][3:]}",
            "git commit: the run's record keeps tracked changes only as a patch",
        ),
    )


# ---------------------------------------------------------------------------------------------------------- the checks

CHECKS: dict[str, tuple[Check, ...]] = {  # kind of machine -> its checks, in order
    "npu": (
        *doctor_npu.CHECKS, check_packages, *doctor_variables.CHECKS, check_open_files, check_shared_memory, check_ram,
    ),
    "cuda": (
        check_cuda, check_cuda_runtime, doctor_npu.check_torch_build, check_cuda_versions, check_packages,
        check_open_files, check_shared_memory, check_ram,
    ),
    "cpu": (doctor_npu.check_autoload, check_shared_memory, check_ram),
}  # fmt: skip
RUN: tuple[Check, ...] = (check_model_files, check_data_files, check_disk, check_git)  # with a configuration
QUICK: dict[str, tuple[Check, ...]] = {  # those that start no command and load no library
    "npu": (*doctor_npu.QUICK, check_packages, *doctor_variables.QUICK, check_open_files),
    "cuda": (check_cuda, doctor_npu.check_torch_build, check_cuda_versions, check_packages, check_open_files),
    "cpu": (),
}


def examine(machine: Machine) -> list[Finding]:
    """The findings of all checks for this kind of machine, in order."""
    checks = CHECKS[machine.kind] + RUN * (machine.run is not None)
    return [finding for check in checks for finding in check(machine)]


def quick(cfg: Config) -> None:
    """Print every finding of the quick checks that is not ok; on one process of each machine, at the start of a run."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        machine = Machine(run=cfg, ranks=variable("LOCAL_WORLD_SIZE", 1, 1, MOST_RANKS))
        for check in QUICK[machine.kind]:
            for finding in check(machine):
                if finding.level != "ok":
                    print(finding, file=sys.stderr, flush=True)


@command
def main(arguments: list[str]) -> int:
    """Examine this machine, and if a configuration is named, for its run."""
    parser = command_line(
        "preflight.py --doctor", __doc__, nargs="?", help="YAML file of the run that is meant to go on this machine"
    )
    parser.add_argument("--ranks", type=int, help="processes on this machine")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_intermixed_args(arguments)
    cfg = load_config(args.config, args.overrides) if args.config else None
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        raise InputError(f"--ranks: found {args.ranks}; needed: a whole number from 1 to {MOST_RANKS}")
    machine = Machine(run=cfg, ranks=args.ranks)
    findings = examine(machine)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(map(str, findings)))
        levels = [finding.level for finding in findings]
        print(f"{machine.kind}: {', '.join(f'{levels.count(level)} {level}' for level in ('ok', 'warn', 'fail'))}")
    return int(any(finding.level == "fail" for finding in findings))
