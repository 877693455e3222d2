"""Code that runs inside vLLM: corrections of its classes, and the functions that its workers run for vllm_engine.py.

The worker functions use the model runner, because NPU workers have no reload_weights before version 0.25.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from engines.drawing import pick
from engines.interface import Stack
from facts.exits import InputError

LAYER = r"model\.layers\.\d+"  # the name of a decoder layer in vLLM's models


def correct_cpu_defects(job: str) -> None:
    """Patch classes of vLLM 0.30.0, once, to correct two defects on a CPU. ``job`` is a name that only this job has.

    1. The kernel reads the experts in a prepacked layout, but vLLM packs them only at the first load. After a reload
    there is no error, but the log-probabilities are wrong by 0.2.
    2. Tensor-parallel ranks share memory whose name is constant under torchrun. So two jobs on a machine collide, and a
    job collides with the memory of a killed job (errno 17). Here the name contains ``job``. The memory is unlinked as
    soon as all ranks have mapped it, so that nothing remains.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    _CPUSHMDistributed.job = job
    set_up, open_memory = UnquantizedFusedMoEMethod._setup_kernel, _CPUSHMDistributed._init_cpu_shm
    if hasattr(set_up, "__wrapped__"):
        return

    @functools.wraps(set_up)
    def set_up_and_pack(self, layer, w13: Tensor, w2: Tensor) -> None:
        is_reload = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    @functools.wraps(open_memory)
    def open_own_memory(self) -> int:
        self.group_name = f"{_CPUSHMDistributed.job}-{self.group_name.lstrip('/')}"
        handle = open_memory(self)
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(
            missing_ok=True
        )  # all ranks have mapped it
        return handle

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack
    _CPUSHMDistributed._init_cpu_shm = open_own_memory


def clear_biases(worker) -> None:
    """Set all biases to 0. Call this if the model should have none.

    vLLM's Qwen2-MoE always has q, k and v biases. They contain random numbers at first, and in some versions new random
    numbers after every reload.
    """
    for name, parameter in parameters(worker).items():
        if name.endswith(".bias"):
            parameter.data.zero_()


def reload(worker, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Load ``named_tensors``, which have their Hugging Face names and come in whole fused groups."""
    from vllm.config import set_current_vllm_config

    with torch.no_grad(), set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        worker.model_runner.reload_weights(weights_iterator=named_tensors)


def parameters(worker) -> dict[str, Tensor]:
    """Return the parameters of the loaded model by name, in the layout of vLLM's kernels."""
    return {
        name.replace(".routed_experts.", "."): parameter  # only newer versions have this part of the name
        for name, parameter in worker.model_runner.get_model().named_parameters()  # not the model that captures graphs
    }


def _moe_layers(worker) -> Iterator[tuple[str, torch.nn.Module, list[int]]]:
    """Yield, for each MoE layer, its number, the module with its experts, and the ids of the local experts.

    The ids are in the order of the weights.
    """
    for name, module in worker.model_runner.get_model().named_modules():
        if hasattr(module, "w13_weight"):
            local_index = module._expert_map  # expert -> local index, -1 on another rank; None: all are here, in order
            local_index = list(range(len(module.w13_weight))) if local_index is None else local_index.tolist()
            owned = [expert for expert, local in enumerate(local_index) if local >= 0]
            yield re.search(r"layers\.(\d+)", name).group(1), module, sorted(owned, key=local_index.__getitem__)


def stacks(worker, in_sizes: dict[str, int]) -> dict[str, Stack]:
    """Implement Engine.stacks. ``in_sizes`` has the input sizes of gate_up_proj and of down_proj.

    E is the number of local experts. The kernels of an NPU read (E, in, out), those of Triton (E, out, in). The result
    is {} for another layout, or if the ids of the local experts are not consecutive. The caller must check that the
    values are in the order that the shapes suggest.
    """
    found = {}
    for layer, module, owned in _moe_layers(worker):
        for (part, in_size), weight in zip(in_sizes.items(), (module.w13_weight, module.w2_weight), strict=True):
            memory = weight.data if weight.shape[1] == in_size else weight.data.mT
            experts = range(owned[0], owned[0] + len(owned))
            if memory.shape[:2] != (len(owned), in_size) or owned != [*experts]:
                return {}
            found[f"model.layers.{layer}.mlp.experts.{part}"] = Stack(memory, experts)
    return found


def layer_outputs(worker, run: Callable[[], object]) -> list[Tensor]:
    """Call ``run()``, which makes one forward pass, and return the residual stream after each layer.

    The result is [] for a compiled model.
    """
    outputs: list[Tensor] = []
    layers = [module for name, module in worker.model_runner.model.named_modules() if re.fullmatch(LAYER, name)]
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(
                layer.register_forward_hook(lambda module, args, output: outputs.append(output[0] + output[1]))
            )
        run()
    return outputs


class TableDraws:
    """Draws the tokens of a worker's requests with a table of uniform numbers.

    The row in the table is the seed of the request, and the column is the token's position in the completion. So a
    request that vLLM preempts and continues draws the same tokens. vLLM still applies the temperature and computes the
    log-probabilities. The distribution is not truncated, because this project's requests have no top-k and no top-p.
    """

    table: Tensor | None = None  # (requests, new tokens) of the call; None: vLLM draws (greedy calls, its warm-up)

    def __init__(self, runner, vllms_own: Callable) -> None:
        """Create an object for ``runner``. One of its methods replaces vLLM's function ``vllms_own``."""
        self.runner, self.vllms_own, self.metadata, self.rows = runner, vllms_own, None, torch.empty(0)

    def set_table(self, table: Tensor | None) -> None:
        self.table = None if table is None else table.to(self.runner.device)

    def _draw(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Draw a token for each row of ``logits``, to which vLLM has applied the temperature.

        R is the number of rows, and V the size of the vocabulary.

        (R, V), (R,), (R,) -> (R,)
        """
        return pick(logits, self.table[rows, positions, None], 1.0)[0]

    def in_runner_1(self, logits: Tensor, generators: dict, k: Tensor | None, p: Tensor | None) -> tuple:
        """Replace TopKTopPSampler.forward of Model Runner V1. Return tokens, and log-probabilities if needed."""
        if self.table is None:
            return self.vllms_own(logits, generators, k, p)
        batch, sampler = self.runner.input_batch, self.runner.sampler.topk_topp_sampler
        if batch.sampling_metadata is not self.metadata:  # vLLM makes another one when requests come, go or move
            self.metadata = batch.sampling_metadata
            seeds = [self.runner.requests[request].sampling_params.seed for request in batch.req_ids]
            self.rows = torch.tensor(seeds, device=logits.device)
        count = len(self.rows)
        generated = torch.from_numpy(batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count])
        processed = sampler.logprobs_mode == "processed_logprobs"
        logp = logits.log_softmax(-1, dtype=torch.float32) if processed else None
        return self._draw(logits, self.rows, generated.to(logits.device).long()), logp

    def in_runner_2(self, logits: Tensor, mapping: Tensor, mapping_np, pos: Tensor, k, p, *more) -> tuple:
        """Replace Sampler._sample_random of Model Runner V2. Return tokens and logits.

        ``mapping`` has the request slot of each row.
        """
        if self.table is None:
            return self.vllms_own(logits, mapping, mapping_np, pos, k, p, *more)
        slots = mapping.long()
        generated = pos + 1 - self.runner.req_states.prompt_len.gpu[slots]  # pos is that of the last input
        return self._draw(logits, self.runner.sampler.sampling_states.seeds.gpu[slots], generated), logits


def draw_by_table(worker) -> TableDraws:
    """Make the worker draw from tables. Raises InputError if this is not possible in the installed vLLM.

    Model Runner V1 of vLLM and of vllm-ascend calls topk_topp_sampler for every batch with requests that are not
    greedy. Model Runner V2 has _sample_random in vLLM 0.30. In vLLM 0.23, Model Runner V2 draws inside a function that
    also applies penalties and bias, so this function raises InputError.
    """
    runner, sampler = worker.model_runner, worker.model_runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        draws = TableDraws(runner, sampler.topk_topp_sampler.forward)
        sampler.topk_topp_sampler.forward = draws.in_runner_1
        return draws
    if hasattr(sampler, "_sample_random"):
        draws = TableDraws(runner, sampler._sample_random)
        sampler._sample_random = draws.in_runner_2
        return draws
    raise InputError(
        "rollout.engine: Model Runner V2 of this vLLM draws tokens by itself, on an NPU perhaps some of probability 0 "
        "(vllm-ascend 13394); unset VLLM_USE_V2_MODEL_RUNNER"
    )
