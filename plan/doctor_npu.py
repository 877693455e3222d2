"""The doctor's checks of the software and the dies of an Ascend NPU machine.

Each check takes a machine.Machine and returns its findings. The rules come from the sources and issue trackers of
torch_npu, MindSpeed, vllm-ascend and Ray. Tests plant faults; nothing here has been run on an NPU yet.
"""

from __future__ import annotations

import json
import re

import environment
from plan.machine import Finding, Machine, fail, last_line, memory_finding, number_ranges, ok, warn

DIES = 16  # of a 910C server: 8 cards with two dies each; a die is a device and has one rank
MANAGERS = (
    "davinci_manager",
    "devmm_svm",
    "hisi_hdc",
)  # device files that every process opens, with the one of its die
CANN_FOLDERS = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit")  # from CANN 8.5 on; before 8.5
RAY_NPUS = 'import ray; ray.init(address="auto", logging_level="ERROR"); print(ray.cluster_resources().get("NPU", 0))'


# ---------------------------------------------------------------------------------------------------------- software


def source_command(machine: Machine) -> str:
    """The command that sets CANN's environment on this machine."""
    found = [folder for folder in CANN_FOLDERS if (machine.root / folder / "set_env.sh").exists()]
    if not found:
        return "start the CANN container, or install CANN (docs/npu.md)"
    return f"source /{found[0]}/set_env.sh && source /usr/local/Ascend/nnal/atb/set_env.sh"


def check_cann(machine: Machine) -> Finding:
    """CANN's environment is sourced."""
    home = machine.env.get("ASCEND_HOME_PATH")
    if not home:
        return fail("CANN", "ASCEND_HOME_PATH is not set", source_command(machine))
    if not (machine.root / home.lstrip("/")).is_dir():
        return fail("CANN", f"ASCEND_HOME_PATH is {home}, which does not exist", source_command(machine))
    return ok("CANN", f"ASCEND_HOME_PATH is {home}")


def check_cann_libraries(machine: Machine) -> list[Finding] | Finding:
    """CANN's libraries and its Python module acl can be loaded."""
    findings = [
        fail("CANN libraries", f"{name} cannot be loaded ({error})", source_command(machine))
        for name in ("libascendcl.so", "libhccl.so", "libatb.so")
        if (error := machine.library_error(name))
    ]
    code, output = machine.python("import acl")
    if code:
        findings.append(
            fail(
                "CANN libraries",
                f"import acl: {last_line(output)}",
                "source CANN's set_env.sh, which puts its python/site-packages on PYTHONPATH",
            )
        )
    return findings or ok("CANN libraries", "libascendcl, libhccl, libatb and acl load")


def check_driver(machine: Machine) -> Finding:
    text = machine.text("usr/local/Ascend/driver/version.info")
    if version := re.search(r"^Version=(\S+)", text, re.M):
        return ok("driver", version[1])
    return fail(
        "driver",
        "no /usr/local/Ascend/driver/version.info",
        "on the host: install it, npu-smi info; in a container: -v /usr/local/Ascend/driver:/usr/local/Ascend/driver",
    )


def check_autoload(machine: Machine) -> Finding:
    """torch imports every installed backend by itself, so torch_npu without CANN makes `import torch` fail."""
    installed = machine.version("torch-npu")
    if not installed:
        if machine.kind != "npu":
            return ok("torch_npu", "not installed, not needed")
        return fail("torch_npu", "not installed", "install the packages of docs/npu.md, section 2")
    if "ASCEND_HOME_PATH" not in machine.env and machine.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        without = "to run without NPUs: pip uninstall torch-npu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return fail(
            "torch_npu",
            f"{installed} without CANN: `import torch` fails on libhccl.so",
            f"{source_command(machine)}; {without}",
        )
    return ok("torch_npu", installed)


def check_torch_build(machine: Machine) -> Finding:
    version = machine.version("torch")
    if version and "+cu" in version and machine.version("torch-npu"):
        return fail(
            "torch build",
            f"{version} is for CUDA; torch_npu refuses a second accelerator",
            "pip install torch==<the same>+cpu --index-url https://download.pytorch.org/whl/cpu",
        )
    return ok("torch build", f"{version}")


def cann_version(machine: Machine) -> str | None:
    home = machine.root / machine.env.get("ASCEND_HOME_PATH", "no CANN").lstrip("/")
    texts = "".join(path.read_text(errors="replace") for path in home.glob("*-linux/ascend_toolkit_install.info"))
    said = re.search(r"^version=(\S+)", texts, re.M | re.I)
    return said[1] if said else None


def check_versions(machine: Machine) -> list[Finding] | Finding:
    """Compare with the set in environment.VERSION_SETS that has the installed version of torch, or with the first."""
    torch, sets = machine.version("torch") or "", environment.VERSION_SETS
    pinned = next((one for one in sets if environment.matches(torch, one["torch"])), sets[0])
    found = {name: cann_version(machine) if name == "CANN" else machine.version(name) for name in pinned}
    findings = []
    for name, wanted in pinned.items():
        needed = f"needed: {' or '.join(wanted)}, with torch {pinned['torch'][0]} (requirements/npu.txt, docs/npu.md)"
        if found[name] is None and name.startswith("vllm") and not machine.samples_with_vllm:
            findings.append(warn("versions", f"{name} is not installed; only rollout.engine torch works", needed))
        elif found[name] is None and name != "CANN":
            findings.append(fail("versions", f"{name} is not installed", needed))
        elif not environment.matches(found[name] or "", wanted):
            findings.append(warn("versions", f"{name} {found[name] or 'of unknown version'}", needed))
    for plugin, base in environment.SAME_RELEASE:
        if found[plugin] and found[base] and release(found[plugin]) != release(found[base]):
            findings.append(
                fail(
                    "versions",
                    f"{plugin} {found[plugin]} beside {base} {found[base]}",
                    f"both must be of one release: {base} {pinned[base][0]}, {plugin} {pinned[plugin][0]}",
                )
            )
    stock = machine.version("triton")
    if stock not in (None, "?"):  # "?": the folder triton of triton-ascend, which has no metadata
        findings.append(
            fail(
                "versions",
                f"triton {stock} lies in the folder of triton-ascend, and is for CUDA",
                "pip uninstall -y triton triton-ascend, then install triton-ascend again (docs/npu.md)",
            )
        )
    return findings or ok("versions", ", ".join(f"{name} {version}" for name, version in found.items()))


def release(version: str) -> str:
    """2.10.0.post4+cpu -> 2.10.0"""
    return ".".join(re.findall(r"\d+", version)[:3])


def check_packages(machine: Machine) -> Finding:
    """The other packages that the code of this repository imports."""
    if missing := [name for name in environment.OUR_PACKAGES if machine.version(name) is None]:
        lists = "requirements/npu-image.txt in vllm-ascend's image, requirements/npu.txt elsewhere (docs/npu.md)"
        return fail("packages", f"not installed: {', '.join(missing)}", f"pip install --no-deps -r {lists}")
    return ok("packages", f"{len(environment.OUR_PACKAGES)} that the code imports are installed")


def check_chip(machine: Machine) -> Finding:
    """vllm-ascend is compiled for one kind of chip, and its engine stops with an assertion on another kind.

    PyPI's wheels are for the A2 (910B). The check reads the file that names the kind, because importing vllm_ascend
    loads CANN.
    """
    installed = machine.version("vllm-ascend")
    if not installed:
        return ok("vllm-ascend's build", "vllm-ascend is not installed")
    rebuild = "build vllm-ascend from its source on this machine, or use its image for this chip (docs/npu.md)"
    built = environment.built_for(machine.package_file("vllm_ascend", "_build_info.py") or "")
    if built is None:
        return warn(
            "vllm-ascend's build",
            f"vllm-ascend {installed}: no vllm_ascend/_build_info.py that says for which chip it is built",
            rebuild,
        )
    code, output = machine.command(["npu-smi", "info"])
    names = sorted(set(re.findall(r"^\|\s*\d+\s+(\w*\d{3}\S*)\s*\|", output, re.M))) if code == 0 else []
    kinds = {environment.chip_kind(name) for name in names}
    if not names:
        return warn(
            "vllm-ascend's build",
            f"for {built}; npu-smi names no chip ({last_line(output)})",
            "npu-smi info must list the dies; in a container: -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
        )
    if None in kinds or len(kinds) > 1:
        return warn(
            "vllm-ascend's build",
            f"for {built}; this machine's chips: {', '.join(names)}, of a kind that is not known here",
            "please open an issue with the output of npu-smi info",
        )
    (kind,) = kinds
    if kind != built:
        image = environment.VLLM_ASCEND_IMAGES[kind]
        return fail(
            "vllm-ascend's build",
            f"vllm-ascend {installed} is built for {built}, this machine's chips are {kind} ({names[0]})",
            f"{rebuild}: quay.io/ascend/vllm-ascend:{image}",
        )
    return ok("vllm-ascend's build", f"for {built}, as this machine's chips are ({names[0]})")


def check_vllm_kernels(machine: Machine) -> Finding:
    if not machine.version("vllm-ascend"):
        return ok("vLLM kernels", "vllm-ascend is not installed")
    code, output = machine.python("import vllm_ascend.vllm_ascend_C")
    if code:
        return warn(
            "vLLM kernels",
            f"vllm_ascend_C: {last_line(output)}",
            "rebuild vllm-ascend with COMPILE_CUSTOM_KERNELS=1 inside the CANN container",
        )
    return ok("vLLM kernels", "vllm_ascend_C imports")


def check_compiler(machine: Machine) -> Finding:
    path = machine.env.get("PATH", "")
    folders = [machine.root / folder.lstrip("/") for folder in path.split(":") if folder]
    missing = [tool for tool in ("g++", "ninja") if not any((folder / tool).exists() for folder in folders)]
    if missing:
        return warn(
            "compiler",
            f"no {' and no '.join(missing)}: MindSpeed compiles some of its operators",
            f"apt-get install {' '.join({'ninja': 'ninja-build'}.get(tool, tool) for tool in missing)}",
        )
    return ok("compiler", "g++, ninja")


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


def check_dies(machine: Machine) -> Finding:
    """There are enough device files and visible dies, one for each process."""
    nodes, (visible, wrong) = machine.device_nodes("davinci"), visible_dies(machine)
    if not nodes:
        return fail(
            "dies",
            "no /dev/davinci*",
            "on the host: npu-smi info; in a container: --device=/dev/davinci0 ... (docs/npu.md)",
        )
    if lacking := [name for name in MANAGERS if not (machine.root / "dev" / name).exists()]:
        flags = " ".join(f"--device=/dev/{name}" for name in lacking)
        return fail("dies", f"no /dev/{', no /dev/'.join(lacking)}", f"start the container again with {flags}")
    variable = f"ASCEND_RT_VISIBLE_DEVICES={machine.env.get('ASCEND_RT_VISIBLE_DEVICES')}"
    if wrong:
        return fail("dies", f"{variable} {wrong}", f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, nodes))}")
    wanted = machine.ranks or (DIES if len(nodes) > DIES // 2 else len(nodes))
    if len(nodes) < wanted:
        missing = sorted(set(range(max(wanted, nodes[-1] + 1))) - set(nodes))
        flags = " ".join(f"--device=/dev/davinci{number}" for number in missing)
        return fail(
            "dies",
            f"{len(nodes)} of {wanted} dies in /dev; missing: {number_ranges(missing)}",
            f"start the container again with {flags}; if the host lacks them: npu-smi info",
        )
    if len(visible) < wanted:
        missing = sorted(set(nodes) - set(visible))
        found = f"{variable} shows {len(visible)} of the {wanted} dies that are wanted"
        found += f"; left out: {number_ranges(missing)}"
        return fail("dies", found, f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, nodes[:wanted]))}")
    found = f"{len(nodes)} in /dev, {len(visible)} visible" + (f", {machine.ranks} ranks" if machine.ranks else "")
    if visible != list(range(visible[0], visible[0] + len(visible))):
        return warn(
            "dies",
            f"{found}, with gaps: {number_ranges(visible)}",
            "is this intended? a card's two dies are neighbours (2n, 2n + 1) and share the fastest link",
        )
    return ok("dies", found)


def check_runtime(machine: Machine) -> Finding:
    """torch_npu counts the same dies, and every die has free memory."""
    if error := machine.accelerator.get("error"):
        return fail(
            "torch_npu devices",
            f"torch cannot open the NPUs: {error}",
            f"{source_command(machine)}; then the lines above this one",
        )
    memory = machine.accelerator["memory"]
    visible = visible_dies(machine)[0]
    if len(memory) != len(visible) or len(memory) < (machine.ranks or 0):
        return fail(
            "torch_npu devices",
            f"torch_npu counts {len(memory)}, the environment shows {len(visible)}, ranks: {machine.ranks or 'any'}",
            f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, machine.device_nodes('davinci')))} (npu-smi info)",
        )
    return memory_finding(memory, "npu-smi info shows whose process it is")


def check_ray(machine: Machine) -> Finding:
    """A running Ray cluster knows all NPUs; it never assigns those that it was started without."""
    known = "RAY_ADDRESS" in machine.env or (machine.root / "tmp/ray/ray_current_cluster").exists()
    if not machine.version("ray") or not known:
        return ok("Ray", "no cluster runs here; torchrun needs none")
    code, output = machine.python(RAY_NPUS)
    if code:
        return warn("Ray", f"the cluster does not answer ({last_line(output)})", "ray stop, if it is yours")
    nodes, counted = machine.device_nodes("davinci"), int(float(last_line(output)))
    if counted < (here := len(nodes)):
        found = f"the cluster counts {counted} of the {here} NPUs; missing: {number_ranges(nodes[counted:])}"
        start = f"ray start --head --resources='{json.dumps({'NPU': here})}'"
        return warn("Ray", found, f"ray stop && unset ASCEND_RT_VISIBLE_DEVICES && {start} (torchrun does not use Ray)")
    return ok("Ray", f"the cluster counts {counted} NPUs")


# check -> is it quick? A quick check starts no command and loads no library.
CHECKS = {
    check_driver: False,
    check_cann: True,
    check_cann_libraries: False,
    check_autoload: True,
    check_torch_build: True,
    check_versions: True,
    check_packages: True,
    check_chip: False,
    check_vllm_kernels: False,
    check_compiler: False,
    check_dies: True,
    check_runtime: False,
    check_ray: False,
}
