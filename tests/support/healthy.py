"""A server with NPUs and a server with GPUs on which everything is right, made of files, variables and fakes."""

import json
from pathlib import Path

from source import ROOT

from facts import variables
from inputs.config import load_config
from plan.doctor import Machine

GIB = 2**30
VERSIONS = {  # the versions of requirements/npu.txt
    "CANN": "9.1.0",
    "Python": "3.12.11",
    "torch": "2.10.0+cpu",
    "torch-npu": "2.10.0.post4",
    "triton": "?",  # triton-ascend installs a folder of this name
    "triton-ascend": "3.2.2",
    "transformers": "5.5.4",
    "vllm": "0.23.0+empty",
    "vllm-ascend": "0.23.0.post1",
    "megatron-core": "0.16.1",
    "mindspeed": "0.16.0",
} | dict.fromkeys(variables.OUR_PACKAGES, "1.0")
CUDA_VERSIONS = {  # the versions of requirements/cuda.txt
    "Python": "3.12.11",
    "torch": "2.13.0+cu130",
    "transformers": "5.19.0",
    "vllm": "0.30.0",
    "megatron-core": "0.16.1",
} | dict.fromkeys(variables.OUR_PACKAGES, "1.0")
# The two dies of the first card of a 910C; the lines are from vllm-ascend's issue 2534.
NPU_SMI = """
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
"""
ENVIRONMENT = {
    "ASCEND_HOME_PATH": "/usr/local/Ascend/cann",
    "HCCL_CONNECT_TIMEOUT": "1800",
    "HCCL_EXEC_TIMEOUT": "3600",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so.2",
}
FILES = {
    **dict.fromkeys([f"dev/davinci{die}" for die in range(16)], ""),
    **dict.fromkeys(["dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc", "dev/shm/file"], ""),
    "usr/local/Ascend/driver/version.info": "Version=25.3.rc1\npackage=driver\n",
    "usr/local/Ascend/cann/set_env.sh": "",
    "proc/meminfo": "MemTotal: 2000000000 kB\nMemAvailable: 1900000000 kB\n",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    "proc/sys/net/ipv4/ip_local_reserved_ports": "60000-60050\n",
    "sys/class/net/lo": "",
    "sys/class/net/eth0": "",
}


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def answers(command: list[str], memory: tuple[tuple[int, int], ...] = ((59 * GIB, 61 * GIB),) * 16) -> tuple[int, str]:
    """Exit code and output of the programs of a healthy machine."""
    if command[0] == "npu-smi":
        return 0, NPU_SMI
    return 0, f"a warning\n{json.dumps(memory)}\n"


def npu(tmp_path: Path, *overrides: str) -> Machine:
    """A healthy 910C server for a run of configs/qwen3.yaml with graphs, some of whose variables exclude each other."""
    values = ["rollout.enforce_eager=false", f"train.out_dir={tmp_path}/out", *overrides]
    run = load_config(ROOT / "configs" / "qwen3.yaml", [f"model.path={tmp_path}/Qwen3-30B-A3B-Instruct-2507", *values])
    machine = Machine(run=run, ranks=16, env=dict(ENVIRONMENT), root=tmp_path / "root")
    for path, text in FILES.items():
        write(machine.root / path, text)
    machine.version = VERSIONS.get
    machine.package_file = lambda package, name: "# Auto-generated file\n__device_type__ = 'A3'\n"
    machine.command = answers
    machine.can_listen = lambda address, port: address in ("", "192.0.2.1")
    machine.free_bytes = lambda folder: 500 * GIB
    machine.open_files = lambda: 65536
    return machine


def cuda(tmp_path: Path) -> Machine:
    machine = npu(tmp_path, "device=cuda", "rollout.expert_parallel=false")
    write(machine.root / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Kernel Module  580.95  Wed\n")
    machine.ranks = 8
    machine.version = CUDA_VERSIONS.get
    return machine
