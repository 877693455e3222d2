"""Finds what is wrong with this machine before a run starts: CANN, versions, devices, ports, variables, memory, disk.

    python preflight.py --doctor [CONFIG] [section.key=value ...] [--ranks N] [--json]

Each line of the output begins with ok, warn or fail, and says what was found. After warn or fail, it also says what is
needed and what to do. The exit code is 0 if no line begins with fail, 1 if a line does, and 2 if the configuration
cannot be used. The tables QUICK and SLOW have a row for each check. Their rules come from the documentation, sources
and issue trackers of CANN, torch_npu, MindSpeed and vllm-ascend. The tests plant faults; nothing here has been run on
an NPU yet. Nothing here imports torch: a separate process queries the devices.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import not_
from pathlib import Path

from facts import variables
from facts.exits import InputError
from inputs import hf_config
from inputs.config import command, command_line, load_config
from inputs.files import MOST_RANKS, first_three, variable
from knobs import Config
from plan import grid
from plan.memory import GIB
from plan.parameters import checkpoint_bytes

DIES = 16  # on a 910C server: 8 cards with two dies each; a die is a device and has one rank
# A program that prints the free and total bytes of every visible device. argv[1] is npu or cuda.
DEVICE_MEMORY = """
import importlib, json, sys, torch
if sys.argv[1] == "npu":
    importlib.import_module("torch_npu")
module = getattr(torch, sys.argv[1])
print(json.dumps([module.mem_get_info(i) for i in range(module.device_count())]))
"""

# ---------------------------------------------------------------------------------------------------------- the machine


@dataclass
class Machine:
    """This machine and the run that is planned on it.

    ``run`` is the configuration of the run, and ``ranks`` the number of its processes on this machine. The method
    ``version`` and those after it query the system. Tests replace these methods to describe a machine of their choice.
    """

    run: Config | None = None
    ranks: int | None = None
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")  # the folder that contains dev, proc and usr/local

    @property
    def kind(self) -> str:
        """The kind of device: npu, cuda or cpu.

        It is the configured device. Without a configuration, or with `device: auto`, it is npu if ASCEND_HOME_PATH is
        set, and otherwise the kind whose device files are in /dev. If there are no such files, it is cpu.
        """
        device = self.run.device if self.run else "auto"
        if device == "auto" and "ASCEND_HOME_PATH" in self.env:
            return "npu"
        return grid.device_of(device, self.root)

    @property
    def dies(self) -> list[int]:
        return grid.device_files("davinci", self.root)

    @property
    def words(self) -> set[str]:
        """The words that describe this machine and its run, for comparison with Row.device.

        They are the kind of device (npu, cuda or cpu), and those of the words accelerator, machines, run, vllm and
        graphs that apply.
        """
        run = self.run
        vllm = run is not None and "vllm" in run.rollout.kind.packages
        facts = {
            "accelerator": self.kind != "cpu",
            "machines": self.number("NODES", "1") > 1,
            "run": run is not None,
            "vllm": vllm,
            "graphs": vllm and run is not None and not run.rollout.enforce_eager,
        }
        return {self.kind} | {word for word, is_true in facts.items() if is_true}

    @property
    def devices_wanted(self) -> int:
        """The number of devices that must be present: one per rank.

        Without ``ranks``, the number is 16 on a machine with more than half of a server's 16 dies, and otherwise 1.
        """
        return self.ranks or (DIES if len(self.dies) > DIES // 2 else 1)

    def text(self, path: str) -> str:
        """Return the content of a system file such as "proc/meminfo", or "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def number(self, name: str, unset: str) -> int:
        """Return the whole number in the environment variable ``name``, or in ``unset`` if the variable is not set.

        If the text is not a whole number, return -1.
        """
        text = self.env.get(name, unset).strip()
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1

    def version(self, name: str) -> str | None:
        """Return the version of a package, of Python or of CANN.

        Return None if it is not installed, and "?" if Python finds a folder with its name but no version. For torch,
        return the version in torch/version.py. In that file, a build for CUDA has a suffix such as "+cu128", which the
        wheel's version may lack.
        """
        if name == "Python":
            return platform.python_version()
        if name == "CANN":
            return self.cann_version()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "?" if importlib.util.find_spec(name.replace("-", "_")) else None
        build = (
            re.search(r"__version__ = '([^']+)'", self.package_file(name, "version.py")) if name == "torch" else None
        )
        return build[1] if build else version

    def cann_version(self) -> str | None:
        home = self.root / self.env.get("ASCEND_HOME_PATH", "no CANN").lstrip("/")
        texts = [path.read_text(errors="replace") for path in home.glob("*-linux/ascend_toolkit_install.info")]
        version = re.search(r"^version=(\S+)", "".join(texts), re.M | re.I)
        return version[1] if version else None

    def package_file(self, package: str, name: str) -> str:
        """Return the content of the file ``name`` of an installed package, or "" if there is no such file.

        The package is not imported.
        """
        spec = importlib.util.find_spec(package)
        folders = spec.submodule_search_locations if spec else None
        paths = [Path(folder, name) for folder in folders or ()]
        return "".join(path.read_text(errors="replace") for path in paths if path.is_file())

    def command(self, words: Sequence[str], seconds: float = 120) -> tuple[int, str]:
        """Run a program and return its exit code and output.

        The exit code is 127 if there is no such program, and 124 if the program runs for more than ``seconds``.
        """
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, errors="replace")
        except FileNotFoundError as error:
            return 127, str(error)
        except subprocess.TimeoutExpired:
            return 124, f"no answer in {seconds:.0f} s"
        return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def can_listen(self, address: str, port: int) -> bool:
        """Return whether a server could listen at this address and port now.

        ``address`` is an address of this machine, or "" for all of them. With ``port`` 0, the system chooses a port.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError, OverflowError):
            socket.create_server((address, port), family=family).close()  # TIME_WAIT after a run counts as free
            return True
        return False

    def free_bytes(self, folder: Path) -> int:
        """Return the free bytes of the disk that contains ``folder``, or will contain it if it does not exist yet."""
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free

    def open_files(self) -> int:
        """Return the number of files that a process may have open at the same time."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def last_line(output: str) -> str:
    """Return the last line of a program's output. In a traceback, this line names the error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


# -------------------------------------------------------- probes: each returns whether all is right, and what was found

Found = tuple[bool, str]
Probe = Callable[[Machine], Found]


def files(paths: Sequence[str], machine: Machine) -> Found:
    missing = [f"/{path}" for path in paths if not (machine.root / path).exists()]
    return not missing, f"missing: {', '.join(missing)}" if missing else "present"


def setting(name: str, is_right: Callable[[str], bool], machine: Machine) -> Found:
    """Check the value of an environment variable with ``is_right``, which gets "" if the variable is not set."""
    value = machine.env.get(name, "")
    return is_right(value), value or "not set"


def seconds(name: str, least: int, most: int, machine: Machine) -> Found:
    """Check that the time-out in the variable ``name`` is between ``least`` and ``most`` seconds.

    launch/npu_env.sh sets this variable if the user does not.
    """
    unset = variables.when_unset(name)
    return least <= machine.number(name, unset) <= most, machine.env.get(name, f"not set, so {unset}")


def installed(name: str, is_right: Callable[[str], bool], machine: Machine) -> Found:
    """Check a package's version with ``is_right``, which gets "" if the package is not installed."""
    version = machine.version(name) or ""
    return is_right(version), version or "not installed"


def python(code: str, machine: Machine) -> Found:
    """Check that Python runs ``code`` without an error in a separate process."""
    exit_code, output = machine.command([sys.executable, "-c", code])
    return exit_code == 0, last_line(output) if exit_code else "works"


# ---------------------------------------------------------------------------------------------------- probes: software


def cann_home(machine: Machine) -> Found:
    home = machine.env.get("ASCEND_HOME_PATH", "")
    return home != "" and (machine.root / home.lstrip("/")).is_dir(), f"ASCEND_HOME_PATH is {home or 'not set'}"


def version_set(machine: Machine) -> dict[str, tuple[str, ...]]:
    """Return a set of package versions that belong together.

    On a GPU this is CUDA_SET. Otherwise, it is the first of VERSION_SETS that has the installed version of vLLM, or the
    very first if none has it.
    """
    if machine.kind == "cuda":
        return variables.CUDA_SET
    vllm = machine.version("vllm") or ""
    fitting = [one for one in variables.VERSION_SETS if variables.matches(vllm, one["vllm"])]
    return (fitting or list(variables.VERSION_SETS))[0]


def packages(machine: Machine) -> Found:
    optional = {"CANN", "mindspeed"}  # without MindSpeed, hardware/device.py adapts torch itself
    if "vllm" not in machine.words:
        optional |= {"vllm", "vllm-ascend"}
    names = [name for name in (*version_set(machine), *variables.OUR_PACKAGES) if name not in optional]
    missing = [name for name in names if machine.version(name) is None]
    return not missing, f"not installed: {', '.join(missing)}" if missing else f"all {len(names)} are installed"


def same_release(plugin: str, base: str, machine: Machine) -> Found:
    """Check that a plugin has the same release number as the package that it extends.

    For example, 2.10.0.post4 belongs to 2.10.0+cpu.
    """
    versions = [machine.version(name) or "" for name in (plugin, base)]
    releases = {tuple(re.findall(r"\d+", version)[:3]) for version in versions}
    return len(releases) == 1, f"{plugin} {versions[0]} with {base} {versions[1]}"


def versions(machine: Machine) -> Found:
    wanted = version_set(machine)
    here = {name: machine.version(name) or "not found" for name in wanted}
    other = [name for name in wanted if not variables.matches(here[name], wanted[name])]
    wrong = [f"{name} {here[name]} instead of {' or '.join(wanted[name])}" for name in other]
    return not other, ", ".join(wrong or [f"{name} {version}" for name, version in here.items()])


def torch_npu_not_loaded(machine: Machine) -> Found:
    """Check that torch can be imported.

    torch imports every installed backend by itself, so torch_npu without CANN makes `import torch` fail.
    """
    version = machine.version("torch-npu")
    can_load = "ASCEND_HOME_PATH" in machine.env or machine.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
    return can_load or version is None, f"torch_npu {version} without CANN" if version else "not installed"


def chip(machine: Machine) -> Found:
    """Check that vllm-ascend is built for this machine's kind of chip.

    On another kind of chip, the engine of vllm-ascend stops with an assertion.
    """
    built = variables.built_for(machine.package_file("vllm_ascend", "_build_info.py"))
    if built is None:
        is_there = machine.version("vllm-ascend") is not None
        why = "does not say for which chip it is built" if is_there else "is not installed"
        return True, f"not known: vllm-ascend {why}"
    names = re.findall(r"^\|\s*\d+\s+(\w*\d{3}\S*)\s*\|", machine.command(["npu-smi", "info"])[1], re.M)
    kinds = {variables.chip_kind(name) for name in names} - {None}
    chips = [f"{kind} (image {variables.VLLM_ASCEND_IMAGES[kind]})" for kind in kinds if kind]
    return kinds <= {built}, f"vllm-ascend is built for {built}, npu-smi lists {', '.join(chips) or 'no known chip'}"


# ----------------------------------------------------------------------------------------------------- probes: devices


def visible_dies(machine: Machine) -> list[str]:
    text = machine.env.get("ASCEND_RT_VISIBLE_DEVICES")
    return [str(die) for die in machine.dies] if text is None else text.split(",")


def dies_present(machine: Machine) -> Found:
    dies = machine.dies
    missing = [f"davinci{die}" for die in range(machine.devices_wanted) if die not in dies]
    return len(dies) >= machine.devices_wanted, f"{len(dies)} dies in /dev; missing: {', '.join(missing)}"


def dies_visible(machine: Machine) -> Found:
    visible = visible_dies(machine)
    in_order = [str(die) for die in machine.dies if str(die) in visible]
    return visible == in_order and len(visible) >= machine.devices_wanted, f"visible: {','.join(visible)}"


def dies_are_neighbours(machine: Machine) -> Found:
    dies = [int(die) for die in visible_dies(machine)]
    return dies[-1] - dies[0] < len(dies), f"visible: {','.join(map(str, dies))}"


def devices(machine: Machine) -> Found:
    """Check that torch finds enough devices, and that other programs use at most 4 GiB of each device."""
    code, output = machine.command([sys.executable, "-c", DEVICE_MEMORY, machine.kind])
    if code:
        return False, f"torch cannot open them: {last_line(output)}"
    memory = json.loads(output.splitlines()[-1])  # libraries may print other lines before
    used = [(total - free) / GIB for free, total in memory]
    taken = [f"{gib:.0f} GiB of device {number}" for number, gib in enumerate(used) if gib > 4]
    found = f"torch counts {len(memory)}; in use by others: {', '.join(taken) or 'nothing'}"
    return len(memory) >= machine.devices_wanted and not taken, found


# ----------------------------------------------------------------------------------------------------- probes: network


def port_numbers(text: str) -> list[int]:
    """Return all numbers in a list of ranges: 50000-50002,50010 -> [50000, 50001, 50002, 50010]."""
    numbers: list[int] = []
    for first, last in re.findall(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text):
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def hccl_ports(machine: Machine) -> list[int]:
    return port_numbers(machine.env.get("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60031"))


def ports_free(machine: Machine) -> Found:
    busy = [str(port) for port in hccl_ports(machine) if not machine.can_listen("", port)]
    return not busy, f"in use: {first_three(busy)}" if busy else "free"


def ports_reserved(machine: Machine) -> Found:
    outgoing = port_numbers("-".join(machine.text("proc/sys/net/ipv4/ip_local_port_range").split()))
    reserved = port_numbers(machine.text("proc/sys/net/ipv4/ip_local_reserved_ports"))
    lent = [str(port) for port in hccl_ports(machine) if port in outgoing and port not in reserved]
    return not lent, f"free, but the system gives {first_three(lent)} to outgoing connections" if lent else "free"


def own_address(machine: Machine) -> Found:
    address = machine.env.get("HCCL_IF_IP", "")
    return address == "" or machine.can_listen(address, 0), address or "not set"


def interface(name: str, machine: Machine) -> Found:
    """Check that this machine has a network interface that the variable ``name`` allows.

    HCCL accepts every interface whose name begins with a given name. If the variable's value begins with "=", and
    always for gloo, the names must be equal. If the value begins with "^", the names are excluded, and the check
    passes. The check also passes if the variable is not set.
    """
    text = machine.env.get(name, "")
    names = tuple(text.removeprefix("=").split(","))
    is_whole = text.startswith("=") or name == "GLOO_SOCKET_IFNAME"
    there = sorted(path.name for path in (machine.root / "sys/class/net").glob("*"))
    fitting = [one for one in there if one in names or (not is_whole and one.startswith(names))]
    is_right = bool(fitting) or text.startswith("^") or text == ""
    return is_right, f"{text or 'not set'}; this machine has {', '.join(there)}"


def order_of_timeouts(machine: Machine) -> Found:
    assert machine.run is not None
    names = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")
    hccl = max(machine.number(name, variables.when_unset(name)) for name in names)
    stall, torch = machine.run.train.stall_seconds, machine.run.parallel.timeout_seconds
    return max(hccl, stall) < torch, f"HCCL {hccl} s, train.stall_seconds {stall}, parallel.timeout_seconds {torch}"


def aiv_timeout(machine: Machine) -> Found:
    is_aiv = machine.env.get("HCCL_OP_EXPANSION_MODE") == "AIV"
    limit = machine.number("HCCL_EXEC_TIMEOUT", "0")
    return not is_aiv or limit <= 1091, f"AIV with HCCL_EXEC_TIMEOUT {limit}" if is_aiv else "not AIV"


# --------------------------------------------------------------------------------------------------- probes: variables


def one_allocator(machine: Machine) -> Found:
    names = [name for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if machine.env.get(name)]
    return len(names) < 2, " and ".join(names) or "not set"


def allocator_of_vllm(machine: Machine) -> Found:
    """Check that PYTORCH_ALLOC_CONF is not set if vLLM is 0.23.

    vllm-ascend 0.23 (platform.py) always sets torch_npu's own variable, PYTORCH_NPU_ALLOC_CONF, for its processes.
    torch_npu refuses both variables together.
    """
    text = machine.env.get("PYTORCH_ALLOC_CONF", "")
    is_old = variables.matches(machine.version("vllm") or "", ("0.23",))
    return not (text and is_old), f"PYTORCH_ALLOC_CONF={text}" if text else "not set"


def no_expandable_segments(machine: Machine) -> Found:
    text = machine.env.get("PYTORCH_NPU_ALLOC_CONF", "") + machine.env.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" not in text.lower(), text or "torch_npu's own settings"


def vllm_variables(machine: Machine) -> Found:
    names = variables.from_a_launcher(machine.env)
    names += [one.name for one in variables.switched_on(machine.env)]
    return not names, ", ".join(f"{name}={machine.env[name]}" for name in names) or "none is set"


# --------------------------------------------------------------------------------------------- probes: memory and disk


def open_files(machine: Machine) -> Found:
    return machine.open_files() >= 32768, f"ulimit -n is {machine.open_files()}"


def shared_memory(machine: Machine) -> Found:
    """Check that /dev/shm has 1 GiB free, because the processes of a machine exchange tensors there.

    By default, a container has only 64 MiB there.
    """
    folder = machine.root / "dev" / "shm"
    free = machine.free_bytes(folder) if folder.is_dir() else 0
    is_linux = (machine.root / "proc").is_dir()
    return free >= GIB or not is_linux, f"{free / 2**20:.0f} MiB free"


def main_memory(machine: Machine) -> Found:
    available = re.search(r"^MemAvailable:\s+(\d+) kB", machine.text("proc/meminfo"), re.M)
    if not available:
        return True, "not known on this system"
    gib = int(available[1]) * 1024 / GIB
    needed = (machine.ranks or 1) * (0.7 if machine.kind == "cpu" else 2)  # a CPU process used 0.65; 2 is a guess
    saved = 0.0
    if machine.run:
        with contextlib.suppress(InputError):  # the plan refuses the model
            saved = checkpoint_gib(machine.run)  # rank 0 has all of it while it saves
    return gib >= needed + saved, f"{gib:.1f} GiB available, processes and a checkpoint need {needed + saved:.1f}"


def checkpoint_gib(cfg: Config) -> float:
    """Return the size of a checkpoint in GiB. Raises InputError for a model that the plan refuses."""
    arch, _ = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)
    return checkpoint_bytes(arch, cfg.lora, cfg.rollout.staleness) / GIB


def disk(machine: Machine) -> Found:
    """Check the disk space for the checkpoints that are kept, a new checkpoint, and 0.5 GiB of logs and completions."""
    cfg = machine.run
    assert cfg is not None
    try:
        one = checkpoint_gib(cfg)
    except InputError as error:
        return True, f"not known without the model: {error}"  # the plan refuses it
    needed = one * (cfg.train.keep_last + 1) + 0.5
    free = machine.free_bytes(Path(cfg.train.out_dir)) / GIB
    return free >= needed, f"{free:.1f} GiB free for {cfg.train.out_dir}, checkpoints and logs need {needed:.1f}"


# ---------------------------------------------------------------------------------------------------------- the tables


@dataclass(frozen=True)
class Finding:
    """One line of the output: ``level`` (ok, warn or fail), the thing examined, its state, and the remedy."""

    level: str
    what: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.level:4}  {self.what}: {self.found}" + (f"; {self.todo}" if self.todo else "")


@dataclass(frozen=True)
class Row:
    """A check for machines to which all words of ``device`` apply.

    If the check does not pass, its line begins with ``level``, which is warn or fail. Rows with the same ``what`` share
    one line of the output. Each of these rows is checked only if the rows before it passed.
    """

    device: str
    what: str
    probe: Probe
    needed: str
    level: str
    todo: str

    def finding(self, machine: Machine) -> Finding:
        is_right, found = self.probe(machine)
        if is_right:
            return Finding("ok", self.what, found)
        return Finding(self.level, self.what, f"{found}; needed: {self.needed}", self.todo)


SOURCE = (
    "source /usr/local/Ascend/cann/set_env.sh (before CANN 8.5: ascend-toolkit/set_env.sh) && "
    "source /usr/local/Ascend/nnal/atb/set_env.sh, or start CANN's container (docs/npu.md)"
)
NPU = "pip install --no-deps -r requirements/npu-image.txt in vllm-ascend's image, requirements/npu.txt elsewhere"
CUDA = "pip install --no-deps -r requirements/cuda.txt"
REBUILD = "docker pull quay.io/ascend/vllm-ascend:<image>, or build it here with COMPILE_CUSTOM_KERNELS=1 (docs/npu.md)"
INTERFACE = "INTERFACE=<the name on each machine> bash run_2node.sh"
NO_EXPANDABLE = "unset PYTORCH_NPU_ALLOC_CONF PYTORCH_ALLOC_CONF"
CONNECT, EXECUTE = "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"
UNSET_VLLM = "unset ${!VLLM_DP_*} " + " ".join(one.name for one in variables.MUST_BE_OFF)

# These checks are also made at the start of a run. They read variables, versions and files, and start no program.
QUICK = (
    Row(
        "npu",
        "driver",
        partial(files, ["usr/local/Ascend/driver/version.info"]),
        "the host's driver",
        "fail",
        "on the host: npu-smi info; in a container: -v /usr/local/Ascend/driver:/usr/local/Ascend/driver",
    ),
    Row(
        "cuda",
        "driver",
        partial(files, ["proc/driver/nvidia/version"]),
        "the host's driver, which a sandbox may hide",
        "warn",
        "nvidia-smi; in a container: docker run --gpus all",
    ),
    Row("npu", "CANN", cann_home, "the folder of CANN", "fail", SOURCE),
    Row(
        "npu",
        "torch",
        partial(installed, "torch", lambda version: "+cu" not in version),
        "a build without CUDA: torch_npu refuses a second accelerator",
        "fail",
        "pip install torch==<the same>+cpu --index-url https://download.pytorch.org/whl/cpu",
    ),
    Row(
        "cuda", "torch", partial(installed, "torch", lambda version: "+cu" in version), "a build for CUDA", "fail", CUDA
    ),
    Row("npu", "packages", packages, "every package that the code imports", "fail", NPU),
    Row("npu", "packages", partial(same_release, "torch-npu", "torch"), "both from the same release", "fail", NPU),
    Row("npu vllm", "packages", partial(same_release, "vllm-ascend", "vllm"), "both from one release", "fail", NPU),
    Row("npu", "packages", versions, "the versions of a set in VERSION_SETS, facts/variables.py", "warn", NPU),
    Row("cuda", "packages", packages, "every package that the code imports", "fail", CUDA),
    Row("cuda", "packages", versions, "the versions of CUDA_SET, facts/variables.py", "warn", CUDA),
    Row(
        "npu",
        "triton",
        partial(installed, "triton", lambda version: version in ("", "?")),
        "only the folder of triton-ascend, which now contains triton for CUDA",
        "fail",
        f"pip uninstall -y triton triton-ascend && {NPU}",
    ),
    Row(
        "npu",
        "dies",
        partial(files, ["dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"]),
        "all of them, because every process opens them",
        "fail",
        "start the container again with --device= and the path of each",
    ),
    Row(
        "npu",
        "dies",
        dies_present,
        "one die for each rank, or all 16 of a server",
        "fail",
        "npu-smi info on the host; start the container again with --device=/dev/davinci<number> for each",
    ),
    Row(
        "npu",
        "dies",
        dies_visible,
        "one die for each rank, in /dev, in ascending order (CANN silently drops the others)",
        "fail",
        "unset ASCEND_RT_VISIBLE_DEVICES",
    ),
    Row(
        "npu",
        "dies",
        dies_are_neighbours,
        "no gaps, because the two dies of a card (2n, 2n + 1) share the fastest link",
        "warn",
        "unset ASCEND_RT_VISIBLE_DEVICES, unless this is intended",
    ),
    Row(
        "npu",
        "RANK_TABLE_FILE",
        partial(setting, "RANK_TABLE_FILE", not_),
        "no value, because HCCL would take the ranks of that file, perhaps of another cluster",
        "fail",
        "unset RANK_TABLE_FILE",
    ),
    Row(
        "npu",
        "HCCL_IF_IP",
        own_address,
        "an address of this machine",
        "fail",
        "ADDRESS=<the address of this machine> bash run_2node.sh, or unset HCCL_IF_IP",
    ),
    Row("npu", "HCCL's interface", partial(interface, "HCCL_SOCKET_IFNAME"), "one of them", "fail", INTERFACE),
    Row("npu", "gloo's interface", partial(interface, "GLOO_SOCKET_IFNAME"), "one of them", "fail", INTERFACE),
    Row(
        "npu machines",
        "addresses of dies",
        partial(files, ["etc/hccn.conf"]),
        "this file, which a run on several machines reads",
        "warn",
        "docker run ... -v /etc/hccn.conf:/etc/hccn.conf",
    ),
    Row("npu", CONNECT, partial(seconds, CONNECT, 120, 7200), "120 to 7200 s", "fail", variables.advice(CONNECT)),
    Row(
        "npu",
        CONNECT,
        partial(seconds, CONNECT, 600, 7200),
        "600 s or more, because ranks are further apart while they load (EI0006)",
        "warn",
        variables.advice(CONNECT),
    ),
    Row("npu", EXECUTE, partial(seconds, EXECUTE, 0, 2**31), "a number of seconds", "fail", variables.advice(EXECUTE)),
    Row(
        "npu",
        EXECUTE,
        partial(seconds, EXECUTE, 1, 2**31),
        "1 s or more; with 0 a rank waits forever",
        "warn",
        variables.advice(EXECUTE),
    ),
    Row(
        "npu run",
        "time-outs",
        order_of_timeouts,
        "the last above the others, because their messages name the missing rank",
        "warn",
        "parallel.timeout_seconds=<300 more than the others>",
    ),
    Row(
        "npu",
        "HCCL_OP_EXPANSION_MODE",
        aiv_timeout,
        "at most 1091 s with AIV",
        "fail",
        "unset HCCL_OP_EXPANSION_MODE, or export HCCL_EXEC_TIMEOUT=1091",
    ),
    Row(
        "npu",
        "HCCL_OP_EXPANSION_MODE",
        partial(setting, "HCCL_OP_EXPANSION_MODE", lambda value: value != "AIV"),
        "not AIV, which has open defects on 910C (vllm-ascend #9873)",
        "warn",
        "unset HCCL_OP_EXPANSION_MODE until a first run works",
    ),
    Row("npu", "allocator", one_allocator, "one of them; torch_npu refuses both", "fail", "unset PYTORCH_ALLOC_CONF"),
    Row(
        "npu vllm",
        "allocator",
        allocator_of_vllm,
        "PYTORCH_NPU_ALLOC_CONF, because vLLM 0.23 starts programs with both variables, which torch_npu refuses",
        "fail",
        'export PYTORCH_NPU_ALLOC_CONF="$PYTORCH_ALLOC_CONF" && unset PYTORCH_ALLOC_CONF',
    ),
    Row(
        "npu graphs",
        "allocator",
        no_expandable_segments,
        "no expandable_segments, because vLLM's memory pools exclude them",
        "fail",
        f"{NO_EXPANDABLE}, or rollout.enforce_eager=true",
    ),
    Row(
        "npu vllm",
        "allocator",
        no_expandable_segments,
        "no expandable_segments, because vLLM's sleep mode refuses them",
        "warn",
        f"{NO_EXPANDABLE}, unless memory is fragmented",
    ),
    Row(
        "npu graphs",
        "TASK_QUEUE_ENABLE",
        partial(setting, "TASK_QUEUE_ENABLE", lambda value: value != "2"),
        "not 2 with graph capture",
        "fail",
        "export TASK_QUEUE_ENABLE=1, or rollout.enforce_eager=true",
    ),
    Row(
        "npu",
        "ASCEND_LAUNCH_BLOCKING",
        partial(setting, "ASCEND_LAUNCH_BLOCKING", lambda value: value != "1"),
        "not 1, with which every launch waits, for debugging",
        "warn",
        "unset ASCEND_LAUNCH_BLOCKING",
    ),
    Row(
        "npu",
        "vLLM variables",
        vllm_variables,
        "none of a launcher (each rank would be rank 0 of a separate engine), and none that moves or tiles weights",
        "fail",
        UNSET_VLLM,
    ),
    Row("accelerator", "open files", open_files, "32768 or more", "warn", "ulimit -n 32768"),
)

# Only the doctor makes these checks. They start programs, try ports, or look at memory and disk.
SLOW = (
    Row(
        "npu",
        "libascendcl",
        partial(python, "import ctypes; ctypes.CDLL('libascendcl.so')"),
        "this CANN library",
        "fail",
        SOURCE,
    ),
    Row(
        "npu",
        "libhccl",
        partial(python, "import ctypes; ctypes.CDLL('libhccl.so')"),
        "this CANN library",
        "fail",
        SOURCE,
    ),
    Row(
        "npu", "libatb", partial(python, "import ctypes; ctypes.CDLL('libatb.so')"), "this CANN library", "fail", SOURCE
    ),
    Row("npu", "acl", partial(python, "import acl"), "CANN's module for Python", "fail", SOURCE),
    Row("npu vllm", "chip", chip, "the same kind of chip", "fail", REBUILD),
    Row(
        "npu vllm",
        "vLLM kernels",
        partial(python, "import vllm_ascend.vllm_ascend_C"),
        "a build that has these kernels",
        "warn",
        REBUILD,
    ),
    Row(
        "cpu",
        "torch_npu",
        torch_npu_not_loaded,
        "CANN, without which `import torch` fails on libhccl.so",
        "fail",
        f"pip uninstall torch-npu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0; to use NPUs: {SOURCE}",
    ),
    Row(
        "npu",
        "devices",
        devices,
        "one device for each rank, with free memory",
        "fail",
        "npu-smi info lists the processes there; unset ASCEND_RT_VISIBLE_DEVICES",
    ),
    Row(
        "cuda",
        "devices",
        devices,
        "one device for each rank, with free memory",
        "fail",
        "nvidia-smi lists the processes there; unset CUDA_VISIBLE_DEVICES; docker run --gpus all",
    ),
    Row(
        "npu",
        "HCCL ports",
        ports_free,
        "ports that no other process uses (EJ0003, EI0019)",
        "fail",
        "find the processes with ss -ltnp, or export HCCL_HOST_SOCKET_PORT_RANGE=<50 free ports>",
    ),
    Row(
        "npu",
        "HCCL ports",
        ports_reserved,
        "ports that the host reserves",
        "warn",
        "on the host: sysctl -w net.ipv4.ip_local_reserved_ports=60000-60050, or the range that you set",
    ),
    Row(
        "npu",
        "LD_PRELOAD",
        partial(setting, "LD_PRELOAD", lambda value: "jemalloc" in value),
        "jemalloc, without which host memory grows more",
        "warn",
        "apt-get install libjemalloc2; the run scripts preload it where it is installed",
    ),
    Row("", "/dev/shm", shared_memory, "1 GiB", "warn", "docker run --shm-size=64g"),
    Row("", "memory", main_memory, "memory for all ranks", "warn", "use --ranks <fewer>, or a machine with more"),
    Row("run", "disk", disk, "space for them", "fail", "set train.out_dir=<a larger disk>, or train.keep_last=1"),
)


# --------------------------------------------------------------------------------------------------------- the command


def examine(machine: Machine, rows: Sequence[Row]) -> list[Finding]:
    """Return one finding for each ``what``.

    It is the finding of the first row whose check does not pass, or of the last row if all checks pass.
    """
    findings: dict[str, Finding] = {}
    for row in rows:
        is_right_so_far = row.what not in findings or findings[row.what].level == "ok"
        if is_right_so_far and machine.words.issuperset(row.device.split()):
            findings[row.what] = row.finding(machine)
    return list(findings.values())


def quick(cfg: Config) -> None:
    """Print to stderr every finding of QUICK that is not ok.

    One process on each machine does this at the start of a run.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        machine = Machine(run=cfg, ranks=variable("LOCAL_WORLD_SIZE", 1, 1, MOST_RANKS))
        for finding in examine(machine, QUICK):
            if finding.level != "ok":
                print(finding, file=sys.stderr, flush=True)


@command
def main(arguments: list[str]) -> int:
    """Print the findings about this machine, and about a run on it if the command line names its configuration.

    Returns the exit code.
    """
    parser = command_line(
        "preflight.py --doctor", __doc__, nargs="?", help="YAML file of the run that you plan on this machine"
    )
    parser.add_argument("--ranks", type=int, help="number of processes on this machine")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_intermixed_args(arguments)
    cfg = load_config(args.config, args.overrides) if args.config else None
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        raise InputError(f"--ranks: {args.ranks} is out of range; give a whole number from 1 to {MOST_RANKS}")
    machine = Machine(run=cfg, ranks=args.ranks)
    findings = examine(machine, QUICK + SLOW)
    levels = [finding.level for finding in findings]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(map(str, findings)))
        print(f"{machine.kind}: {', '.join(f'{levels.count(level)} {level}' for level in ('ok', 'warn', 'fail'))}")
    return int("fail" in levels)
