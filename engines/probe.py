"""Checks whether an engine has the policy: compares its log-probs and the outputs of its layers with the trainer's."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engines.interface import Completion, Engine
from knobs import RolloutConfig
from model import megatron_model
from parallel_setup import Parallel
from weights.policy import Policy

# Number of answers to the probe prompt, and of tokens in each: enough that no single token decides. In bf16 one token
# of a correct run may differ by 0.8 nats, which is 0.006 on average over 128.
PROBE_ANSWERS, PROBE_TOKENS = 8, 16


class Probe:
    """Compares ``engine`` with the policy that was pushed to it. All ranks call its methods together."""

    def __init__(self, engine: Engine, policy: Policy, settings: RolloutConfig) -> None:
        self.engine, self.policy, self.settings, self.parallel = engine, policy, settings, policy.parallel

    def answers(self, prompt: list[int], temperature: float) -> list[Completion]:
        """Return the engine's answers to ``prompt``, always with the same random numbers."""
        (answers,) = self.engine.sample(
            [prompt],
            seeds=[0],
            num_samples=PROBE_ANSWERS,
            max_new_tokens=min(PROBE_TOKENS, self.settings.max_new_tokens),
            temperature=temperature,
        )
        return answers

    @torch.no_grad()
    def gap(self, prompt: list[int]) -> float:
        """Return the mean gap between the engine's and the trainer's log-probs of answers, in nats per token.

        The engine samples the answers to ``prompt``. The result is the largest of the means of all ranks' engines, and
        is the same on every rank. All ranks call this together, and each rank's trainer computes the answers of all
        engines. This is necessary because tensor ranks must compute the same tokens, but a wrong engine may give other
        answers than the rest.
        """
        mine = [(tuple(answer.tokens), answer.logp) for answer in self.answers(prompt, self.settings.temperature)]
        everyones = self.parallel.gather_objects(mine)
        trainers = self._trainer_logp(prompt, list(dict.fromkeys(tokens for rank in everyones for tokens, _ in rank)))
        apart = [torch.cat([trainers[tokens] - torch.tensor(logp) for tokens, logp in rank]) for rank in everyones]
        largest = torch.stack([one.abs().mean() for one in apart]).max().item()  # a NaN counts as the largest
        return self.parallel.max_over_ranks(largest)

    def _trainer_logp(self, prompt: list[int], answers: list[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
        """Return a dict that maps each answer to the trainer's log-probs of its tokens after ``prompt``, on the host.

        All ranks call this together.
        """
        device = self.parallel.device
        rows = pad_sequence([torch.tensor([*prompt, *answer]) for answer in answers], batch_first=True)
        tokens = F.pad(rows, (0, -rows.shape[1] % self.parallel.tensor))
        position = torch.arange(tokens.shape[1]) - len(prompt)
        mask = ((position >= 0) & (position < torch.tensor([[len(answer)] for answer in answers]))).long()
        logp, *_ = megatron_model.token_logprobs(
            self.policy.model, tokens.to(device), mask.to(device), self.parallel, self.settings.temperature
        )
        return {answer: rows[chosen == 1] for answer, rows, chosen in zip(answers, logp.cpu(), mask, strict=True)}

    def first_differing_layer(self, prompt: list[int], bound: float) -> str:
        """Describe the first layer whose output on ``prompt`` differs between engine and trainer.

        ``bound`` is the largest difference that is allowed, as a share of the layer's largest value. All ranks call
        this together.
        """
        ours = layer_outputs(self.policy.model, prompt, self.parallel)
        theirs = self.engine.layer_outputs(prompt)
        if not theirs:
            return "the layer is not known; set rollout.enforce_eager=true, because a graph hides its layers"
        ours, theirs = (torch.stack([layer.float().cpu() for layer in each]) for each in (ours, theirs))  # (L, T, h)
        sizes = ours.abs().amax((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
        differences = (ours - theirs).abs().amax((1, 2)) / sizes  # (L,)
        by_rank = self.parallel.gather_rows(differences)  # (ranks, L)
        for layer, difference in enumerate(by_rank.unbind(1)):
            wrong = (~(difference <= bound)).nonzero().flatten().tolist()
            if wrong:
                ranks = "" if len(wrong) == len(difference) else f", only on rank {', '.join(map(str, wrong))}"
                share = f"{difference.max():.2g} of its largest value"
                return f"layer {layer} is the first whose output differs, by {share}{ranks}"
        return "all layers agree on the probe prompt: look at the final norm, the head, and the sampling"


@torch.no_grad()
def layer_outputs(model: torch.nn.Module, prompt: list[int], parallel: Parallel) -> list[Tensor]:
    """Return the trainer's residual stream after each layer, whole on every tensor rank.

    L is the number of layers, T of prompt tokens, and h the hidden size.

    (T,) -> L x (T, h)
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    padding = prompt[-1:] * (-len(prompt) % parallel.tensor)  # sequence parallelism splits the row evenly
    outputs: list[Tensor] = []
    with contextlib.ExitStack() as hooks:
        for layer in model.decoder.layers:
            hooks.enter_context(layer.register_forward_hook(lambda module, args, output: outputs.append(output[0])))
        megatron_model.hidden_states(model, torch.tensor([prompt + padding], device=parallel.device))
    if model.config.sequence_parallel:
        outputs = [gather_from_sequence_parallel_region(output) for output in outputs]
    return [output[: len(prompt), 0] for output in outputs]
