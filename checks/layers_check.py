"""Do trainer and sampler have the same policy, adapters included? Tests two layers of CONFIG's model at real size.

    torchrun --nproc_per_node=N preflight.py --layers CONFIG [section.key=value ...] --folder DIR [--json FILE]

The check writes the model's config.json with two layers and random weights to DIR. It loads this model and pushes it to
the configured engine, as a run does. Then it gives every adapter an update as large as the weight that it changes, and
pushes the policy as after a step. It compares the sampler's log-probs of sampled tokens with the trainer's, as
checks.logp_gap does. If they differ, and a fault of weights/probes.py explains the sampler's log-probs, the check names
this fault.
The mean difference over all tokens does not show one wrong expert among many. Therefore the tokens of each expert are
also checked separately: their median difference may be at most FACTOR times that of the other tokens. A median below a
tenth of the bound always passes. The check uses medians because single tokens may differ greatly in a correct run. This
happens in bf16 if the router scores of two experts are almost equal.
checks/sampling_check.py checks how the tokens are drawn.
S is the number of sequences, T of tokens per row, L of MoE layers, and K of experts per token.
"""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rollout
import weight_sync
from checks import launched, sampling_check
from data_gsm8k import Question
from engines import factory
from engines.interface import Engine
from facts.architectures import Architecture
from facts.seeds import derive_seed
from hardware import device as devices
from inputs import hf_config
from inputs.config import text_option
from inputs.files import refuse_used
from inputs.rules import problems, refuse_first
from knobs import Config, RolloutConfig, TinyModelConfig
from learner import Learner
from model import batches, megatron_model, routing_replay
from parallel_setup import Parallel
from run.tripwires import GAP_FLOOR, wrong_merge
from tasks.scoring import Score
from weight_sync import Push
from weights import huggingface, probes, tiny_model
from weights.adapter_weights import Adapted, adapted_modules
from weights.peft_adapters import Pairs
from weights.policy import Policy

LAYERS, PROMPTS, PROMPT_TOKENS, GROUP, NEW_TOKENS = 2, 32, 8, 8, 16  # 32 x 8 x 16 = 4,096 sampled tokens, or more
BASE_SIZE = 0.5  # the random weights have a standard deviation of 0.5 / sqrt(in), as in weights/tiny_model.py
# Factor of the head's weights. The logits then have a standard deviation of 1 instead of 0.5, so that the sampled
# tokens depend more on the layers.
HEAD = 2.0
LEAST_TOKENS = 24  # an expert is checked if it has this many sampled tokens; then chance does not double a median
FACTOR = 2.0  # Qwen3's layers in bf16 on a CPU: 1.2 if correct, 2.6 to 3.0 if one expert lacks its update
LISTED = 3  # at most this many experts are named


# ------------------------------------------------------------------------------------------------ the model


def settings(path: str, tiny: TinyModelConfig | None, row_tokens: int) -> dict:
    """Return the model's config.json, reduced to two layers. The arguments are those of hf_config.settings."""
    raw = dict(hf_config.settings(path, tiny, row_tokens)[0])
    layers = min(LAYERS, raw["num_hidden_layers"])
    if raw.get("layer_types"):
        raw["layer_types"] = raw["layer_types"][:layers]
    dense = [layer for layer in raw.get("mlp_only_layers") or [] if layer < layers]
    return raw | {"num_hidden_layers": layers, "mlp_only_layers": dense}


def write_model(folder: Path, config: dict, dtype: torch.dtype, seed: int) -> None:
    """Write config.json and random weights to ``folder``. Raises InputError if the folder is not empty."""
    refuse_used(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    arch = hf_config.read(folder)
    head = "model.embed_tokens.weight" if arch.tied_head else "lm_head.weight"
    weights = (
        (name, (tensor * HEAD if name == head else tensor).to(dtype))
        for name, tensor in tiny_model.random_weights(arch, seed)
    )
    huggingface.save_model(weights, folder)


def enlarged(modules: list[Adapted], arch: Architecture, alpha: float) -> Pairs:
    """Draw a random update for each adapted matrix, as large as the matrix.

    The entries of both have the same standard deviation. The updates do not depend on the layout.
    """
    pairs: Pairs = {}
    for adapted in modules:
        names = [name.removesuffix(".weight") for name in adapted.names(slice(None))]
        pairs |= probes.draw(names, arch, adapted.rank, alpha, BASE_SIZE)
    return pairs


# ------------------------------------------------------------------------------------------------ the comparison


def sample(
    engine: Engine, prompts: list[list[int]], sampling: RolloutConfig, parallel: Parallel, seed: int
) -> batches.Rollout:
    """Let every replica sample a group of completions of each prompt. The result is the same on every rank."""
    replicas = parallel.world_size // sampling.tensor
    return rollout.sample(
        engine,
        [Question("", "", "", prompt) for prompt in prompts for _ in range(replicas)],
        lambda answers: [Score(0.0, True, False)] * len(answers),
        sampling,
        parallel,
        seed=seed,
        step=0,
    )[0]


@torch.no_grad()
def token_gaps(
    model: torch.nn.Module,
    batch: batches.Rollout,
    parallel: Parallel,
    replay: routing_replay.RoutingReplay | None,
    *,
    tokens_per_micro_batch: int,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return |trainer's - sampler's log-prob| of all tokens, a mask of the sampled tokens, and the tokens' experts.

    The experts of a token are those that predicted it, so they are the experts that the token before it used. Without
    ``replay``, the experts are None. All ranks call this together, and each of them computes every row.

    (S, T), (S, T), (S, T, L, K) on the host
    """
    longest = max(batch.row_length(sequence) for sequence in range(len(batch.lengths)))
    width = longest + -longest % parallel.tensor
    at_once = max(1, tokens_per_micro_batch // width)
    gaps, masks, routes = [], [], []

    def padded(x: Tensor) -> Tensor:
        """Move b rows of t tokens to the host, and pad them to T tokens.  (b, t, ...) -> (b, T, ...)"""
        return torch.nn.functional.pad(x.cpu(), (0, 0) * (x.dim() - 2) + (0, width - x.shape[1]))

    for rows in torch.arange(len(batch.lengths)).split(at_once):
        no_advantages = torch.zeros(len(batch.lengths))
        micro = batches.pack(batch, rows.tolist(), no_advantages, parallel.device, 0, parallel.tensor)
        forward = functools.partial(
            megatron_model.token_logprobs, model, micro.tokens, micro.mask, parallel, temperature
        )
        stats, used = replay.record(forward, len(rows)) if replay else (forward(), None)
        gaps.append(padded((stats.logp - micro.rollout_logp).abs()))
        masks.append(padded(micro.mask) > 0)
        if used is not None:  # (b, t, L, K), the experts of the token itself
            routes.append(padded(used.roll(1, dims=1)))  # the experts of the token before, which predicted it
    return torch.cat(gaps), torch.cat(masks), torch.cat(routes) if routes else None


def by_expert(gaps: Tensor, mask: Tensor, routes: Tensor, arch: Architecture) -> list[dict]:
    """Return, for each expert, the median gap of its tokens and of all other tokens, the most different expert first.

    An expert is left out if its tokens or the other tokens are fewer than LEAST_TOKENS. Only sampled tokens count.

    (S, T), (S, T), (S, T, L, K)
    """
    gaps, routes = gaps[mask], routes[mask]  # (N,), (N, L, K)
    judged_experts = []
    for index, layer in enumerate(layer for layer, is_moe in enumerate(arch.moe_layers) if is_moe):
        for expert in range(arch.num_experts):
            chosen = (routes[:, index] == expert).any(-1)
            own, others = gaps[chosen], gaps[~chosen]
            if min(len(own), len(others)) >= LEAST_TOKENS:
                judged_experts.append(
                    {
                        "layer": layer,
                        "expert": expert,
                        "tokens": len(own),
                        "gap": own.median().item(),
                        "others": others.median().item(),
                    }
                )
    return sorted(judged_experts, key=lambda row: -row["gap"] / max(row["others"], 1e-12))


def compare(cfg: Config, arch: Architecture, parallel: Parallel) -> dict:
    """Perform the check, and return its figures. All ranks call this together.

    In the result, ``wrong`` names the figures that are beyond their bounds; it is "" if there are none.
    """
    policy, pad_token = Policy.load(cfg, arch, parallel), 0
    model = policy.model
    learner = Learner(cfg, policy, pad_token)
    replay = learner.replay or (routing_replay.RoutingReplay(model, arch, parallel) if any(arch.moe_layers) else None)
    engine = factory.open_engine(cfg, arch, parallel.device, {pad_token}, pad_token)
    push = Push(weight_sync.way_of(cfg, policy), engine)
    probe = list(range(1, 1 + min(2 * PROMPT_TOKENS, cfg.data.max_prompt_tokens)))
    if cfg.rollout.expert_parallel:
        push.check_start(probe)
    modules = list(adapted_modules(arch, cfg.lora))
    pairs = enlarged(modules, arch, cfg.lora.alpha)
    policy.load_(probes.whole_factors(pairs, modules, cfg.lora.alpha))
    push.clean()
    replicas = parallel.world_size // cfg.rollout.tensor
    shape = (max(PROMPTS // replicas, 8) // 2, min(PROMPT_TOKENS, cfg.data.max_prompt_tokens))
    generator = torch.Generator().manual_seed(derive_seed(cfg.train.seed, "probe prompts"))
    prompts = torch.randint(1, arch.vocab_size, shape, generator=generator).tolist()
    new_tokens = min(NEW_TOKENS, cfg.rollout.max_new_tokens)
    # Every replica gets every prompt twice. Then the same batch is sampled again.
    whole = cfg.rollout.model_copy(update={"group_size": GROUP, "max_new_tokens": new_tokens})
    batch, again = (sample(engine, prompts * 2, whole, parallel, cfg.train.seed) for _ in range(2))
    short = {"group_size": sampling_check.FIRST_TOKENS // len(prompts), "max_new_tokens": 1}
    first = sample(engine, prompts, cfg.rollout.model_copy(update=short), parallel, cfg.train.seed)
    logp = sampling_check.next_logprobs(model, prompts, parallel, cfg.rollout.temperature)
    gaps_of = functools.partial(
        token_gaps,
        model,
        batch,
        parallel,
        tokens_per_micro_batch=cfg.optim.tokens_per_micro_batch,
        temperature=cfg.rollout.temperature,
    )
    gaps, mask, routes = gaps_of(replay)
    with policy.reference():
        base_gaps = parallel.gather_rows(gaps_of(None)[0])[0]
    by_rank = parallel.gather_rows(gaps)  # (ranks, S, T): every data rank has a separate trainer
    gaps = by_rank[by_rank.sum((1, 2)).argmax()]  # those of the rank with the largest gap; nan counts as the largest
    bound, experts = cfg.largest_gap, []
    if replay is not None:
        torch.distributed.broadcast(routes, src=0)  # all ranks must check the same numbers
        experts = by_expert(gaps, mask, routes, arch)
    replica = torch.arange(len(gaps)) // GROUP % replicas  # the replica that sampled each sequence
    figures: dict[str, Any] = {
        "layers": arch.num_layers,
        "tokens": int(mask.sum()),
        "bound": bound,
        "gap_mean": gaps[mask].mean().item(),
        "gap_median": gaps[mask].median().item(),
        "gap_largest_token": gaps[mask].max().item(),
        "gap_by_rank": [one[mask].mean().item() for one in by_rank],
        "gap_by_replica": [gaps[replica == r][mask[replica == r]].mean().item() for r in range(replicas)],
        "gap_without_adapters": base_gaps[mask].mean().item(),
        "experts_wrong": policy.update_kept().get("sync/experts_wrong", 0.0),
        "experts": arch.num_experts * sum(arch.moe_layers),
        "experts_judged": len(experts),
        "experts_most_apart": experts[:LISTED],
        "sampling": sampling_check.figures(batch, again, first, logp, replicas),
    }
    figures["wrong"] = judged(figures, experts)
    if not figures["gap_mean"] <= bound:
        figures["wrong"] += f"; {push.probe.first_differing_layer(probe, bound)}"
        odd = torch.tensor([not gap <= bound for gap in figures["gap_by_replica"]])[replica]
        figures["wrong"] += known_fault(policy, pairs, modules, lambda: gaps_of(None), odd, bound)
    engine.close()
    return figures


def known_fault(
    policy: Policy, pairs: Pairs, modules: list[Adapted], gaps_of: Callable, odd: Tensor, bound: float
) -> str:
    """Name the fault that explains the sampler's log-probs of some sequences, or return "" if no known fault does.

    ``odd`` is true for these sequences. The trainer tries each fault of probes.faults, and the base without adapters. A
    fault explains the log-probs if the trainer then differs from the sampler by at most ``bound``. ``gaps_of`` returns
    the result of token_gaps for the current factors. This function changes the policy's factors. All ranks call it
    together.
    """
    for name, wrong in {"the base": {}, **probes.faults(pairs, policy.arch)}.items():
        policy.load_(probes.whole_factors(wrong, modules, policy.cfg.lora.alpha))
        gaps, mask, _ = gaps_of()
        if policy.parallel.max_over_ranks(gaps[odd][mask[odd]].mean().item()) <= bound:
            return f"; the sampler has: {name}"
    return ""


def judged(figures: dict, experts: list[dict]) -> str:
    """Name the figures that are beyond their bounds, or return "" if there are none.

    ``experts`` is the result of by_expert.
    """
    bound = figures["bound"]
    odd = {
        part: ", ".join(str(place) for place, gap in enumerate(figures[f"gap_by_{part}"]) if not gap <= bound)
        for part in ("replica", "rank")
    }
    apart = [row for row in experts if not row["gap"] <= max(FACTOR * row["others"], GAP_FLOOR * bound)]
    listed = ", ".join(
        f"{row['expert']} of layer {row['layer']} ({row['gap']:.2g} nats, other tokens {row['others']:.2g})"
        for row in apart[:LISTED]
    )
    rules = (
        (
            max(figures["gap_by_replica"]) <= bound and figures["gap_mean"] <= bound,
            f"sampler and trainer differ by {figures['gap_mean']:.2g} nats per token, at most {bound:g} is allowed "
            f"(samplers {odd['replica']} of {len(figures['gap_by_replica'])}, trainers on rank "
            f"{odd['rank']} of {len(figures['gap_by_rank'])})",
        ),
        (not (wrong := wrong_merge(figures["experts_wrong"])), wrong),
        (not apart, f"tokens of {len(apart)} of {len(experts)} experts have a larger median gap, first: {listed}"),
        (
            figures["gap_without_adapters"] > bound,
            f"with the adapters off, the trainer differs by only {figures['gap_without_adapters']:.2g} nats, so this "
            f"check would not show adapters that do not reach the sampler; more than {bound:g} is needed",
        ),
        (
            all(row["right"] for row in figures["sampling"]),
            "tokens are not drawn by the reported probabilities: "
            + "; ".join(row["text"] for row in figures["sampling"] if not row["right"]),
        ),
    )
    return "; ".join(text for good, text in rules if not good)


# ------------------------------------------------------------------------------------------------ the command


def as_text(figures: dict) -> list[str]:
    """Return the figures as lines of text."""
    lines = [
        f"{figures['layers']} layers, {figures['tokens']} sampled tokens: {figures['gap_mean']:.2g} nats per token "
        f"between sampler and trainer, at most {figures['bound']:g} is allowed; the median token differs by "
        f"{figures['gap_median']:.2g}, the largest by {figures['gap_largest_token']:.2g}",
        f"with the adapters off, the trainer differs by {figures['gap_without_adapters']:.2g} nats",
    ]
    if figures["experts"]:
        lines.append(f"{figures['experts_judged']} of {figures['experts']} experts had {LEAST_TOKENS} tokens or more")
    for row in figures["experts_most_apart"][:1]:
        lines[-1] += f"; the most different has a median gap of {row['gap']:.2g}, other tokens {row['others']:.2g}"
    lines += [row["text"] for row in figures["sampling"]]
    return lines + [f"WRONG: {figures['wrong']}"] * bool(figures["wrong"])


def refuse(cfg: Config, ranks: int) -> None:
    """Raise InputError unless the configuration can run with the two layers and this number of ranks."""
    arch = hf_config.parse(settings(cfg.model.path, cfg.tiny_model, cfg.row_tokens))
    refuse_first(problems(cfg, arch, ranks))


def answer(cfg: Config, parallel: Parallel, folder: Path) -> launched.Answer:
    """Write the model, compare trainer and sampler, and remove the model."""
    writes = os.environ.get("LOCAL_RANK", "0") == "0"  # on every node
    try:
        if writes:
            two_layers = settings(cfg.model.path, cfg.tiny_model, cfg.row_tokens)
            write_model(folder, two_layers, devices.DTYPES[cfg.model.dtype], cfg.train.seed)
        torch.distributed.barrier()
        cfg = cfg.changed(model={"path": str(folder)})
        arch = hf_config.read(folder)
        factory.check_engine(cfg, arch, parallel.world_size)
        figures = compare(cfg, arch, parallel)
    finally:
        if writes:
            shutil.rmtree(folder, ignore_errors=True)  # after an error it may be missing
    lines = as_text(figures)
    return launched.Answer(not figures["wrong"], "\n".join(lines), figures | {"text": lines})


def main(arguments: list[str]) -> int:
    """Run the command. Exit code 0: trainer and sampler agree. 1: a line says how they differ. 2: unusable input."""
    parser = launched.command_line("--layers", __doc__)
    parser.add_argument(
        "--folder",
        required=True,
        type=text_option,
        help="folder where the two layers are written; it is removed at the end",
    )
    args = parser.parse_intermixed_args(arguments)
    return launched.ask(args, refuse, lambda cfg, parallel: answer(cfg, parallel, Path(args.folder)))
