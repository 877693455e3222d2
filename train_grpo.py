"""Trains a mixture-of-experts model by GRPO with LoRA: connects the parts and shows the method, step by step.

    torchrun --nproc_per_node=16 train_grpo.py configs/qwen3.yaml [section.key=value ...]
    python train_grpo.py CONFIG [section.key=value ...] --check [--ranks N]     check the input and stop

GRPO: arXiv 2402.03300. The reference policy of the KL penalty is the model with its LoRA adapters switched off.
The random numbers for questions, samples and noise depend only on (seed, step). With dynamic sampling, they also
depend on the outcomes of earlier rounds.
"""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])  # PYTHONSAFEPATH and `python -P` leave it out

from runlog import progress

if __name__ == "__main__":  # before the other imports, which take seconds
    progress.end_on_signals()

import grpo
import lora_megatron
import parallel_setup
import rollout
import weight_sync
from engines import factory
from engines.interface import Engine
from facts.architectures import Architecture
from facts.seeds import derive_seed
from inputs import functions
from knobs import Config
from learner import Learner
from parallel_setup import Parallel
from run import command
from run.run import Run
from run.start import Start, started
from weights import huggingface, teacher
from weights.policy import Policy


@command.exits
def main(arguments: list[str]) -> int:
    """Train, or check the input, as the ``arguments`` say."""
    cfg = command.read(arguments, __doc__)
    if cfg:
        launch(cfg)
    return 0


def launch(cfg: Config) -> None:
    """Start the device, open the groups, and train, on each rank that torchrun has started."""
    with started(cfg) as start:  # log, heartbeat, and the reward's processes, which start before the device
        parallel_setup.start_device(cfg.device, cfg.train)  # torch_npu and MindSpeed, CUDA, or the CPU
        arch = start.check_settings()
        # All ranks meet over gloo. The groups of a layout use HCCL, NCCL or gloo: TP x DP = EP x expert_data = ranks.
        with parallel_setup.open_world(cfg.device, cfg.train, cfg.parallel, start.heartbeat.waiting) as device:
            start.make_tiny_model(device)
            parallel = parallel_setup.open_layout(cfg.parallel, device)
            train(*wire(start, arch, parallel))


def wire(start: Start, arch: Architecture, parallel: Parallel) -> tuple[Run, Learner, Engine, weight_sync.Push]:
    """Create the parts of a run, each from the earlier parts. All ranks call this together."""
    cfg, inputs = start.cfg, start.read_inputs(arch)  # inputs: the tokenizer, and the questions as prompts
    run = Run(start, parallel, inputs)  # its folder, and the checkpoint to resume from

    # The policy: this rank's shards of Megatron's mixture of experts, and LoRA on them. Only its A and B are trained.
    model = huggingface.load_model(cfg.model, arch, parallel)
    lora_megatron.attach_for(model, cfg, parallel)
    policy = Policy(cfg, arch, parallel, model)

    # The learner: the clipped objective, the KL to the reference, a teacher's log-probs, and AdamW on the factors.
    learner = Learner(cfg, policy, inputs.pad_token)
    if cfg.loss.teacher:
        learner.learn_from(teacher.read(cfg, arch))
    run.restore(learner)

    # The engine samples: vLLM, vLLM-Ascend or the embedded one. It gets the policy as tensors, shards or factors.
    way = weight_sync.way_of(cfg, policy)
    way.make_room()
    engine = factory.open_engine(cfg, arch, parallel.device, inputs.stop_tokens, inputs.pad_token, start.heartbeat.beat)
    push = weight_sync.Push(way, engine)  # the whole model
    run.introduce(learner, push)
    return run, learner, engine, push


def train(run: Run, learner: Learner, engine: Engine, push: weight_sync.Push) -> None:
    """Train for cfg.train.steps steps. All ranks call this together."""
    cfg, parallel, inputs = run.cfg, run.parallel, run.inputs
    if run.first_step == 0:
        run.evaluate(engine, after_steps=0)
    norm = functions.advantage(cfg.loss.advantage)  # std, none, loo, or the user's function
    for step in range(run.first_step, cfg.train.steps):
        timer = run.start_step(step)

        # 1. Give the engine the current policy, or the one of rollout.staleness steps ago: W + (alpha / R) B A
        # (weight_sync.py), with noise (aqn.py).
        with timer.phase("sync"), learner.sampling_policy():
            pushed = push(step, inputs.probe)
            run.check_push(step, pushed)

        # 2. Sample and score G completions for each of P questions (rollout.py, data_gsm8k.py, reward_gsm8k.py).
        with timer.phase("generate"):
            sampled = rollout.sample_step(
                engine, inputs.questions, inputs.score, cfg, parallel, step, environment=inputs.environment
            )
            run.check_rollout(step, sampled)
        batch = sampled.batch

        # 3. Compare each score with its group's (grpo.py).
        if cfg.reward.permute:  # a control experiment: shuffled rewards teach nothing
            batch.rewards = grpo.shuffled(batch.rewards, derive_seed(cfg.train.seed, "permute", step))
        advantages = grpo.group_advantages(batch.rewards, norm)  # (P, G)

        # 4. Update the adapters on the clipped objective, once for every prompts_per_update questions (learner.py).
        updated = learner.update(batch, sampled.completions, advantages.flatten(), step, timer)

        # 5. Record, check, evaluate without noise, save.
        metrics = run.record(step, sampled, advantages, updated | pushed, learner, timer)
        run.check(step, batch.rewards, metrics, learner, push)
        if cfg.train.is_due(step + 1, cfg.eval.every):
            push.clean()
            run.evaluate(engine, after_steps=step + 1)
        if cfg.train.is_due(step + 1, cfg.train.checkpoint_every):
            run.save(learner, after_steps=step + 1)
    engine.close()
    run.finish()


if __name__ == "__main__":
    parallel_setup.run_command(main, sys.argv[1:])
