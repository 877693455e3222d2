"""The interface of an engine: its calls, their results, and the checks that every engine makes.

The engines are torch_sampler.TorchSampler, vllm_engine.VllmEngine and vllm_colocated.ColocatedEngine. All of them make
the checks in this file, so that the same mistake gets the same message.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from facts.architectures import Architecture
from facts.exits import InputError
from tasks.environment import Turns


@dataclass
class Completion:
    """One sampled answer to one prompt."""

    tokens: list[int]  # includes the stop token if there is one
    logp: list[float]  # float32, one per token: log-probability under the temperature-scaled distribution
    # Why it ended. stop: by an end token | length: cut off at max_new_tokens | turns: cut off at rollout.max_turns |
    # environment: the environment ended it after a text of rollout.stop
    finish_reason: str
    routed_experts: np.ndarray | None = None  # uint8 (prompt + generated - 1, MoE layers, K); the last token has no row
    # For each token, whether the policy sampled it. If not, the environment gave it, and its logp is 0. By default the
    # policy sampled all tokens.
    mask: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mask = self.mask or [True] * len(self.tokens)

    def append(self, tokens: list[int], logp: list[float], *, own: bool) -> None:
        """Append ``tokens``. ``own`` says whether the policy sampled them."""
        self.tokens = self.tokens + tokens
        self.logp = self.logp + logp
        self.mask = self.mask + [own] * len(tokens)


class SamplingParams(NamedTuple):
    """The settings with which completions are sampled. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float


class Stack(NamedTuple):
    """The engine's memory for one matrix of a layer's routed experts, in the trainer's layout."""

    memory: Tensor  # (e, in, out); gate and up are joined along out
    experts: range  # their numbers in the model


class Engine(Protocol):
    """The copy of the policy that samples. It needs a whole model from `load_weights` before it can sample."""

    arch: Architecture
    ready: bool  # whether it has a whole model
    positions: int  # the most tokens that a row may have

    # Called at every decoding step. The embedded sampler also calls it after every layer while it computes prompts.
    beat: Callable[[], None]

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors into the engine, under their Hugging Face names.

        The first call must bring the whole model. Later calls may bring some of its fused groups (see
        huggingface.fused_group), each of them whole. Raises InputError with the tensor's name if a tensor is missing,
        unknown, repeated, misshapen or not finite. After a failure, `sample` raises InputError.
        """

    def stacks(self) -> dict[str, Stack]:
        """Return the memory of the routed experts by name, for example `model.layers.0.mlp.experts.gate_up_proj`.

        Call this only after the first load_weights. Each call returns the same tensors. Writing to them changes the
        weights with which the engine samples. An engine that packs its experts returns {}.
        """
        return {}

    def load_stacks(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into `stacks`. A tensor has all experts of the model, or only those of this engine.

        A tensor that is the stack's own memory is not copied. Call load_weights afterwards: it makes the engine forget
        everything that it computed with other weights. Raises InputError if a tensor is not finite.
        """
        stacks, held = self.stacks(), {}
        for name, tensor in named_tensors:
            memory, experts = stacks[name]
            if len(tensor) != len(experts):
                tensor = tensor[experts.start : experts.stop]
            if tensor is not memory:
                memory.copy_(tensor)
            held[name] = memory
        check_finite(held, "load_weights")

    def load_adapter(self, factors: Mapping[str, Tensor]) -> None:
        """Sample with W + (alpha / R) B A from now on. This is only for rollout.sync adapter.

        W are the weights from load_weights, A and B the LoRA factors, and R the LoRA rank. ``factors`` has the whole
        factors by their names in a checkpoint (see Policy.whole). If a factor is not finite, this method raises
        InputError and keeps the old adapter.
        """

    def sample(
        self,
        prompts: list[list[int]],
        *,
        seeds: list[int],
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        return_routed_experts: bool = False,
        turns: Turns | None = None,
    ) -> list[list[Completion]]:
        """Return ``num_samples`` completions of each prompt, in the order of the prompts. Temperature 0 is greedy.

        With ``turns``, a completion contains the replies of an environment between the tokens of the policy. The random
        number of a token depends on its position in the completion, not on who wrote the tokens before it.

        The random numbers of prompt i depend only on seeds[i], so the other prompts of a call change nothing but
        rounding. Raises InputError for a call that the engine cannot answer, and Tripped if a log-prob is not finite.
        """
        params = SamplingParams(max_new_tokens, temperature)
        check_call(self.arch, prompts, max_new_tokens, self.ready, self.positions)
        return self._sample(prompts, seeds, num_samples, params, return_routed_experts, turns)

    def _sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        num_samples: int,
        params: SamplingParams,
        routed: bool,
        turns: Turns | None,
    ) -> list[list[Completion]]:
        """Do the part of `sample` that is specific to the engine. The call has been checked."""

    def layer_outputs(self, prompt: list[int]) -> list[Tensor]:
        """Return the residual stream of ``prompt`` after each layer, for a comparison with the trainer's layers.

        The list is empty if the model runs as a captured graph, which calls no hooks. L is the number of layers, T of
        prompt tokens, and h the hidden size.

        -> L x (T, h)
        """

    def close(self) -> None:
        """Release everything that the engine uses, before the process group is destroyed."""


# ------------------------------------------------------------------------------------------------ checks


def check_call(arch: Architecture, prompts: list[list[int]], max_new_tokens: int, ready: bool, positions: int) -> None:
    """Raise InputError for a call of `sample` that no engine can answer.

    ``ready`` says whether the engine has a whole model; ``positions`` is the most tokens that one row may have.
    """
    if not ready:
        raise InputError("sample: there are no usable weights; load the whole model with load_weights first")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"sample: prompt {i} is empty; give at least one token")
        if not 0 <= min(prompt) <= max(prompt) < arch.vocab_size:
            raise InputError(f"sample: prompt {i} has a token outside the vocabulary of {arch.vocab_size}")
        if len(prompt) + max_new_tokens > positions:
            raise InputError(
                f"sample: prompt {i} has {len(prompt)} tokens; with max_new_tokens {max_new_tokens} this exceeds the "
                f"{positions} positions of the engine"
            )


def check_arrival(name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], seen: Collection[str]) -> None:
    """Raise InputError unless ``shapes`` has this name and shape, and the tensor is floating-point and not in ``seen``.

    ``seen`` has the names of the tensors that arrived before.
    """
    if name not in shapes:
        raise InputError(f"load_weights: {name} is not a tensor of this model")
    if name in seen:
        raise InputError(f"load_weights: {name} was pushed twice")
    if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
        raise InputError(
            f"load_weights: {name} is {tensor.dtype} {tuple(tensor.shape)}; push floating point {shapes[name]}"
        )


def check_complete(seen: Collection[str], groups: Mapping[str, str], whole: bool) -> None:
    """Raise InputError if a load lacks a tensor. ``seen`` has the names of the tensors that the load has brought.

    ``groups`` maps the name of every tensor to its fused group. A ``whole`` load must bring all groups. Any other load
    must complete the groups of which it has brought a part.
    """
    started = {groups[name] for name in seen}
    missing = [name for name, group in groups.items() if name not in seen and (whole or group in started)]
    if missing:
        raise InputError(
            f"load_weights: {missing[0]} is missing ({len(missing)} missing, {len(seen)} found); "
            f"push {'the whole model' if whole else 'whole fused groups'}"
        )


def fault_of_log_probs(completions: list[list[Completion]], dtype: torch.dtype) -> str:
    """Describe the fault behind the first log-prob that is not finite, or return "" if all are finite.

    If the model overflows, a whole row is NaN. -inf means that the sampler drew a token of probability 0.
    """
    for one in chain(*completions):
        for token, logp in zip(one.tokens, one.logp, strict=True):
            if logp == -math.inf:
                return (
                    f"sample: token {token} was drawn, although its probability is 0. This is a fault of the sampler; "
                    "vllm-ascend before 0.30.0rc2 draws such ids when it draws by itself (vllm-ascend 13394)"
                )
            if not math.isfinite(logp):
                return (
                    f"sample: a log-probability is not finite: the loaded model overflows in {dtype}\n"
                    "  look at: model.dtype; after the first step also optim.lr, the last steps' norms, aqn.sigma_start"
                )
    return ""


def check_finite(tensors: Mapping[str, Tensor], call: str) -> None:
    """Raise InputError if a tensor has NaN or infinity. The host waits for the device once, for all tensors together.

    ``call`` is the engine's method, which the error names.
    """
    # A sum takes a tenth of the time of isfinite. A sum of finite numbers can overflow, so isfinite decides.
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors.values()]
    finite = torch.stack(sums).isfinite().tolist() if sums else []
    broken = [n for n, good in zip(tensors, finite, strict=True) if not good and not tensors[n].isfinite().all()]
    if broken:
        raise InputError(f"{call}: {broken[0]} has NaN or infinity ({len(broken)} such tensors)")
