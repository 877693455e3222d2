"""Handing the policy to the engine: the whole model once, then what training changes, with the step's noise if any.

Under rollout.sync adapter the engine keeps the base and gets the LoRA factors; merged, the weights with them.
The engine's copy is written from clean weights at every push, so noise never piles up; the trainer, the reference and
evaluations never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import adapter_weights
import aqn
import lora_megatron
import model_megatron
import weights_hf
from engines import vllm_shards
from engines.interface import Completion
from hf_config import Architecture
from input_files import InputError
from knobs import Config
from parallel_setup import Parallel
from tripwires import Tripped

# Answers to the probe prompt, and most tokens of one: enough that no single token decides. In bf16 one token may be 0.8
# nats apart in a sound run, 0.006 of a mean over 128.
PROBE_ANSWERS, PROBE_TOKENS = 8, 16
# At temperature 1 the log-probs of a confident policy are exactly 0, so noise would not show; 2 is vLLM's maximum.
# (vllm-ascend 0.23 reports those of temperature 1 whatever is asked.)
FLAT = 2.0


class WeightSync:
    """The one way from the trainer to the engine. Every rank makes the same calls.

    Collective: every rank pushes the same whole tensors to its own engine. Under rollout.expert_parallel it pushes its
    own shards, which need not travel.
    """

    def __init__(self, engine, model: torch.nn.Module, arch: Architecture, parallel: Parallel, cfg: Config) -> None:
        """Push the whole model. Raises InputError for noise targets that this model does not have."""
        self.engine, self.model, self.arch, self.parallel, self.cfg = engine, model, arch, parallel, cfg
        self.noise: dict[str, aqn.NormNoise] = {}
        if cfg.aqn.schedule != "off":
            self.noise = aqn.norm_targets(arch, cfg.aqn.targets, router=cfg.aqn.router)
        self.touched = aqn.touched_names(self.noise)
        self.clean: dict[str, Tensor] = {}
        if self.noise:
            self.clean = aqn.clean_norms(self._export(set(self.noise)), self.noise)
        # Sum of the adapted tensors, or of the factors, of the last push, without noise; of this rank's, if local.
        self.checksum = 0.0
        self.apart = cfg.rollout.sync == "adapter"
        if cfg.rollout.expert_parallel:
            vllm_shards.check_placement(engine.placement(), arch, parallel)
        engine.load_weights(self._export())
        if self.apart:
            engine.load_adapter(self._factors())

    def _export(self, only: set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """What the engine takes: whole tensors, or where it holds the trainer's shards, those."""
        if self.cfg.rollout.expert_parallel:
            return vllm_shards.shards(self.model, self.arch, self.parallel, only=only)
        merge = self.cfg.rollout.sync == "merged"
        return weights_hf.export(self.model, self.arch, self.parallel, only=only, merge=merge)

    def check_start(self, probe: list[int]) -> None:
        """Raise Tripped unless engine and trainer agree on an answer to ``probe``, also after a second, equal push.

        Catches a shard in the wrong place, order or layout, and a captured graph that reads elsewhere.
        """
        bound = getattr(self.cfg.checks, f"logp_gap_{self.cfg.model.dtype}")
        if self.cfg.checks.logp_gap != "stop":
            return
        for push in ("the first push", "a second push of the same policy"):
            gap = self._gap(probe)
            if not gap <= bound:
                raise Tripped(
                    f"checks.logp_gap: after {push} sampler and trainer differ by {gap:.2g} nats a token on the probe, "
                    f"at most {bound:g} expected\n  look at: whether rollout.expert_parallel=false (whole tensors are "
                    "pushed) or rollout.enforce_eager=true agrees"
                )
            self.push_clean()

    def push_clean(self) -> None:
        """The policy as the trainer has it: W + (alpha / R) B A, and the norms without noise."""
        self._push_policy()

    def checksums(self) -> list[float]:
        """Every rank's checksum of its last push, the same list on every rank. Collective."""
        mine = torch.tensor([self.checksum], dtype=torch.float64)
        return self.parallel.gather_rows(mine).flatten().tolist()

    def push(self, step: int, probe: list[int]) -> dict[str, float]:
        """The policy with the noise of ``step`` (from 0), and what went: its checksum, and what the noise came to.

        Noise goes after the clean policy, so that both can be seen on the prompt ``probe``: that the engine has the
        trainer's policy (aqn/probe_gap, nats a token), and that the noise changes it (aqn/probe_shift, the largest
        change of a token's log-prob, at temperature FLAT and after half of it; exactly 0 for an engine that does not
        take it). Both are those of the rank that is worst off, so that all ranks judge the same numbers. Raises
        AqnError when the noise is not the noise that was asked for.
        """
        if not self.noise:
            self.push_clean()
            return {"sync/checksum": self.checksum}
        touched: dict[str, Tensor] = {}
        self._push_policy(touched)
        cfg = self.cfg
        sigma = aqn.sigma_at(
            step,
            cfg.train.steps,
            sigma_start=cfg.aqn.sigma_start,
            sigma_end=cfg.aqn.sigma_end,
            num_stages=cfg.aqn.num_stages,
            schedule=cfg.aqn.schedule,
        )
        stream, report = aqn.perturb(
            touched.items(), self.noise, self.clean, sigma=sigma, seed=cfg.train.seed, step=step, bf16=cfg.aqn.bf16
        )
        gap = shift = 0.0
        if sigma:
            gap = self._gap(probe)
            # Continuations of half a prompt are uncertain, so noise changes their log-probs.
            half = probe[: -(-len(probe) // 2)]
            clean = self._answers(half, FLAT)
            self._load(stream)
            noisy = self._answers(half, FLAT)
            pairs = [zip(after.logp, before.logp, strict=False) for after, before in zip(noisy, clean, strict=True)]
            shift = max(abs(after - before) for pair in pairs for after, before in pair)
            shift = -self.parallel.max_over_ranks(-shift)  # the least
        aqn.check_report(report)
        return {
            "sync/checksum": self.checksum,
            "aqn/sigma": sigma,
            "aqn/modules": report.num_modules,
            "aqn/changed_elements": report.num_changed,
            "aqn/realised_std": report.std,
            "aqn/probe_shift": shift,
            "aqn/probe_gap": gap,
        }

    def _push_policy(self, touched: dict[str, Tensor] | None = None) -> None:
        """What training or noise changes, clean; what noise changes is also kept in ``touched``."""
        if self.noise or not self.apart:
            self._load(self._changed(touched))
        if self.apart:
            self._load(self._factors(), self.engine.load_adapter)

    def _load(self, tensors, load: Callable | None = None) -> None:
        """Into the engine. The base was sound when it was read, so what it refuses now was spoilt by training."""
        try:
            (load or self.engine.load_weights)(tensors)
        except InputError as error:
            raise Tripped(
                f"the push to the sampler failed: {error}\n  look at: optim.lr, the last steps' norms"
            ) from None

    def _answers(self, prompt: list[int], temperature: float) -> list[Completion]:
        """What the engine samples after ``prompt``, always with the same random numbers."""
        length = min(PROBE_TOKENS, self.cfg.rollout.max_new_tokens)
        call = {"num_samples": PROBE_ANSWERS, "max_new_tokens": length, "temperature": temperature}
        return self.engine.sample([prompt], seeds=[0], **call)[0]

    @torch.no_grad()
    def _gap(self, prompt: list[int]) -> float:
        """Mean difference between an engine's and the trainer's log-probs of its answers to ``prompt``, nats a token.

        The largest of all ranks' engines, the same number on every rank. Collective: all answers go through the trainer
        on all ranks, since a wrong engine's answers are other ones, and tensor ranks must see the same tokens.
        """
        mine = [(tuple(answer.tokens), answer.logp) for answer in self._answers(prompt, self.cfg.rollout.temperature)]
        everyones: list[list[tuple[tuple[int, ...], list[float]]]] = [[]] * self.parallel.world_size
        dist.all_gather_object(everyones, mine)
        trainers = self._trainer_logp(prompt, list(dict.fromkeys(tokens for rank in everyones for tokens, _ in rank)))
        apart = [torch.cat([trainers[tokens] - torch.tensor(logp) for tokens, logp in rank]) for rank in everyones]
        gaps = torch.stack([one.abs().mean() for one in apart])  # (ranks,); a nan stays the largest
        return self.parallel.max_over_ranks(gaps.max().item())

    def _trainer_logp(self, prompt: list[int], answers: list[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
        """The trainer's log-probs of each answer after ``prompt``, (its length,), on the host. Collective."""
        width = len(prompt) + max(map(len, answers))
        width += -width % self.parallel.tensor
        tokens = torch.tensor([[*prompt, *answer, *[0] * (width - len(prompt) - len(answer))] for answer in answers])
        mask = torch.zeros_like(tokens)
        for row, answer in enumerate(answers):
            mask[row, len(prompt) : len(prompt) + len(answer)] = 1
        with model_megatron.evaluating(self.model):
            where = (tokens.to(self.parallel.device), mask.to(self.parallel.device))
            temperature = self.cfg.rollout.temperature
            logp, _ = model_megatron.token_logprobs(self.model, *where, self.parallel, temperature)
        return {answer: rows[chosen == 1] for answer, rows, chosen in zip(answers, logp.cpu(), mask, strict=True)}

    def _changed(self, touched: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights that do, LoRA merged; under rollout.sync adapter only what noise changes."""
        sums = []
        for name, tensor in self._export(self.touched):
            if name not in self.touched:
                sums.append(tensor.sum(dtype=torch.float32))
            elif touched is not None:
                touched[name] = tensor
            yield name, tensor
        self.checksum = _total(sums)

    def _factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name of each adapted weight -> its A (R, in) and B (out, R), whole, fp32. Collective."""
        adapters = lora_megatron.attached(self.model)
        whole = adapter_weights.gather(adapters, lora_megatron.factors(adapters), self.arch, self.parallel)
        self.checksum = _total([factor.sum(dtype=torch.float32) for factor in whole.values()])
        modules = adapter_weights.adapted_modules(self.arch, self.cfg.lora)
        return {name: (a, b) for module in modules for name, a, b in module.pairs(whole)}


def _total(sums: list[Tensor]) -> float:
    """The sum of scalars in fp64 on the host: one look at the device, where .item() would be one a tensor."""
    return torch.stack(sums).cpu().double().sum().item() if sums else 0.0
