"""The embedded sampler. It uses a decoder in plain torch, and needs no other engine and no process group.

A call runs in waves of limited size. A wave computes every prompt once for all its samples. Once half of the rows have
finished, the sampler removes them. Each prompt has its own seed, so its completions do not depend on the wave.
P is the number of prompts, R of rows (one for each sampled completion), and N of new tokens. K is the number of experts
per token, L of MoE layers, and V the size of the vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from engines.drawing import pick, uniforms_of
from engines.interface import Completion, Engine, SamplingParams, Stack, fault_of_log_probs
from engines.torch_decoder import Decoder
from facts.architectures import Architecture, layers
from facts.exits import InputError, Tripped
from hardware.device import DTYPES
from knobs import Config, LoraConfig, Merging
from plan.capacity import MOST_SEQUENCES
from tasks.environment import Turn, Turns


class TorchSampler(Engine):
    """The engine in plain torch. See engines.interface.Engine for its calls."""

    def __init__(
        self,
        arch: Architecture,
        *,
        stop_tokens: set[int],
        pad_token: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_sequences: int = MOST_SEQUENCES,
        adapter: LoraConfig | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a sampler without weights.

        ``max_sequences`` limits the rows that are decoded together, and so the key-value cache. All samples of a prompt
        are decoded together, even if they exceed this limit. ``adapter`` gives the shapes of the factors that
        load_adapter will bring.
        """
        largest = max({*stop_tokens, pad_token})
        if largest >= arch.vocab_size:
            raise InputError(f"sampler: stop or pad token {largest} is not in the vocabulary of {arch.vocab_size}")
        self.arch, self.ready, self.positions, self.adapter = arch, False, arch.max_positions, adapter
        self.decoder = Decoder(arch, dtype, device)
        self.stop_tokens, self.pad_token, self.max_sequences = frozenset(stop_tokens), pad_token, max_sequences
        self.is_stop = torch.zeros(arch.vocab_size, dtype=torch.bool, device=device)
        self.is_stop[list(stop_tokens)] = True
        self.beat = beat

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        try:
            self.decoder.load_weights(named_tensors)
        finally:
            self.ready = self.decoder.ready

    def stacks(self) -> dict[str, Stack]:
        weights, every_expert = self.decoder.layers, range(self.arch.num_experts)
        return {
            f"{layer}{module.fused}": Stack(weights[int(layer.split(".")[2])][module.part], every_expert)
            for layer, module in layers(self.arch)
            if module.kind == "experts"
        }

    def load_adapter(self, factors: Mapping[str, Tensor]) -> None:
        if self.adapter is None:
            raise InputError("load_adapter: this engine has no adapter; set rollout.sync to adapter")
        self.decoder.load_adapter(factors, self.adapter)

    def close(self) -> None:
        """Do nothing, because the engine uses nothing that must be released."""

    @torch.inference_mode()
    def layer_outputs(self, prompt: list[int]) -> list[Tensor]:
        outputs: list[Tensor] = []
        self.decoder.prefill([prompt], 1, 1, self.pad_token, outputs.append)
        return [output[: len(prompt)] for output in outputs]

    @torch.inference_mode()
    def _sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        num_samples: int,
        params: SamplingParams,
        routed: bool,
        turns: Turns | None,
    ) -> list[list[Completion]]:
        completions: list[list[Completion]] = [[] for _ in prompts]
        # Sort, so that the prompts of a wave have similar lengths and little padding.
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        prompts_at_once = max(1, self.max_sequences // num_samples)
        for start in range(0, len(prompts), prompts_at_once):
            wave = by_length[start : start + prompts_at_once]
            asked, of_wave = [prompts[i] for i in wave], [seeds[i] for i in wave]
            given = turns and Given(turns, wave, num_samples, params.max_new_tokens, self.is_stop)
            answers = self._run_wave(asked, of_wave, num_samples, params, routed, given)
            for row, answer in enumerate(answers):
                completions[wave[row // num_samples]].append(answer)
        return completions

    def _uniforms(self, seeds: list[int], num_samples: int, params: SamplingParams) -> Tensor | None:
        """Return a random number for each token of each row, or None if the choice is greedy.  (N, R, 1)"""
        if params.temperature == 0:
            return None
        table = uniforms_of(seeds, num_samples, params.max_new_tokens)[..., None]
        return table.flatten(0, 1).transpose(0, 1).to(self.decoder.device)

    def _run_wave(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        num_samples: int,
        params: SamplingParams,
        routed: bool,
        given: "Given | None",
    ) -> list[Completion]:
        """Return ``num_samples`` completions of each prompt in one list. All are computed at the same time."""
        decoder, device, new_tokens = self.decoder, self.decoder.device, params.max_new_tokens
        rows = len(prompts) * num_samples
        uniforms = self._uniforms(seeds, num_samples, params)
        hidden, cache, prompt_routes = decoder.prefill(
            prompts, num_samples, new_tokens, self.pad_token, lambda _: self.beat()
        )
        hidden = hidden.repeat_interleave(num_samples, 0)
        # Results by step, then by row. Rows that have finished write to an extra row, which nothing reads.
        tokens = torch.full((new_tokens, rows + 1), -1, device=device)
        logps = torch.zeros(new_tokens, rows + 1, device=device)
        shape = (new_tokens, rows + 1, sum(self.arch.moe_layers), self.arch.experts_per_token)
        routes = torch.zeros(shape, dtype=torch.uint8, device=device) if routed else None
        row_ids = torch.arange(rows, device=device)  # (R,) the index of each row's results

        for n in range(new_tokens):
            self.beat()
            uniform = None if uniforms is None else uniforms[n].index_select(0, row_ids.clamp(max=rows - 1))
            token, logp = pick(decoder.logits(hidden), uniform, params.temperature)
            if given:
                token, logp = given.instead(n, row_ids, token, logp)
            tokens[n].index_copy_(0, row_ids, token)
            logps[n].index_copy_(0, row_ids, logp)
            ended = given.ended(n, row_ids, tokens) if given else self.is_stop[token]
            row_ids = row_ids.masked_fill(ended, rows)
            running = (row_ids < rows).nonzero()[:, 0]
            if len(running) == 0 or n + 1 == new_tokens:
                break
            if 2 * len(running) <= len(row_ids):
                cache.keep_rows(running)
                row_ids, token = row_ids[running], token[running]
            hidden, experts = decoder.decode(token, n, cache)
            if routes is not None:
                routes[n].index_copy_(0, row_ids, torch.stack(experts, 1).to(torch.uint8))

        answers = self._answers(tokens[:, :rows], logps[:, :rows])
        if given:
            given.mark(answers)
        if routes is not None:
            routes, prompt_routes = routes.cpu(), prompt_routes.cpu()
            for row, answer in enumerate(answers):
                prompt = row // num_samples
                of_prompt = prompt_routes[prompt, : len(prompts[prompt])]
                of_answer = routes[: len(answer.tokens) - 1, row]
                answer.routed_experts = torch.cat([of_prompt, of_answer]).numpy()
        return answers

    def _answers(self, tokens: Tensor, logps: Tensor) -> list[Completion]:
        """Return a completion for each row. ``tokens`` are -1 after the end of a row.

        Raises Tripped if a log-prob is not finite.

        (N, R) twice
        """
        answers = []
        generated = (tokens >= 0).sum(0).tolist()
        for count, row_tokens, row_logps in zip(generated, tokens.t().tolist(), logps.t().tolist(), strict=True):
            reason = "stop" if row_tokens[count - 1] in self.stop_tokens else "length"
            answers.append(Completion(row_tokens[:count], row_logps[:count], reason))
        if fault := fault_of_log_probs([answers], self.decoder.dtype):
            raise Tripped(fault)
        return answers


class Given:
    """The tokens of a wave that the environment gives. They replace drawn tokens, and are decoded like them.

    So a row keeps its keys, values and routes over all of its turns.
    """

    def __init__(self, turns: Turns, wave: list[int], num_samples: int, new_tokens: int, is_stop: Tensor) -> None:
        self.turns, self.wave, self.num_samples = turns, wave, num_samples
        self.may_end = is_stop.index_fill(0, torch.tensor(sorted(turns.may_end), device=is_stop.device), True)
        # (N, R + 1) like the results, -1 where the policy draws
        self.tokens = torch.full((new_tokens, len(wave) * num_samples + 1), -1, device=is_stop.device)
        self.reasons: dict[int, str] = {}  # for the rows that have finished, by row

    def instead(self, n: int, row_ids: Tensor, token: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ``n``-th tokens of the rows and their log-probs. Given tokens replace drawn ones.  (R,) twice"""
        given = self.tokens[n].index_select(0, row_ids)
        return torch.where(given >= 0, given, token), logp.masked_fill(given >= 0, 0.0)

    def ended(self, n: int, row_ids: Tensor, tokens: Tensor) -> Tensor:
        """Return which rows finish with their ``n``-th token. If only a turn ends, store the environment's reply.

        -> (R,) bool
        """
        running = row_ids < self.tokens.shape[1] - 1
        drawn = self.tokens[n].index_select(0, row_ids) < 0
        ended = self.may_end[tokens[n].index_select(0, row_ids)] & running & drawn
        indices = ended.nonzero()[:, 0]
        rows = row_ids[indices].tolist()
        if not rows:
            return ended
        so_far, own = tokens[: n + 1, rows].t().tolist(), (self.tokens[: n + 1, rows] < 0).t().tolist()
        prompts = [self.wave[row // self.num_samples] for row in rows]
        left = len(tokens) - n - 1
        asked = [Turn(prompt, ids, mask, left) for prompt, ids, mask in zip(prompts, so_far, own, strict=True)]
        for row, reply in zip(rows, self.turns.reply(asked), strict=True):
            if reply.reason:
                self.reasons[row] = reply.reason
            else:
                end = n + 1 + len(reply.tokens)
                self.tokens[n + 1 : end, row] = torch.tensor(reply.tokens, dtype=torch.long)
        ended[indices] = torch.tensor([row in self.reasons for row in rows], device=ended.device)
        return ended

    def mark(self, answers: list[Completion]) -> None:
        """Set the mask and the finish reason of each row's completion."""
        for row, answer in enumerate(answers):
            answer.mask = (self.tokens[: len(answer.tokens), row] < 0).tolist()
            answer.finish_reason = self.reasons.get(row, "length")


def check(cfg: Config, arch: Architecture, ranks: int) -> None:
    """Accept the configuration: this engine runs every configuration that inputs/rules.py accepts."""


def open_engine(
    cfg: Config,
    arch: Architecture,
    device: torch.device,
    stop_tokens: set[int],
    pad_token: int,
    beat: Callable[[], None],
) -> TorchSampler:
    """Open the sampler. It needs no limit for its caches, which grow as needed, and no switch to record routes."""
    return TorchSampler(
        arch,
        stop_tokens=stop_tokens,
        pad_token=pad_token,
        dtype=DTYPES[cfg.model.dtype],
        device=device,
        adapter=cfg.lora if cfg.merging is Merging.NOWHERE else None,
        beat=beat,
    )
