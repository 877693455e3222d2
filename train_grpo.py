"""GRPO with LoRA on a mixture-of-experts model: `train` is the whole method, step by step.

    torchrun --nproc_per_node=16 train_grpo.py configs/qwen3.yaml [section.key=value ...]
    python train_grpo.py CONFIG [section.key=value ...] --check [--ranks N]     check the input and stop

GRPO: arXiv 2402.03300. The reference policy of the KL penalty is the model with its LoRA adapters switched off.
The random numbers of questions, samples and noise depend on (seed, step) alone, with dynamic sampling also on outcomes.
"""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])  # PYTHONSAFEPATH and `python -P` leave it out

from runlog import progress

if __name__ == "__main__":  # before the other imports, which take seconds
    progress.end_on_signals()

import grpo
import parallel_setup
from facts.seeds import derive_seed
from inputs import functions
from run import command
from run.opening import Run


def train(run: Run) -> None:
    """Train for cfg.train.steps steps. Collective over the ranks that train."""
    cfg, sampler, learner = run.cfg, run.sampler, run.learner
    if run.first_step == 0:
        run.evaluate(after_steps=0)
    for step in range(run.first_step, cfg.train.steps):
        timer = run.start_step(step)

        # 1. Give the sampler the current policy, or that of rollout.staleness steps ago: W + (alpha / R) B A
        # (weight_sync.py), with noise (aqn.py). It is on these ranks, or on others, which sample meanwhile (run/).
        with timer.phase("sync"):
            sampler.push(step)

        # 2. Sample and score G completions for each of P questions (rollout.py, data_gsm8k.py, reward_gsm8k.py).
        with timer.phase("generate"):
            sampled, pushed = sampler.sample(step)
            run.check_rollout(step, sampled, pushed)
        batch = sampled.batch

        # 3. Compare each score with its group's (grpo.py).
        if cfg.reward.permute:  # the control experiment: nothing can be learned from shuffled rewards
            batch.rewards = grpo.shuffled(batch.rewards, derive_seed(cfg.train.seed, "permute", step))
        advantages = grpo.group_advantages(batch.rewards, functions.advantage(cfg.loss.advantage))  # (P, G)

        # 4. Update the adapters on the clipped objective, once for every prompts_per_update questions (learner.py).
        updated = learner.update(batch, sampled.completions, advantages.flatten(), step, timer)

        # 5. Record, check, evaluate, save.
        metrics = run.record(step, sampled, updated | pushed.metrics, timer)
        run.check(step, batch.rewards, metrics)
        if cfg.train.is_due(step + 1, cfg.eval.every):
            run.evaluate(after_steps=step + 1)
        if cfg.train.is_due(step + 1, cfg.train.checkpoint_every):
            run.save(after_steps=step + 1)
    run.finish()


def main(arguments: list[str]) -> int:  # run/ starts and ends a run
    return command.main(arguments, train, __doc__)


if __name__ == "__main__":
    parallel_setup.run_command(main, sys.argv[1:])
