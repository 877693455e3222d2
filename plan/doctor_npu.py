"""The doctor's checks of the software and the dies of an Ascend NPU machine.

Each check takes a machine.Machine and returns its findings. The rules come from the sources and issue trackers of
torch_npu, MindSpeed, vllm-ascend and Ray. Tests plant faults; nothing here has been run on an NPU yet.
"""

import json
import re

from inputs import environment
from plan.machine import Check, Finding, Machine, Row, every, first, last_line, memory_findings, number_ranges

DIES = 16  # of a 910C server: 8 cards with two dies each; a die is a device and has one rank
CANN_FOLDERS = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit")  # from CANN 8.5 on; before 8.5
RAY_NPUS = 'import ray; ray.init(address="auto", logging_level="ERROR"); print(ray.cluster_resources().get("NPU", 0))'


# ---------------------------------------------------------------------------------------------------------- software


def source_command(machine: Machine) -> str:
    """The command that sets CANN's environment on this machine."""
    folders = [folder for folder in CANN_FOLDERS if (machine.root / folder / "set_env.sh").exists()]
    if not folders:
        return "start the CANN container, or install CANN (docs/npu.md)"
    return f"source /{folders[0]}/set_env.sh && source /usr/local/Ascend/nnal/atb/set_env.sh"


def check_cann(machine: Machine) -> list[Finding]:
    """CANN's environment is sourced."""
    home, todo = machine.env.get("ASCEND_HOME_PATH", ""), source_command(machine)
    said = f"ASCEND_HOME_PATH is {home}"
    return first(
        "CANN",
        said,
        (not home, "fail", "ASCEND_HOME_PATH is not set", todo),
        (not (machine.root / home.lstrip("/")).is_dir(), "fail", f"{said}, which does not exist", todo),
    )


def check_cann_libraries(machine: Machine) -> list[Finding]:
    """CANN's libraries and its Python module acl can be loaded."""
    errors = {name: machine.library_error(name) for name in ("libascendcl.so", "libhccl.so", "libatb.so")}
    code, output = machine.python("import acl")
    return every(
        "CANN libraries",
        "libascendcl, libhccl, libatb and acl load",
        *((e, "fail", f"{name} cannot be loaded ({e})", source_command(machine)) for name, e in errors.items()),
        (
            code,
            "fail",
            f"import acl: {last_line(output)}",
            "source CANN's set_env.sh, which puts its python/site-packages on PYTHONPATH",
        ),
    )


def check_driver(machine: Machine) -> list[Finding]:
    version = re.search(r"^Version=(\S+)", machine.text("usr/local/Ascend/driver/version.info"), re.M)
    return first(
        "driver",
        version[1] if version else "",
        (
            not version,
            "fail",
            "no /usr/local/Ascend/driver/version.info",
            "on the host: install it, npu-smi info; in a container: "
            "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver",
        ),
    )


def check_autoload(machine: Machine) -> list[Finding]:
    """torch imports every installed backend by itself, so torch_npu without CANN makes `import torch` fail."""
    installed = machine.version("torch-npu")
    loads = "ASCEND_HOME_PATH" not in machine.env and machine.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
    return first(
        "torch_npu",
        installed or "not installed, not needed",
        (
            not installed and machine.kind == "npu",
            "fail",
            "not installed",
            "install the packages of docs/npu.md, section 2",
        ),
        (
            installed and loads,
            "fail",
            f"{installed} without CANN: `import torch` fails on libhccl.so",
            f"{source_command(machine)}; to run without NPUs: pip uninstall torch-npu, "
            "or export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        ),
    )


def check_torch_build(machine: Machine) -> list[Finding]:
    version = machine.version("torch")
    for_cuda = "+cu" in (version or "")
    return first(
        "torch build",
        f"{version}",
        (
            machine.kind == "cuda" and not for_cuda,
            "fail",
            f"{version} is not for CUDA",
            "install torch for CUDA (pytorch.org)",
        ),
        (
            for_cuda and machine.version("torch-npu"),
            "fail",
            f"{version} is for CUDA; torch_npu refuses a second accelerator",
            "pip install torch==<the same>+cpu --index-url https://download.pytorch.org/whl/cpu",
        ),
    )


def cann_version(machine: Machine) -> str | None:
    home = machine.root / machine.env.get("ASCEND_HOME_PATH", "no CANN").lstrip("/")
    texts = "".join(path.read_text(errors="replace") for path in home.glob("*-linux/ascend_toolkit_install.info"))
    said = re.search(r"^version=(\S+)", texts, re.M | re.I)
    return said[1] if said else None


def check_versions(machine: Machine) -> list[Finding]:
    """Compare with the set in environment.VERSION_SETS that has the installed version of vLLM, or with the first."""
    vllm, sets = machine.version("vllm") or "", environment.VERSION_SETS
    pinned = next((one for one in sets if environment.matches(vllm, one["vllm"])), sets[0])
    installed = {name: cann_version(machine) if name == "CANN" else machine.version(name) for name in pinned}
    rows = version_rows(machine, pinned, installed, "requirements/, docs/npu.md")
    rows += [
        (
            installed[plugin] and installed[base] and release(installed[plugin]) != release(installed[base]),
            "fail",
            f"{plugin} {installed[plugin]} beside {base} {installed[base]}",
            f"both must be of one release: {base} {pinned[base][0]}, {plugin} {pinned[plugin][0]}",
        )
        for plugin, base in environment.SAME_RELEASE
    ]
    stock = machine.version("triton")
    return every(
        "versions",
        ", ".join(f"{name} {version}" for name, version in installed.items()),
        *rows,
        (
            stock not in (None, "?"),  # "?": the folder triton of triton-ascend, which has no metadata
            "fail",
            f"triton {stock} lies in the folder of triton-ascend, and is for CUDA",
            "pip uninstall -y triton triton-ascend, then install triton-ascend again (docs/npu.md)",
        ),
    )


def version_rows(
    machine: Machine, pinned: dict[str, tuple[str, ...]], installed: dict[str, str | None], where: str
) -> list[Row]:
    """What is wrong with the versions ``installed`` beside those of a set; ``where`` names the lists of packages."""
    rows: list[Row] = []
    for name, wanted in pinned.items():
        needed = f"needed: {' or '.join(wanted)}, with torch {pinned['torch'][0]} ({where})"
        lacking = installed[name] is None and name != "CANN"
        optional = name.startswith("vllm") and not machine.samples_with_vllm
        other = not environment.matches(installed[name] or "", wanted)
        rows += [
            (lacking and optional, "warn", f"{name} is not installed; only rollout.engine torch works", needed),
            (lacking and not optional, "fail", f"{name} is not installed", needed),
            (other and not lacking, "warn", f"{name} {installed[name] or 'of unknown version'}", needed),
        ]
    return rows


def release(version: str) -> str:
    """2.10.0.post4+cpu -> 2.10.0"""
    return ".".join(re.findall(r"\d+", version)[:3])


def check_chip(machine: Machine) -> list[Finding]:
    """vllm-ascend is compiled for one kind of chip, and its engine stops with an assertion on another kind.

    PyPI's wheels are for the A2 (910B). The check reads the file that names the kind, because importing vllm_ascend
    loads CANN.
    """
    installed = machine.version("vllm-ascend")
    if not installed:
        return first("vllm-ascend's build", "vllm-ascend is not installed")
    built = environment.built_for(machine.package_file("vllm_ascend", "_build_info.py") or "")
    code, output = machine.command(["npu-smi", "info"])
    names = sorted(set(re.findall(r"^\|\s*\d+\s+(\w*\d{3}\S*)\s*\|", output, re.M))) if code == 0 else []
    kinds = {environment.chip_kind(name) for name in names}
    kind = kinds.pop() if len(kinds) == 1 else None
    chips = ", ".join(names)
    rebuild = "build vllm-ascend from its source on this machine, or use its image for this chip (docs/npu.md)"
    return first(
        "vllm-ascend's build",
        f"for {built}, as this machine's chips are ({chips})",
        (
            built is None,
            "warn",
            f"vllm-ascend {installed}: no vllm_ascend/_build_info.py that says for which chip it is built",
            rebuild,
        ),
        (
            not names,
            "warn",
            f"for {built}; npu-smi names no chip ({last_line(output)})",
            "npu-smi info must list the dies; in a container: -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
        ),
        (
            kind is None,
            "warn",
            f"for {built}; this machine's chips: {chips}, of a kind that is not known here",
            "please open an issue with the output of npu-smi info",
        ),
        (
            kind != built,
            "fail",
            f"vllm-ascend {installed} is built for {built}, this machine's chips are {kind} ({chips})",
            f"{rebuild}: quay.io/ascend/vllm-ascend:{environment.VLLM_ASCEND_IMAGES.get(kind)}",
        ),
    )


def check_vllm_kernels(machine: Machine) -> list[Finding]:
    if not machine.version("vllm-ascend"):
        return first("vLLM kernels", "vllm-ascend is not installed")
    code, output = machine.python("import vllm_ascend.vllm_ascend_C")
    return first(
        "vLLM kernels",
        "vllm_ascend_C imports",
        (
            code,
            "warn",
            f"vllm_ascend_C: {last_line(output)}",
            "rebuild vllm-ascend with COMPILE_CUSTOM_KERNELS=1 inside the CANN container",
        ),
    )


def check_compiler(machine: Machine) -> list[Finding]:
    folders = [machine.root / folder.lstrip("/") for folder in machine.env.get("PATH", "").split(":") if folder]
    packages = {"g++": "g++", "ninja": "ninja-build"}
    missing = [tool for tool in packages if not any((folder / tool).exists() for folder in folders)]
    return first(
        "compiler",
        "g++, ninja",
        (
            missing,
            "warn",
            f"no {' and no '.join(missing)}: MindSpeed compiles some of its operators",
            f"apt-get install {' '.join(packages[tool] for tool in missing)}",
        ),
    )


# -------------------------------------------------------------------------------------------------------------- dies


def visible_dies(machine: Machine) -> tuple[list[int], str]:
    """The dies that this environment makes visible, and what is wrong with their list; "" if nothing is."""
    nodes = machine.device_nodes("davinci")
    text = machine.env.get("ASCEND_RT_VISIBLE_DEVICES")
    if text is None:
        return nodes, ""
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        return [], "is no list of numbers"
    ids = [int(number) for number in text.split(",")]
    if ids != sorted(set(ids)):
        return ids, "is not ascending, each once: CANN silently drops the rest"
    if unknown := sorted(set(ids) - set(nodes)):
        return ids, f"names dies that are not in /dev ({number_ranges(unknown)}): CANN silently drops them"
    return ids, ""


def check_dies(machine: Machine) -> list[Finding]:
    """There are enough device files and visible dies, one for each process."""
    nodes, (visible, wrong) = machine.device_nodes("davinci"), visible_dies(machine)
    wanted = machine.ranks or (DIES if len(nodes) > DIES // 2 else len(nodes))
    # Every process opens these files, and the file of its die.
    managers = [f for f in ("davinci_manager", "devmm_svm", "hisi_hdc") if not (machine.root / "dev" / f).exists()]
    absent = sorted({*range(wanted), *range(max(nodes, default=0))} - set(nodes))
    variable = f"ASCEND_RT_VISIBLE_DEVICES={machine.env.get('ASCEND_RT_VISIBLE_DEVICES')}"
    counts = f"{len(nodes)} in /dev, {len(visible)} visible" + (f", {machine.ranks} ranks" if machine.ranks else "")

    def start_with(devices: list[str]) -> str:
        return f"start the container again with {' '.join(f'--device=/dev/{name}' for name in devices)}"

    def show(dies: list[int]) -> str:
        return f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, dies))}"

    return first(
        "dies",
        counts,
        (
            not nodes,
            "fail",
            "no /dev/davinci*",
            "on the host: npu-smi info; in a container: --device=/dev/davinci0 ... (docs/npu.md)",
        ),
        (managers, "fail", f"no /dev/{', no /dev/'.join(managers)}", start_with(managers)),
        (wrong, "fail", f"{variable} {wrong}", show(nodes)),
        (
            len(nodes) < wanted,
            "fail",
            f"{len(nodes)} of {wanted} dies in /dev; missing: {number_ranges(absent)}",
            f"{start_with([f'davinci{die}' for die in absent])}; if the host lacks them: npu-smi info",
        ),
        (
            len(visible) < wanted,
            "fail",
            f"{variable} shows {len(visible)} of the {wanted} dies that are wanted; "
            f"left out: {number_ranges(sorted(set(nodes) - set(visible)))}",
            show(nodes[:wanted]),
        ),
        (
            "," in number_ranges(visible),
            "warn",
            f"{counts}, with gaps: {number_ranges(visible)}",
            "is this intended? a card's two dies are neighbours (2n, 2n + 1) and share the fastest link",
        ),
    )


def check_runtime(machine: Machine) -> list[Finding]:
    """torch_npu counts the same dies, and every die has free memory."""
    error, memory = machine.accelerator.get("error"), machine.accelerator.get("memory", [])
    visible, nodes = len(visible_dies(machine)[0]), machine.device_nodes("davinci")
    count = f"torch_npu counts {len(memory)}, the environment shows {visible}, ranks: {machine.ranks or 'any'}"
    return first(
        "torch_npu devices",
        count,
        (
            error,
            "fail",
            f"torch cannot open the NPUs: {error}",
            f"{source_command(machine)}; then the lines above this one",
        ),
        (
            len(memory) != visible or len(memory) < (machine.ranks or 0),
            "fail",
            count,
            f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, nodes))} (npu-smi info)",
        ),
    ) + (memory_findings(memory, "npu-smi info shows whose process it is") if memory else [])


def check_ray(machine: Machine) -> list[Finding]:
    """A running Ray cluster knows all NPUs; it never assigns those that it was started without."""
    known = "RAY_ADDRESS" in machine.env or (machine.root / "tmp/ray/ray_current_cluster").exists()
    if not machine.version("ray") or not known:
        return first("Ray", "no cluster runs here; torchrun needs none")
    code, output = machine.python(RAY_NPUS)
    nodes, counted = machine.device_nodes("davinci"), 0 if code else int(float(last_line(output)))
    start = f"ray start --head --resources='{json.dumps({'NPU': len(nodes)})}'"
    return first(
        "Ray",
        f"the cluster counts {counted} NPUs",
        (code, "warn", f"the cluster does not answer ({last_line(output)})", "ray stop, if it is yours"),
        (
            counted < len(nodes),
            "warn",
            f"the cluster counts {counted} of the {len(nodes)} NPUs; missing: {number_ranges(nodes[counted:])}",
            f"ray stop && unset ASCEND_RT_VISIBLE_DEVICES && {start} (torchrun does not use Ray)",
        ),
    )


CHECKS: tuple[Check, ...] = (
    check_driver,
    check_cann,
    check_cann_libraries,
    check_autoload,
    check_torch_build,
    check_versions,
    check_chip,
    check_vllm_kernels,
    check_compiler,
    check_dies,
    check_runtime,
    check_ray,
)
QUICK = (check_cann, check_autoload, check_torch_build, check_versions, check_dies)
