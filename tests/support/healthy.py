"""A server with NPUs and one with GPUs on which everything is right, made of files, variables and stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

from published import QWEN3_30B_A3B
from source import ROOT

from config import load_config
from inputs import environment
from knobs import Config
from plan.machine import Machine

GIB = 2**30
VERSIONS = {  # the versions of requirements/npu.txt
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
    "ray": "2.53.0",
} | dict.fromkeys(environment.OUR_PACKAGES, "1.0")
CUDA_VERSIONS = {  # the versions of requirements/cuda.txt
    "Python": "3.12.11",
    "torch": "2.13.0+cu130",
    "transformers": "5.19.0",
    "vllm": "0.30.0",
    "megatron-core": "0.16.1",
} | dict.fromkeys(environment.OUR_PACKAGES, "1.0")
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
    "PATH": "/usr/bin",
    "HCCL_CONNECT_TIMEOUT": "1800",
    "HCCL_EXEC_TIMEOUT": "3600",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so.2",
}


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def safetensors(path: Path, data: int = 64) -> Path:
    """A file whose header announces ``data`` bytes, and which holds them."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [data // 4], "data_offsets": [0, data]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    return path


def qwen3(tmp_path: Path, *overrides: str) -> Config:
    """configs/qwen3.yaml for a small but complete model folder and two data files."""
    folder = tmp_path / "Qwen3"
    if not folder.exists():
        write(folder / "config.json", json.dumps(QWEN3_30B_A3B))
        write(folder / "tokenizer.json", "{}")
        shards = [safetensors(folder / f"model-0000{i}-of-00002.safetensors").name for i in (1, 2)]
        index = {"weight_map": {"a": shards[0], "b": shards[1]}}
        write(folder / "model.safetensors.index.json", json.dumps(index))
        write(tmp_path / "train.jsonl", "{}\n")
        write(tmp_path / "test.jsonl", "{}\n")
    paths = [f"model.path={folder}", f"data.train_path={tmp_path}/train.jsonl", f"data.test_path={tmp_path}/test.jsonl"]
    paths += ["parallel.timeout_seconds=3900", f"train.out_dir={tmp_path}/out"]
    if "rollout.engine=torch" not in overrides:
        paths.append("rollout.enforce_eager=false")  # some variables are not allowed with graphs
    return load_config(ROOT / "configs" / "qwen3.yaml", [*paths, *overrides])


def answers(command: list[str]) -> tuple[int, str]:
    """Exit code and output of the programs of a healthy machine."""
    if command[0] == "git":
        return 0, ""
    if command[0] == "npu-smi":
        return 0, NPU_SMI
    if "mem_get_info" in command[2]:
        nccl = "2.27.5" if command[3] == "cuda" else ""
        return 0, "a warning\n" + json.dumps({"memory": [[59 * GIB, 61 * GIB]] * 16, "nccl": nccl}) + "\n"
    if "ray" in command[2]:
        return 0, "16.0\n"
    return 0, ""


def npu(tmp_path: Path, *overrides: str) -> Machine:
    """A healthy 910C server."""
    root = tmp_path / "root"
    for die in range(16):
        write(root / "dev" / f"davinci{die}")
    for name in ("davinci_manager", "devmm_svm", "hisi_hdc"):  # devices that are not dies
        write(root / "dev" / name)
    (root / "dev" / "shm").mkdir()
    for tool in ("g++", "ninja"):
        write(root / "usr/bin" / tool)
    write(root / "usr/local/Ascend/driver/version.info", "Version=25.3.rc1\npackage=driver\n")
    write(root / "usr/local/Ascend/cann/set_env.sh")
    info = root / "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info"
    write(info, "package_name=Ascend-cann-toolkit\nversion=9.1.0\n")
    write(root / "proc/meminfo", "MemTotal: 2000000000 kB\nMemAvailable: 1900000000 kB\n")
    write(root / "proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    for interface in ("lo", "eth0"):
        (root / "sys/class/net" / interface).mkdir(parents=True)
    write(root / "proc/sys/net/ipv4/ip_local_reserved_ports", "60000-60050\n")
    write(root / "tmp/ray/ray_current_cluster")
    return Machine(
        run=qwen3(tmp_path, *overrides),
        ranks=16,
        env=dict(ENVIRONMENT),
        root=root,
        version=VERSIONS.get,
        package_file=lambda package, name: "# Auto-generated file\n__device_type__ = 'A3'\n",
        command=answers,
        library_error=lambda name: "",
        port_is_free=lambda port: True,
        is_own_address=lambda address: address == "192.0.2.1",
        free_bytes=lambda folder: 500 * GIB,
        open_files=65536,
    )


def cuda(tmp_path: Path) -> Machine:
    healthy = npu(tmp_path, "device=cuda", "rollout.expert_parallel=false")
    for die in range(8):
        write(healthy.root / "dev" / f"nvidia{die}")
    write(healthy.root / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Kernel Module  580.95  Wed\n")
    healthy.ranks, healthy.version = 8, CUDA_VERSIONS.get
    return healthy
