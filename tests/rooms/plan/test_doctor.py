"""Every row of the doctor finds that what it asks for is taken away. Its questions really reach the machine."""

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from healthy import CUDA_VERSIONS, ENVIRONMENT, GIB, ROOT, VERSIONS, answers, cuda, npu, write

from inputs.config import load_config
from plan import doctor
from plan.doctor import Machine

ROWS = doctor.QUICK + doctor.SLOW
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@pytest.mark.parametrize(("healthy", "least"), [(npu, 25), (cuda, 8)])
def test_a_healthy_machine_has_nothing_but_ok(healthy, least, tmp_path) -> None:
    findings = doctor.examine(healthy(tmp_path), ROWS)
    assert [str(finding) for finding in findings if finding.level != "ok"] == []
    assert len(findings) >= least


# ------------------------------------------------------------------------------------------------- what is taken away

Plant = Callable[[Machine], object]


def variables(**changes: str | None) -> Plant:
    """Other environment variables; None: not set."""
    env = {name: value for name, value in (ENVIRONMENT | changes).items() if value is not None}
    return lambda where: setattr(where, "env", env)


def package(known: dict, name: str, version: str | None) -> Plant:
    return lambda where: setattr(where, "version", (known | {name: version}).get)


def answer(**questions: object) -> Plant:
    """Other answers of the system to some questions of Machine, or other attributes."""
    return lambda where: vars(where).update(questions)


def fails(containing: str, output: str) -> Plant:
    """The program whose command line contains this text fails."""
    return answer(command=lambda words: (1, output) if containing in " ".join(words) else answers(words))


def memory(count: int, taken: int = 2) -> Plant:
    """torch counts so many devices; on the last one so many GiB are in use."""
    devices = ((59 * GIB, 61 * GIB),) * (count - 1) + (((61 - taken) * GIB, 61 * GIB),)
    return answer(command=lambda words: answers(words, devices))


def file(path: str, text: str | None = None) -> Plant:
    """A system file with other content, or without the file."""
    return lambda where: (where.root / path).unlink() if text is None else write(where.root / path, text)


def config(*overrides: str) -> Plant:
    return lambda where: setattr(where, "run", npu(where.root.parent / "other", *overrides).run)


def both(*plants: Plant) -> Plant:
    return lambda where: [plant(where) for plant in plants]


def four_dies_are_missing(where: Machine) -> None:
    for die in range(12, 16):
        (where.root / f"dev/davinci{die}").unlink()
    where.ranks = None


NPU_FAULTS = [  # (the line of the doctor, what is taken away)
    ("fail  driver: missing: /usr/local/Ascend/driver/ver", file("usr/local/Ascend/driver/version.info")),
    ("fail  CANN: ASCEND_HOME_PATH is not set", variables(ASCEND_HOME_PATH=None)),
    ("fail  torch: 2.10.0+cu128; needed", package(VERSIONS, "torch", "2.10.0+cu128")),
    ("fail  packages: not installed: pyarrow;", package(VERSIONS, "pyarrow", None)),
    ("fail  packages: not installed: torch-npu;", package(VERSIONS, "torch-npu", None)),
    ("warn  packages: mindspeed not found instead of 0.16.0; needed", package(VERSIONS, "mindspeed", None)),
    ("fail  packages: torch-npu 2.9.0 with torch 2.10.0+cpu", package(VERSIONS, "torch-npu", "2.9.0")),
    ("fail  packages: vllm-ascend 0.22.0 with vllm 0.23.0", package(VERSIONS, "vllm-ascend", "0.22.0")),
    ("warn  packages: vllm-ascend 0.23.0 instead of 0.23.0.post1; needed", package(VERSIONS, "vllm-ascend", "0.23.0")),
    ("fail  triton: 3.6.0; needed", package(VERSIONS, "triton", "3.6.0")),
    ("fail  dies: missing: /dev/hisi_hdc", file("dev/hisi_hdc")),
    ("fail  dies: 12 dies in /dev; missing: davinci12, davinci13, davinci14, davinci15;", four_dies_are_missing),
    ("fail  dies: visible: 0,1,2,3; needed", variables(ASCEND_RT_VISIBLE_DEVICES="0,1,2,3")),
    ("warn  dies: visible: 0,1,4,5; needed", both(answer(ranks=4), variables(ASCEND_RT_VISIBLE_DEVICES="0,1,4,5"))),
    ("fail  RANK_TABLE_FILE: /user/ranks.json", variables(RANK_TABLE_FILE="/user/ranks.json")),
    ("fail  HCCL_IF_IP: 192.0.2.7; needed", variables(HCCL_IF_IP="192.0.2.7")),
    ("fail  HCCL's interface: =eth; this mach", variables(HCCL_SOCKET_IFNAME="=eth")),
    ("fail  gloo's interface: eth; this mach", variables(GLOO_SOCKET_IFNAME="eth")),
    ("warn  addresses of dies: missing: /etc/hccn.conf", variables(NODES="2")),
    ("fail  HCCL_CONNECT_TIMEOUT: 7201; needed", variables(HCCL_CONNECT_TIMEOUT="7201")),
    ("warn  HCCL_CONNECT_TIMEOUT: not set, so 120; needed", variables(HCCL_CONNECT_TIMEOUT=None)),
    ("fail  HCCL_EXEC_TIMEOUT: 1h; needed", variables(HCCL_EXEC_TIMEOUT="1h")),
    ("warn  HCCL_EXEC_TIMEOUT: 0; needed", variables(HCCL_EXEC_TIMEOUT="0")),
    (
        "warn  time-outs: HCCL 3600 s, train.stall_seconds 1200, parallel.timeout_seconds 3600; needed",
        config("parallel.timeout_seconds=3600"),
    ),
    ("fail  HCCL_OP_EXPANSION_MODE: AIV with HCCL_EXEC_TIMEOUT 3600; needed", variables(HCCL_OP_EXPANSION_MODE="AIV")),
    ("warn  HCCL_OP_EXPANSION_MODE: AIV; needed", variables(HCCL_OP_EXPANSION_MODE="AIV", HCCL_EXEC_TIMEOUT="1091")),
    (
        "fail  allocator: PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF; needed",
        variables(PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:64", PYTORCH_ALLOC_CONF="x"),
    ),
    (
        "fail  allocator: PYTORCH_ALLOC_CONF=max_split_size_mb:64; needed",
        variables(PYTORCH_ALLOC_CONF="max_split_size_mb:64"),
    ),
    ("fail  allocator: expandable_segments:True; needed", variables(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")),
    (
        "warn  allocator: expandable_segments:True; needed",
        both(
            config("rollout.enforce_eager=true"),
            variables(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"),
        ),
    ),
    ("fail  TASK_QUEUE_ENABLE: 2; needed", variables(TASK_QUEUE_ENABLE="2")),
    ("warn  ASCEND_LAUNCH_BLOCKING: 1;", variables(ASCEND_LAUNCH_BLOCKING="1")),
    (
        "fail  vLLM variables: VLLM_DP_SIZE=16, VLLM_ASCEND_ENABLE_NZ=1; needed",
        variables(VLLM_DP_SIZE="16", VLLM_ASCEND_ENABLE_NZ="1"),
    ),
    ("warn  open files: ulimit -n is 1024; needed: 32768", answer(open_files=lambda: 1024)),
    ("fail  libascendcl: OSError: no such file", fails("libascendcl.so", "OSError: no such file")),
    ("fail  libhccl: OSError: no such file", fails("libhccl.so", "OSError: no such file")),
    ("fail  libatb: OSError: no such file", fails("libatb.so", "OSError: no such file")),
    ("fail  acl: No module named 'acl'", fails("import acl", "No module named 'acl'")),
    (
        "fail  chip: vllm-ascend is built for A2, npu-smi lists A3 (image v0.23.0-a3); needed",
        answer(package_file=lambda *of: "__device_type__ = 'A2'\n"),
    ),
    ("warn  vLLM kernels: ImportError: symbol", fails("vllm_ascend_C", "ImportError: symbol")),
    ("fail  devices: torch counts 12; in use by others: nothing; needed", memory(12)),
    ("fail  devices: torch counts 16; in use by others: 30 GiB of device 15; needed", memory(16, taken=30)),
    (
        "fail  HCCL ports: in use: 60000, 60001; needed",
        answer(can_listen=lambda address, port: port not in (60000, 60001)),
    ),
    (
        "warn  HCCL ports: free, but the system gives 60000, 60001, 60002 and 29 more to outgoing connections;",
        file("proc/sys/net/ipv4/ip_local_reserved_ports", "\n"),
    ),
    ("warn  LD_PRELOAD: not set; needed: jemalloc", variables(LD_PRELOAD=None)),
    (
        "warn  /dev/shm: 64 MiB free; needed: 1 GiB",
        answer(free_bytes=lambda folder: 2**26 if folder.name == "shm" else 500 * GIB),
    ),
    (
        "warn  memory: 8.0 GiB available, processes and a checkpoint need 46.3; needed",
        file("proc/meminfo", "MemAvailable: 8388608 kB\n"),
    ),
    ("fail  disk: 5.0 GiB free for ", answer(free_bytes=lambda folder: 5 * GIB)),
]
CUDA_FAULTS = [  # (the line of the doctor, what is taken away)
    # A sandbox may hide this file. Then devices that open are enough.
    ("warn  driver: missing: /proc/driver/nvidia/version", file("proc/driver/nvidia/version")),
    ("fail  torch: 2.13.0+cpu; needed", package(CUDA_VERSIONS, "torch", "2.13.0+cpu")),
    ("fail  packages: not installed: pydantic;", package(CUDA_VERSIONS, "pydantic", None)),
    ("warn  packages: torch 2.11.0+cu129 instead of 2.13.0; needed", package(CUDA_VERSIONS, "torch", "2.11.0+cu129")),
    ("fail  devices: torch counts 2; in use by others: nothing; needed", memory(2)),
    ("fail  devices: torch counts 8; in use by others: 30 GiB of device 7; needed", memory(8, taken=30)),
    (
        "fail  devices: torch cannot open them: RuntimeError: Found no NVIDIA driver on your system; needed",
        fails("mem_get_info", "Traceback\nRuntimeError: Found no NVIDIA driver on your system"),
    ),
]


@pytest.mark.parametrize(
    ("healthy", "line", "plant"),
    [(npu, *fault) for fault in NPU_FAULTS] + [(cuda, *fault) for fault in CUDA_FAULTS],
    ids=lambda value: value.partition(";")[0] if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_what_a_row_asks_for_is_missed_when_it_is_taken_away(healthy, line, plant, tmp_path) -> None:
    where = healthy(tmp_path)
    plant(where)
    findings = doctor.examine(where, ROWS)
    (finding,) = [finding for finding in findings if str(finding).startswith(line)]
    assert line.startswith("fail") or "fail" not in {finding.level for finding in findings}
    assert finding.todo and finding.todo in {row.todo for row in ROWS if row.what == finding.what}


@pytest.mark.parametrize(
    ("version", "why"), [(None, "is not installed"), ("0.23.0", "does not say for which chip it is built")]
)
def test_a_chip_that_nothing_was_compared_with_is_not_known(version: str | None, why: str) -> None:
    machine = Machine()
    vars(machine).update(package_file=lambda *of: "", version=lambda name: version)
    assert doctor.chip(machine) == (True, f"not known: vllm-ascend {why}")


@pytest.mark.parametrize(("healthy", "faults"), [(npu, NPU_FAULTS), (cuda, CUDA_FAULTS)])
def test_every_row_has_a_fault(healthy, faults) -> None:
    kind = healthy.__name__
    rows = [row for row in ROWS if kind in row.device or (kind == "npu" and row.device in ("", "run", "accelerator"))]
    planted = Counter(line.partition(": ")[0] for line, _ in faults)
    assert Counter(f"{row.level}  {row.what}" for row in rows) <= planted


@pytest.mark.parametrize(
    ("installed", "autoload", "level"), [("2.13.0", {}, "fail"), (None, {}, "ok"), ("2.13.0", {AUTOLOAD: "0"}, "ok")]
)
def test_torch_npu_on_a_machine_without_npus_is_the_trap_that_it_is(installed, autoload, level, tmp_path) -> None:
    where = Machine(root=tmp_path, env=autoload)
    package({}, "torch-npu", installed)(where)
    assert where.kind == "cpu"
    said = {finding.what: finding for finding in doctor.examine(where, ROWS)}["torch_npu"]
    assert said.level == level and (AUTOLOAD in said.todo) == (level == "fail")


def test_the_newer_set_of_versions_is_a_set_of_its_own(tmp_path) -> None:
    where = npu(tmp_path)
    newer = VERSIONS | {"transformers": "5.14.1", "vllm": "0.30.0+empty", "vllm-ascend": "0.30.0rc2"}
    said = []
    for cann in ("9.2.0", "9.1.0"):
        package(newer, "CANN", cann)(where)
        said += [str(finding) for finding in doctor.examine(where, doctor.QUICK) if finding.what == "packages"]
    variables(PYTORCH_ALLOC_CONF="max_split_size_mb:64")(where)  # the older vllm-ascend alone cannot have it
    assert {finding.what: finding.level for finding in doctor.examine(where, doctor.QUICK)}["allocator"] == "ok"
    assert said[0].startswith("ok    packages: CANN 9.2.0") and said[1].startswith(
        "warn  packages: CANN 9.1.0 instead of 9.2; needed"
    )


# -------------------------------------------------------------------------------------------------- quick, and the CLI


def test_quick_asks_no_program_or_port_and_says_what_is_wrong(tmp_path, monkeypatch, capsys) -> None:
    where = npu(tmp_path)
    both(variables(TASK_QUEUE_ENABLE="2"), answer(command=None, can_listen=None))(where)  # a call of None raises
    monkeypatch.setattr(doctor, "Machine", lambda **given: where)
    doctor.quick(where.run)
    assert capsys.readouterr().err.splitlines() == [
        "fail  TASK_QUEUE_ENABLE: 2; needed: not 2 with graph capture; "
        "export TASK_QUEUE_ENABLE=1, or rollout.enforce_eager=true"
    ]
    monkeypatch.setenv("LOCAL_RANK", "3")
    doctor.quick(where.run)
    assert capsys.readouterr().err == ""


def test_command_line_exit_codes(tmp_path, monkeypatch, capsys) -> None:
    where = npu(tmp_path)
    monkeypatch.setattr(doctor, "Machine", lambda **given: where)
    answer(open_files=lambda: 1024)(where)
    assert doctor.main([]) == 0  # a warning is not a failure
    variables(VLLM_DP_SIZE="4")(where)
    capsys.readouterr()
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"level", "what", "found", "todo"} == set(found[0]) and "fail" in {f["level"] for f in found}
    assert doctor.main(["nowhere.yaml"]) == 2


def test_the_doctor_runs_on_this_very_machine() -> None:
    done = subprocess.run(
        [sys.executable, "preflight.py", "--doctor", "configs/tiny_cpu.yaml", "device=cpu", "--ranks", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("cpu: 4 ok"), done.stdout + done.stderr


# ------------------------------------------------------------------------------------------- questions to this machine


def test_a_port_is_really_tried() -> None:
    with socket.socket() as server:
        # Nobody else gets a bound port, and whoever sets this option too, as can_listen does, can listen on it.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", 0))
        port = server.getsockname()[1]
        assert Machine().can_listen("", port)
        server.listen(1)
        assert not Machine().can_listen("", port)
    assert Machine().can_listen("127.0.0.1", 0) and not Machine().can_listen("192.0.2.7", 0)


def test_a_library_a_module_and_a_program_are_really_tried() -> None:
    assert doctor.python("import json", Machine()) == (True, "works")
    is_there, said = doctor.python("import ctypes; ctypes.CDLL('no_such_library.so')", Machine())
    assert not is_there and said.startswith("OSError: no_such_library.so")
    assert Machine().command(["no-such-command"])[0] == 127
    assert Machine().command([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.2)[0] == 124


def test_versions_and_files_of_packages_are_read_without_importing_them(tmp_path, monkeypatch) -> None:
    write(tmp_path / "vllm_of_a_test/__init__.py", "raise ImportError('libhccl.so')")
    write(tmp_path / "vllm_of_a_test/_build_info.py", "__device_type__ = 'A3'\n")
    write(tmp_path / "cann/aarch64-linux/ascend_toolkit_install.info", "package_name=toolkit\nversion=9.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    here = Machine(root=tmp_path, env={"ASCEND_HOME_PATH": "/cann"})
    assert here.package_file("vllm_of_a_test", "_build_info.py") == "__device_type__ = 'A3'\n"
    assert here.package_file("vllm_of_a_test", "other.py") == here.package_file("no_such_package", "x.py") == ""
    assert (here.version("vllm-of-a-test"), here.version("no-such-package"), here.version("CANN")) == (
        "?",
        None,
        "9.1.0",
    )
    assert here.version("torch").endswith("+cpu")


@pytest.mark.parametrize(
    ("node", "device", "kind"),
    [("davinci0", "auto", "npu"), ("nvidia0", "auto", "cuda"), ("null", "auto", "cpu"), ("davinci0", "cpu", "cpu")],
)
def test_kind_of_machine(node, device, kind, tmp_path) -> None:
    write(tmp_path / "dev" / node)
    cfg = load_config(ROOT / "configs" / "tiny_cpu.yaml", [f"device={device}"])
    assert Machine(run=cfg, root=tmp_path, env={}).kind == kind
