"""Every check of the doctor finds a planted fault. The machine consists of files, variables and stand-ins."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from healthy import (
    CUDA_VERSIONS,
    ENVIRONMENT,
    GIB,
    ROOT,
    VERSIONS,
    answers,
    cuda,
    npu,
    qwen3,
    write,
)

from plan import doctor, doctor_npu, doctor_variables
from plan.machine import Machine

# -------------------------------------------------------------------------------------------------- healthy machines


@pytest.mark.parametrize("healthy", [npu, cuda])
def test_a_healthy_machine_has_nothing_but_ok(healthy, tmp_path) -> None:
    findings = doctor.examine(healthy(tmp_path))
    assert [str(f) for f in findings if f.level != "ok"] == []
    assert len({f.what for f in findings}) >= (20 if healthy is npu else 8)


def test_the_newer_set_of_versions_is_a_set_of_its_own(tmp_path) -> None:
    new = npu(tmp_path)
    changes = {"transformers": "5.14.1", "vllm": "0.30.0+empty", "vllm-ascend": "0.30.0rc2"}
    new.version = (VERSIONS | changes).get
    info = new.root / "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info"
    write(info, "version=9.2.0\n")
    assert [f.level for f in doctor_npu.check_versions(new)] == ["ok"]
    write(info, "version=9.1.0\n")
    assert [str(f)[:34] for f in doctor_npu.check_versions(new)] == ["warn  versions: CANN 9.1.0; needed"]


# ------------------------------------------------------------------------------------------------------ planted faults


def environment(**changes: str | None) -> Callable[[Machine], None]:
    def plant(where: Machine) -> None:
        where.env = {k: v for k, v in (ENVIRONMENT | changes).items() if v is not None}

    return plant


def versions(known: dict = VERSIONS, /, **changes: str | None) -> Callable[[Machine], None]:
    renamed = {name.replace("_", "-"): version for name, version in changes.items()}
    return attribute(version=(known | renamed).get)


def command(containing: str, code: int, output: str) -> Callable[[Machine], None]:
    """The program whose command line contains this text gives this answer."""
    return lambda where: setattr(
        where, "command", lambda c: (code, output) if containing in " ".join(c) else answers(c)
    )


def attribute(**changes: object) -> Callable[[Machine], None]:
    return lambda where: [setattr(where, name, value) for name, value in changes.items()]


def file(path: str, text: str | None) -> Callable[[Machine], None]:
    """A system file with other content, or without the file."""
    return lambda where: write(where.root / path, text) if text is not None else (where.root / path).unlink()


def dies(*present: int, **changes: str) -> Callable[[Machine], None]:
    def plant(where: Machine) -> None:
        for die in set(range(16)) - set(present):
            (where.root / "dev" / f"davinci{die}").unlink()
        environment(**changes)(where)

    return plant


def run(*overrides: str) -> Callable[[Machine], None]:
    return lambda where: setattr(where, "run", qwen3(where.root.parent, *overrides))


def model(name: str, content: bytes | None) -> Callable[[Machine], None]:
    def plant(where: Machine) -> None:
        path = Path(where.run.model.path) / name
        path.unlink() if content is None else path.write_bytes(content)

    return plant


def both(*plants: Callable[[Machine], None]) -> Callable[[Machine], None]:
    return lambda where: [plant(where) for plant in plants]


def memory(count: int, taken: int = 2) -> Callable[[Machine], None]:
    free = [[59 * GIB, 61 * GIB]] * (count - 1) + [[(61 - taken) * GIB, 61 * GIB]]
    return command("mem_get_info", 0, json.dumps({"memory": free, "nccl": "2"}))


AUTO = "TORCH_DEVICE_BACKEND_AUTOLOAD"
SHARD = "model-00002-of-00002.safetensors"
WHOLE = ",".join(map(str, range(16)))
N, V, D = doctor_npu, doctor_variables, doctor
FAULTS = [  # (check, fault, the line that it must print)
    (
        N.check_driver,
        file("usr/local/Ascend/driver/version.info", None),
        "fail  driver: no /usr/local/Ascend/driver/ver",
    ),
    (N.check_cann, environment(ASCEND_HOME_PATH=None), "fail  CANN: ASCEND_HOME_PATH is not set; source /usr/local/"),
    (
        N.check_cann_libraries,
        attribute(library_error=lambda name: "no such file" if name == "libatb.so" else ""),
        "fail  CANN libraries: libatb.so cannot be loaded (no such file); source /usr/local/Ascend/cann/set_env.sh && ",
    ),
    (
        N.check_autoload,
        versions(torch_npu=None),
        "fail  torch_npu: not installed; install the packages of docs/npu.md, section 2",
    ),
    (
        N.check_torch_build,
        versions(torch="2.10.0+cu128"),
        "fail  torch build: 2.10.0+cu128 is for CUDA; torch_npu refu",
    ),
    (N.check_versions, versions(torch_npu="2.9.0"), "fail  versions: torch-npu 2.9.0 beside torch 2.10.0+cpu; both"),
    (
        N.check_versions,
        versions(vllm_ascend="0.23.0"),  # as in the image
        "warn  versions: vllm-ascend 0.23.0; needed: 0.23.0.post1, with torch 2.10.0",
    ),
    (N.check_versions, versions(triton="3.6.0"), "fail  versions: triton 3.6.0 lies in the folder of triton-ascend"),
    (D.check_packages, versions(pyarrow=None), "fail  packages: not installed: pyarrow; pip install --no-deps"),
    (
        N.check_chip,
        attribute(package_file=lambda *of: "__device_type__ = 'A2'\n"),
        "fail  vllm-ascend's build: vllm-ascend 0.23.0.post1 is built for A2, this machine's",
    ),
    (
        N.check_vllm_kernels,
        command("vllm_ascend_C", 1, "ImportError: undefined symbol"),
        "warn  vLLM kernels: vllm_ascend_C: ImportError: undefined symbol; rebuild",
    ),
    (
        N.check_compiler,
        file("usr/bin/ninja", None),
        "warn  compiler: no ninja: MindSpeed compiles some of its operators",
    ),
    (
        N.check_dies,
        file("dev/hisi_hdc", None),
        "fail  dies: no /dev/hisi_hdc; start the container again with --device=",
    ),
    (
        N.check_dies,
        both(dies(*range(12)), attribute(ranks=None)),
        "fail  dies: 12 of 16 dies in /dev; missing: 12-15",
    ),
    (
        N.check_dies,
        environment(ASCEND_RT_VISIBLE_DEVICES="0,1,2,3,4,5,6,7,8,9,10,11"),
        f"fail  dies: ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7,8,9,10,11 shows 12 of the 16 dies that are wanted; "
        f"left out: 12-15; export ASCEND_RT_VISIBLE_DEVICES={WHOLE}",
    ),
    (
        N.check_dies,
        both(environment(ASCEND_RT_VISIBLE_DEVICES="0,1,4,5"), attribute(ranks=4)),
        "warn  dies: 16 in /dev, 4 visible, 4 ranks, with gaps: 0-1, 4-5; is this intended?",
    ),
    (
        N.check_runtime,
        memory(12),
        "fail  torch_npu devices: torch_npu counts 12, the environment shows 16, ranks: 16; export ASCEND_RT_VISIBLE_",
    ),
    (N.check_runtime, memory(16, taken=30), "fail  device memory: taken before the run starts: 15: 30 GiB; npu-smi"),
    (
        N.check_ray,
        command("ray", 0, "12.0\n"),
        "warn  Ray: the cluster counts 12 of the 16 NPUs; missing: 12-15; ray stop && unset ASCEND_RT_VISIBLE_DEVICES "
        "&& ray start --head --resources='{\"NPU\": 16}'",
    ),
    (
        V.check_network,
        environment(RANK_TABLE_FILE="/user/rank_table.json"),
        "fail  network: RANK_TABLE_FILE is set: HCCL would take the ranks of that file, perhaps of another cl",
    ),
    (
        V.check_network,
        environment(HCCL_IF_IP="192.0.2.7"),
        "fail  network: HCCL_IF_IP=192.0.2.7 is no address of this machine; ADDRESS=<this machine's own>",
    ),
    (
        V.check_network,
        environment(HCCL_SOCKET_IFNAME="=eth", GLOO_SOCKET_IFNAME="eth0"),
        "fail  network: HCCL_SOCKET_IFNAME==eth: this machine has eth0; INTERFACE=<its own name on each machine>",
    ),
    (
        V.check_network,
        environment(NODES="2"),
        "warn  network: /etc/hccn.conf is missing, which has the addresses of the dies; docker run ... -v",
    ),
    (
        V.check_ports,
        attribute(port_is_free=lambda port: port not in (60000, 60001)),
        "fail  HCCL ports: in use: 60000-60001 of 60000-60031 (EJ0003, EI0019); ss -ltnp 'sport = :60000'",
    ),
    (
        V.check_ports,
        file("proc/sys/net/ipv4/ip_local_reserved_ports", "\n"),
        "warn  HCCL ports: 60000-60031 are free, but the system may lend them to outgoing connections; on",
    ),
    (V.check_timeouts, environment(HCCL_CONNECT_TIMEOUT="7201"), "fail  time-outs: HCCL_CONNECT_TIMEOUT is not in 120"),
    (
        V.check_timeouts,
        environment(HCCL_EXEC_TIMEOUT="1h"),
        "fail  time-outs: HCCL_EXEC_TIMEOUT is not a number of sec",
    ),
    (
        V.check_expansion_mode,
        environment(HCCL_OP_EXPANSION_MODE="AIV"),
        "fail  HCCL_OP_EXPANSION_MODE: AIV allows HCCL_EXEC_TIMEOUT 1091 at most",
    ),
    (
        V.check_allocator,
        environment(PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:64", PYTORCH_ALLOC_CONF="x"),
        "fail  allocator: PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set",
    ),
    (
        V.check_allocator,
        environment(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"),
        "fail  allocator: expandable_segments and vLLM's memory pools (graph capture, sleep mode) exclude each other",
    ),
    (
        V.check_task_queue,
        environment(TASK_QUEUE_ENABLE="2"),
        "fail  TASK_QUEUE_ENABLE: 2 and graph capture (rollout.enforce_eager: false) exclude each other",
    ),
    (V.check_vllm_variables, environment(VLLM_DP_SIZE="16", VLLM_DP_RANK="0"), "fail  vLLM variables: VLLM_DP_RANK, V"),
    (V.check_jemalloc, environment(LD_PRELOAD=None), "warn  jemalloc: not preloaded: host memory grows more"),
    (D.check_open_files, attribute(open_files=1024), "warn  open files: ulimit -n is 1024; ulimit -n 32768"),
    (
        D.check_shared_memory,
        attribute(free_bytes=lambda folder: 2**26 if folder.name == "shm" else 500 * GIB),
        "warn  /dev/shm: 64 MiB free; docker run --shm-size=64g",
    ),
    (
        D.check_ram,
        file("proc/meminfo", "MemAvailable: 8388608 kB\n"),
        "warn  memory: 8.0 GiB available, 32.0 wanted by 16",
    ),
    (D.check_model_files, model(SHARD, None), f"fail  model: {SHARD} is missing, of 2 files in"),
    (
        D.check_model_files,
        model(SHARD, b"version https://git-lfs"),
        f"fail  model: {SHARD} is no safetensors file, or c",
    ),
    (
        D.check_model_files,
        lambda where: os.truncate(path := Path(where.run.model.path) / SHARD, path.stat().st_size - 1),
        f"fail  model: {SHARD} has ",
    ),
    (D.check_data_files, lambda where: Path(where.run.data.test_path).write_text(""), "fail  data: data.test_path: "),
    (
        D.check_disk,
        attribute(free_bytes=lambda folder: 5 * GIB),
        "fail  disk: 5.0 GiB free for ",
    ),
    (D.check_git, command("git", 0, " M train_grpo.py\n?? new.py\n"), "warn  git: 2 changed or new files, e.g. train_"),
]


CUDA_FAULTS = [
    (D.check_cuda, file("proc/driver/nvidia/version", None), "warn  driver: unknown: no /proc/driver/nvidia/version"),
    (
        D.check_packages,
        versions(CUDA_VERSIONS, pydantic=None, pyarrow=None),
        "fail  packages: not installed: pyarrow, pydantic; pip install --no-deps -r requirements/cuda.txt",
    ),
    (D.check_cuda, environment(CUDA_VISIBLE_DEVICES="0,1"), "fail  devices: 8 in /dev, 2 visible, 8 wanted"),
    (N.check_torch_build, versions(torch="2.10.0+cpu"), "fail  torch build: 2.10.0+cpu is not for CUDA"),
    (
        D.check_cuda_versions,
        versions(CUDA_VERSIONS, torch="2.11.0+cu129"),
        "warn  versions: torch 2.11.0+cu129; needed: 2.13.0",
    ),
    (D.check_cuda_runtime, memory(8, taken=50), "fail  device memory: taken before the run starts: 7: 50 GiB"),
]


@pytest.mark.parametrize(
    ("healthy", "check", "plant", "line"),
    [(npu, *fault) for fault in FAULTS] + [(cuda, *fault) for fault in CUDA_FAULTS],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_fault_is_found_by_its_check(healthy, check, plant, line, tmp_path) -> None:
    where = healthy(tmp_path)
    assert check in doctor.CHECKS[where.kind] + doctor.RUN
    plant(where)
    lines = [str(finding) for finding in check(where)]
    assert any(said.startswith(line) for said in lines), lines
    level = line.split()[0]
    assert all(finding.todo for finding in check(where) if finding.level in ("warn", "fail"))
    assert any(finding.level == level for finding in doctor.examine(where))


def test_a_sandbox_that_hides_the_drivers_file_is_not_refused_and_a_device_that_does_not_open_is(tmp_path) -> None:
    where = cuda(tmp_path)
    file("proc/driver/nvidia/version", None)(where)
    assert not [finding for finding in doctor.examine(where) if finding.level == "fail"]
    command("mem_get_info", 1, "RuntimeError: Found no NVIDIA driver on your system")(where)
    where = dataclasses.replace(where)  # without the answer of before
    failed = [str(finding) for finding in doctor.examine(where) if finding.level == "fail"]
    assert failed[0].startswith("fail  CUDA: torch cannot open the devices: RuntimeError: Found no NVIDIA driver")


@pytest.mark.parametrize(
    ("installed", "autoload", "level"), [(True, {}, "fail"), (False, {}, "ok"), (True, {AUTO: "0"}, "ok")]
)
def test_torch_npu_on_a_machine_without_npus_is_the_trap_that_it_is(installed, autoload, level, tmp_path) -> None:
    version = {"torch": "2.13.0+cpu", "torch-npu": "2.13.0" if installed else None}.get
    where = Machine(root=tmp_path, env=autoload, version=version, free_bytes=lambda folder: GIB)
    assert where.kind == "cpu"
    said = {f.what: f for f in doctor.examine(where)}["torch_npu"]
    assert said.level == level and (AUTO in said.todo) == (level == "fail")


def test_every_check_has_a_planted_fault() -> None:
    checks = {check for table in (*doctor.CHECKS.values(), doctor.RUN) for check in table}
    assert checks == {check for check, _, _ in FAULTS + CUDA_FAULTS}


# -------------------------------------------------------------------------------------------------- quick, and the CLI


def test_quick_asks_no_program_library_or_port_and_says_what_is_wrong(tmp_path, monkeypatch, capsys) -> None:
    where = npu(tmp_path)
    environment(TASK_QUEUE_ENABLE="2")(where)

    def refuse(*args):
        raise AssertionError("not quick")

    where.command = where.library_error = where.port_is_free = refuse
    monkeypatch.setattr(doctor, "Machine", lambda **given: where)
    doctor.quick(where.run)
    assert capsys.readouterr().err.splitlines() == [
        "fail  TASK_QUEUE_ENABLE: 2 and graph capture (rollout.enforce_eager: false) exclude each other; "
        "export TASK_QUEUE_ENABLE=1, or rollout.enforce_eager=true"
    ]
    monkeypatch.setenv("LOCAL_RANK", "3")
    doctor.quick(where.run)
    assert capsys.readouterr().err == ""


def test_command_line_exit_codes(tmp_path, monkeypatch, capsys) -> None:
    where = npu(tmp_path)
    monkeypatch.setattr(doctor, "Machine", lambda **given: where)
    where.open_files = 1024
    assert doctor.main([]) == 0  # a warning is not a failure
    environment(VLLM_DP_SIZE="4")(where)
    capsys.readouterr()
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"level", "what", "found", "todo"} == set(found[0]) and "fail" in {f["level"] for f in found}
    assert doctor.main(["nowhere.yaml"]) == 2


def test_the_doctor_runs_on_this_very_machine() -> None:
    done = subprocess.run(
        [sys.executable, "preflight.py", "--doctor", "configs/tiny_cpu.yaml", "device=cpu", "--ranks", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "fail" not in done.stdout.splitlines()[-2], done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("cpu: ")
