"""A simulated device for the dry run. Its tensors have shapes but no storage.

It replaces an NPU or a GPU, and everything that the trainer calls on such a device. The simulated operators of
torch_npu return tensors of the right shapes. They keep the same tensors for the backward pass as the real operators,
because these tensors determine the memory use. tests/rooms/checks/test_dry_run.py compares the bytes of whole steps
with those of the real package.
For a GPU the tensors have another device type, because torch without CUDA has no backward pass for tensors of type
cuda. Their operators are torch's own. Collectives do nothing. If the code branches on a value, that value is made up.
Megatron's dispatcher gets token counts from a plan instead of from a router.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_setup
from facts.architectures import Architecture, tensor_shapes
from hardware import device as devices
from knobs import ParallelConfig

aten = torch.ops.aten
STATISTICS = 8  # fp32 numbers for each query of a head, in each of two tensors that npu_fusion_attention keeps
# kind of device -> the device type of the tensors that replace its tensors. torch reserves the name cuda.
STAND_IN = {"cpu": "cpu", "npu": "npu", "cuda": "cuda_stand_in"}

# ------------------------------------------------------------------------------------------------ operators


def _grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type):
    (x,), (weight,) = x, weight
    if group_type == 2:  # (k, N) (N, o) -> (E, k, o)
        return [x.new_empty(len(group_list), x.shape[0], weight.shape[1])]
    return [x.new_empty(x.shape[0], weight.shape[2])]


def _rms_norm(x, gamma, epsilon):
    rows = x.shape[: x.dim() - gamma.dim()]
    return torch.empty_like(x), x.new_empty(*rows, *[1] * gamma.dim(), dtype=torch.float32)


def _attention(query, key, value, heads, layout, mask, **options):
    statistics = [query.new_empty(*query.shape[:3], STATISTICS, dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(query), *statistics


# operator with the arguments that hardware/kernels.py uses, named and ordered as in torch_npu -> a function that
# returns tensors with the shapes of the results
OPERATORS: dict[str, Callable] = {
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor group_list, int split_item, int group_type, "
    "int group_list_type) -> Tensor[]": _grouped_matmul,
    "npu_rms_norm(Tensor self, Tensor gamma, float epsilon) -> (Tensor, Tensor)": _rms_norm,
    "npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)": (
        lambda dy, x, gamma, rstd: (torch.empty_like(x), torch.empty_like(gamma, dtype=torch.float32))
    ),
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? atten_mask, *, float scale, int sparse_mode, float keep_prob) -> (Tensor, Tensor, Tensor)": _attention,
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor softmax_max, "
    "Tensor softmax_sum, Tensor attention_in, *, int sparse_mode) -> (Tensor, Tensor, Tensor)": (
        lambda query, key, value, *others, **options: tuple(map(torch.empty_like, (query, key, value)))
    ),
    "npu_swiglu(Tensor self, *, int dim) -> Tensor": lambda x, *, dim: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    "npu_swiglu_backward(Tensor dy, Tensor self) -> Tensor": lambda dy, x: torch.empty_like(x),
    "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2) -> Tensor": lambda x, cos, sin: torch.empty_like(x),
    "npu_rotary_mul_backward(Tensor dy, Tensor self, Tensor r1, Tensor r2) -> Tensor": (
        lambda dy, x, cos, sin: torch.empty_like(x)
    ),
}


# ------------------------------------------------------------------------------------------------ their gradients


def _keep_inputs(ctx, inputs, output, keyword_only_inputs=None) -> None:
    ctx.save_for_backward(*inputs)


def _rms_norm_keeps(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2], output[1])


def _rms_norm_backward(ctx, dy, unused):
    return *torch.ops.npu.npu_rms_norm_backward(dy, *ctx.saved_tensors), None


def _attention_keeps(ctx, inputs, keyword_only_inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output[1:], output[0])
    ctx.sparse_mode = keyword_only_inputs["sparse_mode"]


def _attention_backward(ctx, dy, *unused):
    query, key, value, *kept = ctx.saved_tensors
    grads = torch.ops.npu.npu_fusion_attention_grad(query, key, value, dy, *kept, sparse_mode=ctx.sparse_mode)
    return *grads, None, None, None  # the number of heads, the layout, the mask


# operator -> a function that saves tensors for the backward pass, and a function that returns the gradients of the
# positional arguments
GRADIENTS: dict[str, tuple[Callable, Callable]] = {
    "npu_rms_norm": (_rms_norm_keeps, _rms_norm_backward),
    "npu_fusion_attention": (_attention_keeps, _attention_backward),
    "npu_swiglu": (_keep_inputs, lambda ctx, dy: torch.ops.npu.npu_swiglu_backward(dy, *ctx.saved_tensors)),
    "npu_rotary_mul": (
        _keep_inputs,
        lambda ctx, dy: (torch.ops.npu.npu_rotary_mul_backward(dy, *ctx.saved_tensors), None, None),
    ),
}


def open_device(kind: str) -> None:
    """Register, in this process, the device type that replaces ``kind``. This cannot be undone.

    For an NPU, also create a fake torch_npu, which has the operators that hardware/kernels.py uses.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if kind != "cpu":
        _setup_privateuseone_for_python_backend(STAND_IN[kind])
    if kind != "npu":
        return
    library = torch.library.Library("npu", "DEF")
    package = types.ModuleType("torch_npu")
    vars(package)["library"] = library  # if this object were deleted, torch would forget its operators
    for schema, results in OPERATORS.items():
        name = library.define(schema)
        library.impl(name, results, "Meta")
        setattr(package, name, getattr(torch.ops.npu, name))
    for name, (keeps, backward) in GRADIENTS.items():
        torch.library.register_autograd(f"npu::{name}", backward, setup_context=keeps, lib=library)
    sys.modules["torch_npu"] = package


# ------------------------------------------------------------------------------------------------ a rank


@contextlib.contextmanager
def as_rank(rank: int, ranks: int, sizes: ParallelConfig, device: torch.device) -> Iterator[parallel_setup.Parallel]:
    """Make this process rank ``rank`` of ``ranks`` simulated ranks in this block. Collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            mock.patch.dict(devices.BACKENDS, {device.type: "fake"}),
            mock.patch.object(devices, "group_options", lambda device, name: None),
        ):
            if device.type != "cpu":
                _stand_for_cuda(device)
            yield parallel_setup.open_layout(sizes, device)
    finally:
        parallel_setup.close_layout()
        dist.destroy_process_group()


def _stand_for_cuda(device: torch.device) -> None:
    """Redirect Megatron's calls of torch.cuda to ``device``. On a real NPU, torch_npu or MindSpeed does this."""
    devices.redirect_cuda()
    vars(torch.cuda)["current_device"] = lambda: device
    devices.import_megatron(device)
    import megatron.core.tensor_parallel.random as random

    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()


# ------------------------------------------------------------------------------------------------ made-up values


ANSWER = "dry_run_answer"  # the attribute of a flag that has its made-up value


class Answers(TorchDispatchMode):
    """A dispatch mode that makes up values when code reads them from tensors without data.

    Floating-point numbers read as 1 and integers as 0. Flags read as false, but `all` and `equal` as true, so that all
    weights count as finite. ``scored`` is the number of tokens for which the head computes log-probs.
    """

    def __init__(self, scored: int) -> None:
        super().__init__()
        self.scored = scored

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func.overloadpacket
        if operator is aten._local_scalar_dense:
            return _value(args[0])
        if operator is aten.equal:
            return True
        if operator is aten.nonzero:  # in token_logprobs: where the mask is 1
            return args[0].new_empty((self.scored, args[0].dim()), dtype=torch.int64)
        if operator is aten._grouped_mm and args[0].dtype == torch.float32:  # torch's version needs data
            x, weight, ends = args[:3]
            experts = [len(ends)] if weight.dim() == 2 else []
            return x.new_empty((*experts, x.shape[0], weight.shape[-1]))
        out = func(*args, **(kwargs or {}))
        if operator in (aten.any, aten.all):
            setattr(out, ANSWER, operator is aten.all)
        return out


def _value(tensor: Tensor) -> bool | float:
    """Return the value of a tensor with one element. It is made up, unless the tensor is a known constant."""
    if hasattr(tensor, ANSWER):
        return getattr(tensor, ANSWER)
    constant = getattr(tensor, "constant", None)  # exists for torch.tensor(number)
    if constant is not None:
        return constant.item()
    return False if tensor.dtype == torch.bool else float(tensor.is_floating_point())


def routed(imbalance: float) -> contextlib.AbstractContextManager:
    """Return a context in which Megatron's dispatcher sends this rank ``imbalance`` times the mean number of rows.

    Without expert parallelism there is no imbalance.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    preprocess = Dispatcher.preprocess

    def planned(self, routing_map: Tensor) -> Tensor:
        """Call Megatron's method, then set planned counts as numpy arrays, which Megatron reads like host tensors."""
        counts = preprocess(self, routing_map)
        ranks, parts, local = self.ep_size, self.tp_size, self.num_local_experts
        sent = _even(routing_map.shape[0] * self.config.moe_router_topk, ranks)
        got = [int(rows * imbalance) if ranks > 1 else rows for rows in sent]
        self.input_splits, self.output_splits = sent, got
        self.output_splits_tp = np.full(parts, sum(got))
        if local > 1:
            self.num_global_tokens_per_local_expert = np.array([_even(rows, local) for rows in got] * parts)
            index = np.arange(self.num_experts * parts)
            self.sort_input_by_local_experts = index.reshape(-1, local).T.ravel()
            self.restore_output_by_local_experts = index.reshape(local, -1).T.ravel()
        if counts.device.type == "cpu":  # for some widths, kernels.grouped_mm reads the values of the counts
            by_expert = np.array([_even(rows, local) for rows in got]).sum(0) * parts
            with unset_fake_temporarily():
                return torch.from_numpy(by_expert)
        return counts

    return mock.patch.object(Dispatcher, "preprocess", planned)


def _even(total: int, shares: int) -> list[int]:
    """Split ``total`` into ``shares`` whole numbers that differ by at most 1."""
    return [total // shares + (place < total % shares) for place in range(shares)]


def moved(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model without data to ``device``, as Module.to does. Each parameter on the host is replaced."""
    for owner in module.modules():
        for name, old in owner._parameters.items():
            if old is not None and old.device.type != device.type:
                new = torch.empty_like(old, device=device)
                owner._parameters[name] = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.to(device)
    return module


def tensors_of(arch: Architecture) -> dict[str, Tensor]:
    """Return every tensor of the model in bf16 on the host, without data. This replaces huggingface.read_model."""
    return {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in tensor_shapes(arch).items()}
