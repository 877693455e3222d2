"""GRPO with LoRA on a mixture-of-experts model, start to finish.

    torchrun --nproc_per_node=16 train_grpo.py configs/qwen3.yaml [section.key=value ...]
    python train_grpo.py CONFIG [section.key=value ...] --check [--ranks N]     refuse bad input in seconds, train nothing

One step: give the sampler the current policy, sample G answers to each of P questions, score them, compare each score
with its group's, and step the LoRA weights on the clipped objective with a KL leash to the reference, which is the
same model with its LoRA off. Each module imported below is one of those verbs. P prompts, G group, b rows, T tokens.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import adapter_weights
import checkpoint
import data_gsm8k
import device as devices
import evaluate
import grpo
import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import reward_gsm8k
import rollout
import runlog
import seeds
import tiny_model
import weights_hf
from config import Config, InputError, check_layout, check_runnable, load_config
from parallel_setup import Parallel
from rollout import MicroBatch, Rollout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ------------------------------------------------------------------------------------------------ the algorithm


def train(cfg: Config, parallel: Parallel) -> None:
    """The whole run: set up or resume, then cfg.train.steps steps, evaluated before the first and after the last."""
    arch, tokenizer, questions, held_out = check_inputs(cfg, parallel.world_size)
    log, saved = open_log(cfg, parallel)
    model = model_megatron.build(arch, parallel, dtype=DTYPES[cfg.model.dtype], recompute=cfg.model.recompute)
    weights_hf.load(model, arch, parallel, cfg.model.path)
    adapters = lora_megatron.attach(model, cfg.lora, parallel, cfg.train.seed)
    optimizer = make_optimizer(adapters, cfg)
    if saved:
        restore(saved, adapters, optimizer, arch, parallel)
    pad_token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    engine = rollout.open_engine(cfg, arch, data_gsm8k.stop_token_ids(cfg.model.path, tokenizer), pad_token)
    engine.load_weights(weights_hf.export(model, arch, parallel))
    learner = Learner(cfg, parallel, model, adapters, optimizer, pad_token)
    score = scorer(cfg, tokenizer)
    first_step = saved.step if saved else 0
    introduce(log, cfg, parallel, adapters, questions, held_out)
    if first_step == 0:
        log_evaluation(log, 0, engine, held_out, score, cfg, parallel)

    for step in range(first_step, cfg.train.steps):
        clock = Clock()
        # 1. Hand over the policy: W + (alpha / R) B A. The base is whole in the engine already and never moves.
        engine.load_weights(weights_hf.export(model, arch, parallel, adapted_only=True))
        clock.lap("sync")
        # 2. Sample and score G completions for each of P questions; both depend on (seed, step) alone.
        asked = questions.pick(step, cfg.rollout.prompts_per_step)
        batch, completions = rollout.sample(engine, asked, score, cfg, parallel, step)
        clock.lap("generate")
        # 3. Compare within the group.
        if cfg.reward.permute:
            batch.rewards = permuted(batch.rewards, seeds.derive(cfg.train.seed, "permute", step))
        advantages = grpo.group_advantages(batch.rewards, cfg.loss.advantage)  # (P, G)
        # 4. Update the adapters, once for every prompts_per_update prompts.
        metrics = learner.update(batch, advantages.flatten(), step, clock)
        # 5. Book-keeping.
        metrics = rollout_metrics(batch) | metrics
        log.log_completions(step, shown_completions(completions, asked, batch, tokenizer, cfg))
        log.log_step(step, metrics, clock.timing(sum(batch.lengths)))
        done = step + 1
        if done == cfg.train.steps or (cfg.eval.every and done % cfg.eval.every == 0):
            engine.load_weights(weights_hf.export(model, arch, parallel, adapted_only=True))
            log_evaluation(log, done, engine, held_out, score, cfg, parallel)
        if done == cfg.train.steps or (cfg.train.checkpoint_every and done % cfg.train.checkpoint_every == 0):
            save(log, done, adapters, optimizer, cfg, arch, parallel)

    evaluations = log.evaluations()
    log.finish(evaluate.result_line(evaluations[0], evaluations[-1], cfg.data.source) if evaluations else "")


class Learner:
    """The policy under training: model, adapters and optimizer, and how a rollout becomes optimizer steps."""

    def __init__(self, cfg: Config, parallel: Parallel, model, adapters, optimizer, pad_token: int) -> None:
        self.cfg, self.parallel, self.model, self.adapters, self.optimizer = cfg, parallel, model, adapters, optimizer
        self.pad_token = pad_token
        self.parameters = list(lora_megatron.factors(adapters).values())

    def update(self, batch: Rollout, advantages: Tensor, step: int, clock: Clock) -> dict[str, float]:
        """Optimizer steps on one rollout, and their metrics.  ``advantages``: (P x G,)

        One count of tokens and sequences for all ranks and micro-batches of an update, known before its first
        backward, makes the split irrelevant.
        """
        cfg, group = self.cfg, self.cfg.rollout.group_size
        per_update = cfg.optim.prompts_per_update * group
        updates = [list(range(i, i + per_update)) for i in range(0, len(advantages), per_update)]
        packed = [self._pack(batch, sequences, advantages) for sequences in updates]
        old_logp = None
        if len(updates) > 1:  # with one update the policy that sampled is the policy that learns: the ratio is 1
            with torch.no_grad():
                old_logp = [[self._logp(micro)[0] for micro in micro_batches] for micro_batches, _ in packed]
            clock.lap("old_logp")
        sums: dict[str, Tensor] = {}
        peak_gap, norms = torch.zeros(()), []
        for index, (micro_batches, counts) in enumerate(packed):
            for i, micro in enumerate(micro_batches):
                seed_dropout(cfg, step, index, i, self.parallel.rank)
                loss, stats, gap = self._loss(micro, old_logp[index][i] if old_logp else None, counts, clock)
                loss.backward()
                for name, value in stats.items():
                    sums[name] = sums.get(name, 0) + value / len(updates)
                peak_gap = torch.maximum(peak_gap, gap)
            self.parallel.sync_gradients_(self.parameters)
            norms.append(self._step(step))
            clock.lap("update")
        totals = self.parallel.sum_over_data(torch.stack(list(sums.values())))
        metrics = dict(zip(sums, totals.tolist(), strict=True))
        return metrics | {
            "rollout/logp_gap_max": self.parallel.max_over_ranks(peak_gap.item()),
            "actor/grad_norm": sum(norms) / len(norms),
            "actor/lr": learning_rate(cfg, step),
        }

    def _pack(self, batch: Rollout, sequences: list[int], advantages: Tensor) -> tuple[list[MicroBatch], dict]:
        """This rank's micro-batches of one update, and the update's counts over all data ranks."""
        cfg, parallel = self.cfg, self.parallel
        if cfg.loss.mask_truncated:
            sequences = [s for s in sequences if not batch.truncated[s]]
        counts = {
            "num_tokens": sum(batch.lengths[s] for s in sequences),
            "num_sequences": len(sequences),
            "max_new_tokens": cfg.rollout.max_new_tokens,
        }
        if cfg.loss.skip_equal_groups:
            mixed = batch.rewards.amax(dim=1) > batch.rewards.amin(dim=1)
            sequences = [s for s in sequences if mixed[s // cfg.rollout.group_size]]
        lengths = {s: batch.row_length(s) for s in sequences}
        shares = rollout.plan(lengths, parallel.data, cfg.optim.tokens_per_micro_batch, parallel.tensor)
        shares = shares or [[[]] * parallel.data]  # nothing to learn from: one empty micro-batch keeps ranks in step
        mine = [share[parallel.data_rank] for share in shares]
        make = [rollout.pack(batch, rows, advantages, parallel.device, self.pad_token, parallel.tensor) for rows in mine]
        return make, counts

    def _logp(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return model_megatron.token_logprobs(
            self.model, micro.tokens, micro.mask, self.parallel, self.cfg.rollout.temperature
        )

    def _loss(
        self, micro: MicroBatch, old_logp: Tensor | None, counts: dict, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """This micro-batch's share of the loss and of the metrics, and its largest sampler-trainer gap."""
        loss_cfg = self.cfg.loss
        ref_logp = None
        if loss_cfg.kl != "none":
            with lora_megatron.disabled(self.adapters), torch.no_grad():
                ref_logp = self._logp(micro)[0]  # (b, T)
            clock.lap("reference")
        logp, entropy = self._logp(micro)  # (b, T) twice
        old_logp = logp.detach() if old_logp is None else old_logp
        weights = grpo.rollout_weights(
            old_logp, micro.rollout_logp, micro.mask, loss_cfg.importance, loss_cfg.importance_clip
        )
        policy_loss, stats = grpo.policy_loss(
            logp, old_logp, micro.advantages, micro.mask, weights=weights, kind=loss_cfg.kind,
            clip_low=loss_cfg.clip_low, clip_high=loss_cfg.clip_high, dual_clip=loss_cfg.dual_clip,
            aggregate=loss_cfg.aggregate, **counts,
        )  # fmt: skip

        def per_token_mean(value: Tensor) -> Tensor:
            return grpo.aggregate_loss(value.detach(), micro.mask, num_tokens=counts["num_tokens"])

        metrics = {f"actor/{name}": value for name, value in stats.items()}
        loss = policy_loss
        if ref_logp is not None:
            kl = grpo.kl(logp, ref_logp, loss_cfg.kl, micro.mask)
            loss = loss + loss_cfg.kl_coef * grpo.aggregate_loss(kl, micro.mask, aggregate=loss_cfg.aggregate, **counts)
            metrics["actor/kl_loss"] = per_token_mean(kl)
        if loss_cfg.entropy_coef:
            bonus = grpo.aggregate_loss(entropy, micro.mask, aggregate=loss_cfg.aggregate, **counts)
            loss = loss - loss_cfg.entropy_coef * bonus
        gap = (old_logp - micro.rollout_logp).abs() * micro.mask
        metrics |= {
            "actor/loss": loss.detach(),
            "actor/entropy": per_token_mean(entropy),
            "rollout/logp_gap_mean": per_token_mean(gap),
        }
        if loss_cfg.importance != "none":
            metrics["rollout/importance_mean"] = per_token_mean(weights)
            clipped = (weights >= loss_cfg.importance_clip) * micro.mask
            metrics["rollout/importance_clip_frac"] = per_token_mean(clipped)
        return loss, metrics, gap.amax()

    def _step(self, step: int) -> float:
        """Clip over the whole sharded parameter set, one AdamW step, and the norm before clipping."""
        norm = self.parallel.gradient_norm(self.parameters).item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {step + 1}: the gradient norm is {norm}; nothing was updated or saved")
        shrink = min(1.0, self.cfg.optim.max_grad_norm / (norm + 1e-6))
        for parameter in self.parameters:
            parameter.grad *= shrink
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.cfg, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def learning_rate(cfg: Config, step: int) -> float:
    """AdamW's rate at ``step`` (from 0): linear warm-up, then constant, linear or cosine to min_lr_ratio of the peak."""
    optim = cfg.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.decay == "constant":
        return optim.lr
    share = (step - optim.warmup_steps) / max(1, cfg.train.steps - 1 - optim.warmup_steps)  # 0 -> 1 at the last step
    fall = share if optim.decay == "linear" else (1 - math.cos(math.pi * share)) / 2
    return optim.lr * (1 - (1 - optim.min_lr_ratio) * fall)


def permuted(rewards: Tensor, seed: int) -> Tensor:
    """The control experiment: the same rewards, dealt to the step's completions at random.  (P, G) -> (P, G)"""
    order = torch.randperm(rewards.numel(), generator=torch.Generator().manual_seed(seed))
    return rewards.flatten()[order].view_as(rewards)


def seed_dropout(cfg: Config, step: int, update: int, micro: int, rank: int) -> None:
    """LoRA dropout is the one draw from the global generator: it depends on the step, and on how rows are split."""
    if cfg.lora.dropout:
        torch.manual_seed(seeds.derive(cfg.train.seed, "dropout", step, update, micro, rank))


# ------------------------------------------------------------------------------------------------ setting up


def check_inputs(cfg: Config, world_size: int):
    """Architecture, tokenizer, training and held-out questions; InputError for whatever cannot work, weights untouched.

    Every gold answer must score 1.0 under the chosen reward, or every advantage of the run would be noise.
    """
    arch = hf_config.read(cfg.model.path)
    check_layout(cfg, arch, world_size)
    weights_hf.check(cfg.model.path, arch)
    tokenizer = data_gsm8k.load_tokenizer(cfg.model.path)
    questions, held_out = (data_gsm8k.load(cfg, split, tokenizer) for split in ("train", "test"))
    for split, part in (("training", questions), ("held-out", held_out)):
        wrong = [q for q in part if reward_gsm8k.score(q.answer, q.gold, cfg.reward.method) != 1.0]
        if wrong:
            raise InputError(
                f"reward.method: {cfg.reward.method} gives {len(wrong)} of {len(part)} gold {split} answers less than "
                f"1.0, the first being {wrong[0].answer[-60:]!r}; needed: a method that fits the data's answers"
            )
    if cfg.rollout.prompts_per_step > len(questions):
        raise InputError(
            f"rollout.prompts_per_step: {cfg.rollout.prompts_per_step} exceeds the {len(questions)} training questions"
        )
    return arch, tokenizer, questions, held_out


def open_log(cfg: Config, parallel: Parallel) -> tuple[runlog.RunLog, checkpoint.Checkpoint | None]:
    """The run's log, and the checkpoint to go on from. Rank 0 chooses; all ranks read the same folder."""
    choice: list[str | None] = [None]
    if parallel.rank == 0 and cfg.train.resume != "never":
        run = checkpoint.find_resumable(cfg) if cfg.train.resume == "auto" else Path(cfg.train.resume)
        saved = checkpoint.latest(run) if run else None
        if run and saved is None:
            raise InputError(f"train.resume: {run} holds no usable checkpoint")
        if saved:
            checkpoint.check_resume(saved, cfg)
            choice = [str(saved.path)]
    dist.broadcast_object_list(choice)
    if choice[0] is None:
        return runlog.open_run(cfg, parallel.world_size, parallel.rank), None
    saved = checkpoint.load(Path(choice[0]))
    log = runlog.open_run(cfg, parallel.world_size, parallel.rank, resume=saved.path.parent.parent)
    log.rewind(saved.step)
    return log, saved


def make_optimizer(adapters, cfg: Config) -> torch.optim.AdamW:
    """AdamW on the adapters alone, with its moments in place from the start so that a checkpoint can fill them."""
    factors = lora_megatron.factors(adapters).values()
    optim = cfg.optim
    optimizer = torch.optim.AdamW(
        factors, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    for factor in factors:
        optimizer.state[factor] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(factor),
            "exp_avg_sq": torch.zeros_like(factor),
        }
    return optimizer


MOMENTS = ("exp_avg", "exp_avg_sq")


def save(log: runlog.RunLog, step: int, adapters, optimizer, cfg: Config, arch, parallel: Parallel) -> None:
    """A checkpoint after ``step`` steps: whole factors and moments, so that any layout can load it. Collective."""
    factors = lora_megatron.factors(adapters)
    whole = {"adapter": adapter_weights.gather(adapters, factors, arch, parallel), "optimizer": {}}
    for moment in MOMENTS:
        values = {name: optimizer.state[factor][moment] for name, factor in factors.items()}
        gathered = adapter_weights.gather(adapters, values, arch, parallel)
        whole["optimizer"] |= {f"{name}.{moment}": value for name, value in gathered.items()}
    if parallel.rank == 0:
        updates = int(optimizer.state[next(iter(factors.values()))]["step"])
        checkpoint.save(log.run_dir, step, whole, {"optimizer_steps": updates}, cfg)
    parallel.barrier()


@torch.no_grad()
def restore(saved: checkpoint.Checkpoint, adapters, optimizer, arch, parallel: Parallel) -> None:
    """Adapters and optimizer as they were after ``saved.step`` steps, whatever layout wrote them."""
    factors = lora_megatron.factors(adapters)
    for name, value in adapter_weights.scatter(adapters, saved.tensors["adapter"], arch, parallel).items():
        factors[name].copy_(value)
    for moment in MOMENTS:
        suffix = f".{moment}"
        whole = {k.removesuffix(suffix): v for k, v in saved.tensors["optimizer"].items() if k.endswith(suffix)}
        for name, value in adapter_weights.scatter(adapters, whole, arch, parallel).items():
            optimizer.state[factors[name]][moment].copy_(value)
    for factor in factors.values():
        optimizer.state[factor]["step"].fill_(saved.state["optimizer_steps"])


def scorer(cfg: Config, tokenizer):
    """(question, completion) -> reward, and whether an answer was found. Text is cut at the first stop token."""

    def score(question, completion) -> tuple[float, bool]:
        tokens = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
        text = tokenizer.decode(tokens)
        method = cfg.reward.method
        return reward_gsm8k.score(text, question.gold, method), reward_gsm8k.parsable(text, method)

    return score


# ------------------------------------------------------------------------------------------------ telling


def introduce(log: runlog.RunLog, cfg: Config, parallel: Parallel, adapters, questions, held_out) -> None:
    """What this run is, before its first step: folder, layout, data, adapters, and the batch equation."""
    p, r, o = parallel, cfg.rollout, cfg.optim
    updates = r.prompts_per_step // o.prompts_per_update
    description = lora_megatron.describe(adapters, parallel)
    log.say(
        f"run folder: {log.run_dir}\n"
        f"layout: {p.world_size} ranks = tensor {p.tensor} x data {p.data}"
        f" = expert_tensor {p.expert_tensor} x expert {p.expert} x expert_data {p.expert_data}\n"
        f"train: {questions.description}\nheld out: {held_out.description}\n"
        f"{description}\n"
        f"a step: {r.prompts_per_step} prompts x {r.group_size} = {r.prompts_per_step * r.group_size} sequences, "
        f"{updates} update{'s' * (updates > 1)} of {o.prompts_per_update} prompts x {r.group_size}"
    )


def log_evaluation(log: runlog.RunLog, step: int, engine, held_out, score, cfg: Config, parallel: Parallel) -> None:
    """Evaluate the policy that the engine holds, after ``step`` steps."""
    summary, outcomes = evaluate.evaluate(engine, held_out, score, cfg, parallel)
    log.log_eval(step, summary, outcomes)
    log.say(f"held-out accuracy after {step} steps: {evaluate.headline(summary)}")


def rollout_metrics(batch: Rollout) -> dict[str, float]:
    """What was sampled, before anything is learned from it."""
    lengths = torch.tensor(batch.lengths, dtype=torch.float64)
    equal = batch.rewards.amax(dim=1) == batch.rewards.amin(dim=1)
    return {
        "reward/mean": batch.rewards.double().mean().item(),
        "reward/unparsable_frac": 1 - batch.parsable.double().mean().item(),
        "reward/equal_groups": int(equal.sum()),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": int(lengths.max()),
        "response_length/truncated_frac": batch.truncated.double().mean().item(),
    }


def shown_completions(completions, asked, batch: Rollout, tokenizer, cfg: Config) -> list[dict]:
    """The first few completions of rank 0's first question, as text."""
    rows = []
    for j, answer in enumerate(completions[0][: cfg.train.completions_logged] if completions else []):
        text = tokenizer.decode(answer.tokens)
        reward = batch.rewards[0, j].item()
        rows.append({"question": asked[0].question, "gold": asked[0].gold, "completion": text, "reward": reward})
    return rows


class Clock:
    """Wall time of a step's phases, which add up; a phase met several times counts once, with its sum."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Everything since the last lap was ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    def timing(self, new_tokens: int) -> dict[str, float]:
        """Seconds by phase and of the whole step, and generated tokens a second of the whole step."""
        total = time.perf_counter() - self.start
        phases = {f"timing/{phase}_s": round(seconds, 4) for phase, seconds in self.seconds.items()}
        return phases | {"timing/step_s": round(total, 4), "perf/tokens_per_s": round(new_tokens / total, 1)}


# ------------------------------------------------------------------------------------------------ the command


def check_only(cfg: Config, ranks: int) -> None:
    """All that can be refused without other ranks. A tiny model that is yet to be made is checked by its config."""
    check_runnable(cfg)
    if cfg.tiny_model is not None and not tiny_model.exists(cfg):
        check_layout(cfg, hf_config.parse(tiny_model.hf_settings(cfg), "tiny_model"), ranks)
        return
    check_inputs(cfg, ranks)


def run(cfg: Config) -> None:
    """Train in the world that torchrun opened, or alone."""
    check_only(cfg, parallel_setup.launched_world_size())
    with parallel_setup.open_world(cfg) as device:
        if cfg.tiny_model is not None:
            tiny_model.make(cfg, device)
        layout = cfg.parallel
        parallel = parallel_setup.init_model_parallel(
            device, tensor=layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor
        )
        train(cfg, parallel)


def main(arguments: list[str]) -> int:
    """Exit code 0; 2 with one line for input that cannot be used; 1 with a traceback for anything else."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", help="YAML file, e.g. configs/tiny_cpu.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--check", action="store_true", help="check the input and stop")
    parser.add_argument("--ranks", type=int, default=parallel_setup.launched_world_size(), help="with --check")
    args = parser.parse_intermixed_args(arguments)
    rank = parallel_setup.launched_rank()
    try:
        notes: list[str] = []
        cfg = load_config(args.config, args.overrides, notes)
        if rank == 0:
            print("".join(f"note: {note}\n" for note in notes), end="", flush=True)
        if args.check:
            check_only(cfg, args.ranks)
        else:
            run(cfg)
    except InputError as error:
        report(rank, f"error: {error}")
        return 2
    except Exception as error:
        lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("onnection", "peer"))
        report(rank, "another rank ended; its message says why" if lost else traceback.format_exc(), late=lost)
        return 1
    return 0


def report(rank: int, message: str, late: bool = False) -> None:
    """Print why this rank ends. What all ranks find is said once: the others give rank 0 time to say it first."""
    if rank or late:
        time.sleep(2)
    print(message if rank == 0 else f"rank {rank}: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Megatron and torch warn about options of GPUs and about each other's deprecations.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    code = main(sys.argv[1:])
    sys.stdout.flush()
    if code:
        os._exit(code)  # no tear-down: it would wait for ranks that are not coming
