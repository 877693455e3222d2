"""Two layers of CONFIG's model at their real sizes: whether the sampler has the trainer's policy, adapters included.

    torchrun --nproc_per_node=N preflight.py --layers CONFIG [section.key=value ...] --folder DIR [--json FILE]

The model's config.json with two layers and random weights is written to DIR, loaded and handed to the configured engine
as in a run; then every adapter's update is made as large as the weight that it changes and pushed as after a step.
What the engine samples is judged by the trainer's log-probs, as checks.logp_gap does: the mean difference of a token.
A mean over all tokens does not show one expert of many, so each expert's tokens are judged by themselves: their median
may be FACTOR times that of the other tokens. (A median: in bf16 a token at which two experts almost tie may be far
apart in a sound run.)
S sequences, T tokens of a row, L MoE layers, K experts a token.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import adapter_weights
import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import rollout
import routing_replay
import tiny_model
import weights_hf
from config import derive_seed, load_config
from config_rules import check_engine_layout, check_layout
from data_gsm8k import Question
from hf_config import Architecture
from input_files import BAD_INPUT, UNFINISHED, fresh_folder, one_line
from knobs import Config
from learner import Learner
from parallel_setup import Parallel
from rollout import Rollout
from tripwires import GAP_FLOOR, Tripped
from weight_sync import WeightSync

LAYERS, PROMPTS, PROMPT_TOKENS, GROUP, NEW_TOKENS = 2, 32, 8, 8, 16  # 32 x 8 x 16 = 4,096 sampled tokens, or more
HEAD = 2.0  # random logits of standard deviation 1, not 0.5: the choices depend more on what the layers compute
MET = 24  # an expert is judged if so many sampled tokens went through it: then chance doubles no median
FACTOR = 2.0  # see above; Qwen3's layers in bf16 on a CPU: 1.2 if sound, 2.6 to 3.0 where one expert lacks its update
LISTED = 3  # experts that are named


# ------------------------------------------------------------------------------------------------ the model


def settings(cfg: Config) -> dict:
    """config.json of the model with its first two layers only."""
    raw = dict(hf_config.settings(cfg)[0])
    layers = min(LAYERS, raw["num_hidden_layers"])
    raw["num_hidden_layers"] = layers
    raw["mlp_only_layers"] = [layer for layer in raw.get("mlp_only_layers") or [] if layer < layers]
    if raw.get("layer_types"):
        raw["layer_types"] = raw["layer_types"][:layers]
    return raw


def write_model(cfg: Config, folder: Path) -> None:
    """That config.json, and random weights of these sizes, in ``folder``; InputError if there is one of the user's."""
    fresh_folder(folder)
    (folder / "config.json").write_text(json.dumps(settings(cfg), indent=1) + "\n")
    arch, dtype = hf_config.read(folder), rollout.DTYPES[cfg.model.dtype]

    def weights() -> Iterator[tuple[str, Tensor]]:
        head = "model.embed_tokens.weight" if arch.tied_head else "lm_head.weight"
        for name, tensor in tiny_model.random_weights(arch, cfg.train.seed):
            yield name, (tensor * HEAD if name == head else tensor).to(dtype)

    weights_hf.save_model(weights(), folder)


@torch.no_grad()
def move_(adapters: dict[str, torch.nn.Module], arch: Architecture, parallel: Parallel, seed: int) -> None:
    """Random factors, the same in every layout, in place: each update (alpha / R) B A gets the base weights' size.

    That is 0.5 / sqrt(in) (tiny_model.random_weights).
    """
    whole = {}
    scales = {f"{name}.{letter}": adapter.scale for name, adapter in adapters.items() for letter in "AB"}
    for name, factor in lora_megatron.factors(adapters).items():
        shape = lora_megatron.whole_shape(factor, parallel)
        # A is (R, in) or (E, in, R), B (out, R) or (E, R, out): the second axis is what the product is summed over.
        std = 1 / math.sqrt(shape[1]) if name.endswith(".A") else 0.5 / (scales[name] * math.sqrt(shape[1]))
        generator = torch.Generator().manual_seed(derive_seed(seed, "moved", name))
        whole[adapter_weights.hf_name(name)] = torch.randn(shape, generator=generator) * std
    factors = lora_megatron.factors(adapters)
    for name, piece in adapter_weights.scatter(adapters, whole, arch, parallel).items():
        factors[name].copy_(piece)


# ------------------------------------------------------------------------------------------------ the comparison


def sample(engine, cfg: Config, arch: Architecture, parallel: Parallel) -> Rollout:
    """Answers to prompts of random tokens, at least one prompt for every replica; the same on every rank."""
    length = min(PROMPT_TOKENS, cfg.data.max_prompt_tokens)
    generator = torch.Generator().manual_seed(derive_seed(cfg.train.seed, "probe prompts"))
    tokens = torch.randint(1, arch.vocab_size, (max(PROMPTS, parallel.world_size), length), generator=generator)
    asked = [Question("", "", "", prompt) for prompt in tokens.tolist()]
    changes = {"group_size": GROUP, "max_new_tokens": min(NEW_TOKENS, cfg.rollout.max_new_tokens)}
    short, seed = cfg.rollout.model_copy(update=changes), cfg.train.seed
    return rollout.sample(engine, asked, lambda question, answer: (0.0, True), short, parallel, seed=seed, step=0)[0]


@torch.no_grad()
def trainer(
    model: torch.nn.Module, batch: Rollout, cfg: Config, parallel: Parallel, replay: routing_replay.RoutingReplay | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gap of every sampled token, where there is one, and with ``replay`` the experts that predicted it.

    (S, T), (S, T), (S, T, L, K) on the host. Collective: every rank computes every row.
    """
    longest = max(batch.row_length(sequence) for sequence in range(len(batch.lengths)))
    width = longest + -longest % parallel.tensor
    at_once = max(1, cfg.optim.tokens_per_micro_batch // width)
    gaps, masks, routes = [], [], []

    def as_wide(x: Tensor) -> Tensor:
        """(b, t, ...) -> (b, T, ...) on the host"""
        return torch.nn.functional.pad(x.cpu(), (0, 0) * (x.dim() - 2) + (0, width - x.shape[1]))

    with model_megatron.evaluating(model):
        for rows in torch.arange(len(batch.lengths)).split(at_once):
            no_advantages = torch.zeros(len(batch.lengths))
            micro = rollout.pack(batch, rows.tolist(), no_advantages, parallel.device, 0, parallel.tensor)
            given = (model, micro.tokens, micro.mask, parallel, cfg.rollout.temperature)
            forward = functools.partial(model_megatron.token_logprobs, *given)
            (logp, _), met = replay.record(forward, len(rows)) if replay else (forward(), None)
            gaps.append(as_wide((logp - micro.rollout_logp).abs()))
            masks.append(as_wide(micro.mask) > 0)
            if met is not None:  # (b, t, L, K) of each token itself
                routes.append(as_wide(met.roll(1, dims=1)))  # the token before has predicted it
    return torch.cat(gaps), torch.cat(masks), torch.cat(routes) if routes else None


def by_expert(gaps: Tensor, mask: Tensor, routes: Tensor, arch: Architecture) -> list[dict]:
    """Each expert of each layer that MET sampled tokens have met and MET have not: the median gap of both kinds.

    The one whose tokens stand out most comes first.  (S, T), (S, T), (S, T, L, K)
    """
    layers, found = [layer for layer, is_moe in enumerate(arch.moe_layers) if is_moe], []
    gaps, routes = gaps[mask], routes[mask]  # (N,), (N, L, K)
    for index, layer in enumerate(layers):
        for expert in range(arch.num_experts):
            chosen = (routes[:, index] == expert).any(-1)
            own, others = gaps[chosen], gaps[~chosen]
            if min(len(own), len(others)) >= MET:
                medians = {"gap": own.median().item(), "others": others.median().item()}
                found.append({"layer": layer, "expert": expert, "tokens": len(own), **medians})
    return sorted(found, key=lambda row: -row["gap"] / max(row["others"], 1e-12))


def compare(cfg: Config, arch: Architecture, parallel: Parallel) -> dict:
    """All figures of this check; ``wrong`` says what is beyond its bound, "" if nothing is. Collective."""
    model = model_megatron.build(arch, parallel, dtype=rollout.DTYPES[cfg.model.dtype], recompute=cfg.model.recompute)
    weights_hf.load(model, arch, parallel, cfg.model.path)
    adapters = lora_megatron.attach(model, cfg.lora, parallel, cfg.train.seed)
    pad_token = 0
    learner = Learner(cfg, arch, parallel, model, adapters, pad_token)
    replay = learner.replay or (routing_replay.RoutingReplay(model, arch, parallel) if any(arch.moe_layers) else None)
    engine = rollout.open_engine(cfg, arch, parallel.device, {pad_token}, pad_token)
    weights = WeightSync(engine, model, arch, parallel, cfg)
    probe = list(range(1, 1 + min(2 * PROMPT_TOKENS, cfg.data.max_prompt_tokens)))
    if cfg.rollout.expert_parallel:
        weights.check_start(probe)
    move_(adapters, arch, parallel, cfg.train.seed)
    weights.push_clean()
    batch = sample(engine, cfg, arch, parallel)
    gaps, mask, routes = trainer(model, batch, cfg, parallel, replay)
    with lora_megatron.disabled(adapters):
        unmoved, _, _ = trainer(model, batch, cfg, parallel, None)
    by_rank = parallel.gather_rows(gaps)  # (ranks, S, T): every data rank has a trainer of its own
    gaps = by_rank[by_rank.sum((1, 2)).argmax()]  # of the one that is farthest away; nan counts as the largest
    unmoved = parallel.gather_rows(unmoved)[0]
    if routes is not None:
        torch.distributed.broadcast(routes, src=0)  # all ranks must judge the same numbers
    bound = getattr(cfg.checks, f"logp_gap_{cfg.model.dtype}")
    experts = by_expert(gaps, mask, routes, arch) if replay is not None else []
    replicas = parallel.world_size // (cfg.rollout.tensor if cfg.rollout.engine == "vllm" else 1)
    prompt = torch.arange(len(gaps)) // GROUP
    by_replica = [gaps[prompt % replicas == r][mask[prompt % replicas == r]].mean().item() for r in range(replicas)]
    found = {
        "layers": arch.num_layers,
        "tokens": int(mask.sum()),
        "bound": bound,
        "gap_mean": gaps[mask].mean().item(),
        "gap_median": gaps[mask].median().item(),
        "gap_largest_token": gaps[mask].max().item(),
        "gap_by_rank": [one[mask].mean().item() for one in by_rank],
        "gap_by_replica": by_replica,
        "gap_without_adapters": unmoved[mask].mean().item(),
        "experts": arch.num_experts * sum(arch.moe_layers),
        "experts_judged": len(experts),
        "experts_most_apart": experts[:LISTED],
    }
    found["wrong"] = judged(found, experts)
    if not found["gap_mean"] <= bound:
        found["wrong"] += f"; {learner.first_differing_layer(engine, probe, bound)}"
    engine.close()
    return found


def judged(found: dict, experts: list[dict]) -> str:
    """What is beyond its bound; "" if nothing is."""
    bound, wrong = found["bound"], []
    if not max(found["gap_by_replica"]) <= bound or not found["gap_mean"] <= bound:
        odd = {part: [place for place, gap in enumerate(found[f"gap_by_{part}"]) if not gap <= bound]
               for part in ("replica", "rank")}  # fmt: skip
        wrong.append(
            f"sampler and trainer differ by {found['gap_mean']:.2g} nats a token, at most {bound:g} expected "
            f"(samplers {', '.join(map(str, odd['replica']))} of {len(found['gap_by_replica'])}, trainers on rank "
            f"{', '.join(map(str, odd['rank']))} of {len(found['gap_by_rank'])})"
        )
    if apart := [row for row in experts if not row["gap"] <= max(FACTOR * row["others"], GAP_FLOOR * bound)]:
        listed = ", ".join(
            f"{row['expert']} of layer {row['layer']} ({row['gap']:.2g} nats, other tokens {row['others']:.2g})"
            for row in apart[:LISTED]
        )
        wrong.append(f"tokens of {len(apart)} of {len(experts)} experts stand out by their median, first: {listed}")
    if not found["gap_without_adapters"] > bound:
        wrong.append(
            f"with the adapters off the trainer is {found['gap_without_adapters']:.2g} nats away, so that adapters "
            f"which do not reach the sampler would not show; needed: more than {bound:g}"
        )
    return "; ".join(wrong)


# ------------------------------------------------------------------------------------------------ the command


def as_text(found: dict) -> list[str]:
    """The figures for a reader, line by line."""
    lines = [
        f"{found['layers']} layers, {found['tokens']} sampled tokens: {found['gap_mean']:.2g} nats a token between "
        f"sampler and trainer, at most {found['bound']:g} expected; half of the tokens at most "
        f"{found['gap_median']:.2g}, the largest {found['gap_largest_token']:.2g}",
        f"with the adapters off the trainer is {found['gap_without_adapters']:.2g} nats away",
    ]
    if found["experts"]:
        lines.append(f"{found['experts_judged']} of {found['experts']} experts met {MET} tokens or more")
        for row in found["experts_most_apart"][:1]:
            lines[-1] += f"; median gap of one's tokens at most {row['gap']:.2g}, of the others {row['others']:.2g}"
    if found["wrong"]:
        lines.append(f"WRONG: {found['wrong']}")
    return lines


def run(cfg: Config, folder: Path, json_path: str | None) -> bool:
    """Compare on every rank and print what came of it; whether sampler and trainer agree."""
    parallel_setup.start_device(cfg)
    ranks = parallel_setup.launched_world_size()
    with parallel_setup.open_world(cfg) as device:
        try:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                write_model(cfg, folder)
            torch.distributed.barrier()
            arch = hf_config.read(folder)
            cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": str(folder)})})
            check_layout(cfg, arch, ranks)
            check_engine_layout(cfg, arch, ranks)
            rollout.check_engine(cfg, arch, ranks)
            parallel = parallel_setup.open_layout(cfg.parallel, device)
            found = compare(cfg, arch, parallel)
        finally:
            if os.environ.get("LOCAL_RANK", "0") == "0" and (folder / UNFINISHED).exists():
                shutil.rmtree(folder)
        if parallel.rank == 0:
            print("\n".join(as_text(found)), flush=True)
            if json_path:
                Path(json_path).write_text(json.dumps(found | {"text": as_text(found)}, indent=1) + "\n")
    return not found["wrong"]


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: they agree; 1: they do not, in one line; 2: unusable input, one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", help="YAML file, e.g. configs/qwen3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--folder", required=True, help="where the two layers are written, removed at the end")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    args = parser.parse_intermixed_args(arguments)
    rank = 0
    try:
        rank = parallel_setup.check_launch()
        return 0 if run(load_config(args.config, args.overrides), Path(args.folder), args.json) else 1
    except BAD_INPUT as error:
        parallel_setup.report(rank, f"error: {one_line(error)}")
        return 2
    except Tripped as error:
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        return 1
