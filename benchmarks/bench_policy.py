"""The policy that samples and the policy that is trained, in bf16 on a layer of Qwen3-30B-A3B's shape, over 20 updates.

    python benchmarks/bench_policy.py [--experts 64] [--steps 20] [--only merged] [--json]

A random layer (hidden size 2,048, 32 heads, experts of width 768, 8 a token) is trained by random rewards with the
learning rate, warm-up and LoRA of configs/qwen3.yaml. Each way runs in a process of its own, on one thread. share and
error: of the fp32 update in the pushed policy (docs/metrics.md, sync/update_share). gap: mean difference of the
log-probs of trainer and sampler, nats a token, in the first step and in the later ones. kl 2: actor/kl_loss after one
update, whose true KL is near 1e-8. step: CPU seconds. policy: mean difference of the sampler's log-probs
from those of W + (alpha / R) B A in fp32, nats a token, after the last step.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases
import torch
from torch import Tensor

import grpo
import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import rollout
import weights_hf
from config import load_config
from data_gsm8k import Question
from device import StepTimer
from knobs import Config
from learner import Learner
from tripwires import Heartbeat
from weight_sync import WeightSync

WAYS = {"merged": ["rollout.sync=merged"], "adapter": ["rollout.sync=adapter"]}
SHOWN = (1, 2, 5, 10, 20)  # steps
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 8, 24, 24, 4096


def config(folder: Path, way: str, steps: int) -> Config:
    """configs/qwen3.yaml with fewer and shorter answers, for one process on a CPU."""
    source = cases.ROOT / "configs" / "qwen3.yaml"
    overrides = [
        "device=cpu", f"model.path={folder}", "model.recompute=false", "parallel.tensor=1", "parallel.expert=1",
        "rollout.engine=torch", f"rollout.prompts_per_step={PROMPTS}", "rollout.group_size=4",
        f"rollout.max_new_tokens={NEW_TOKENS}", f"data.max_prompt_tokens={PROMPT_TOKENS}", f"train.steps={steps}",
        f"optim.prompts_per_update={PROMPTS}", "loss.importance=none", *WAYS[way],
    ]  # fmt: skip
    return load_config(source, overrides)


def make_model(folder: Path, experts: int) -> None:
    """config.json of one layer of Qwen3-30B-A3B with ``experts`` experts and a small vocabulary."""
    settings = json.loads((cases.ROOT / "configs" / "Qwen3-30B-A3B-Instruct-2507.config.json").read_text())
    settings |= {"num_hidden_layers": 1, "num_experts": experts, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(settings))


@torch.no_grad()
def fill(model: torch.nn.Module, arch: hf_config.Architecture, parallel: parallel_setup.Parallel) -> None:
    """Random weights of the size that trained weights have."""
    generator = torch.Generator().manual_seed(0)
    for slot in weights_hf.slots(model, arch, parallel):
        weight, name = slot.weight, slot.names[0]
        std = 0.1 if weight.dim() == 1 else 0.08 if name == "lm_head.weight" else 0.02
        weight.copy_((weight.dim() == 1) + std * torch.randn(weight.shape, generator=generator))


def score(question: Question, completion) -> tuple[float, bool]:
    """A random reward, which depends on the tokens alone."""
    return sum(completion.tokens) % 97 / 97, True


def measure(way: str, experts: int, steps: int) -> dict:
    """The figures of one way: by step, and of the whole run."""
    torch.set_num_threads(1)
    heartbeat = Heartbeat(0, 0)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), experts)
        cfg, arch = config(Path(folder), way, steps), hf_config.read(folder)
    with parallel_setup.open_world(cfg) as device:
        parallel = parallel_setup.open_layout(cfg.parallel, device)
        model = model_megatron.build(arch, parallel, dtype=torch.bfloat16, recompute=False)
        fill(model, arch, parallel)
        adapters = lora_megatron.attach(model, cfg.lora, parallel, seed=0, merges=cfg.trains_merged)
        learner = Learner(cfg, arch, parallel, model, adapters, pad_token=0)
        engine = rollout.open_engine(cfg, arch, device, {0}, 0)
        weights = WeightSync(engine, model, arch, parallel, cfg)
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
        asked, by_step = [Question("", "", "", prompt) for prompt in prompts], []
        for step in range(steps):
            begin, timer = time.process_time(), StepTimer(heartbeat, step, device)
            found = weights.push(step, prompts[0])
            batch, completions = rollout.sample(engine, asked, score, cfg.rollout, parallel, seed=0, step=step)
            sampled = time.process_time()
            advantages = grpo.group_advantages(batch.rewards, cfg.loss.advantage).flatten()
            found |= learner.update(batch, completions, advantages, step, timer)
            found |= {"seconds": time.process_time() - begin, "update_seconds": time.process_time() - sampled}
            by_step.append(found)
        weights.push_clean()
        by_step.append(weights.update_kept())
        policy = distance(learner, engine, asked, cfg)
    return {
        "way": way,
        **{f"share {step}": by_step[step]["sync/update_share"] for step in SHOWN if step <= steps},
        **{f"error {step}": by_step[step]["sync/update_error"] for step in SHOWN if step <= steps},
        "gap 1": by_step[0]["rollout/logp_gap_mean"],
        "gap 2-": statistics.fmean(one["rollout/logp_gap_mean"] for one in by_step[1:-1]),
        "kl 2": by_step[1]["actor/kl_loss"],
        "policy": policy,
        "step": statistics.median(one["seconds"] for one in by_step[:-1]),
        "update": statistics.median(one["update_seconds"] for one in by_step[:-1]),
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "by_step": by_step,
    }


@torch.no_grad()
def distance(learner: Learner, engine, asked: list[Question], cfg: Config) -> float:
    """Mean difference between the sampler's log-probs and those of the policy without any rounding, nats a token."""
    learner.model.float()
    for adapter in learner.adapters.values():
        adapter.merges = False
    batch, _ = rollout.sample(engine, asked, score, cfg.rollout, learner.parallel, seed=1, step=0)
    gaps = []
    for sequence, length in enumerate(batch.lengths):
        prompt = batch.prompts[sequence // cfg.rollout.group_size]
        tokens = torch.tensor([prompt + batch.tokens[sequence, :length].tolist()])
        mask = (torch.arange(tokens.shape[1]) >= len(prompt)).long()[None]
        logp: Tensor = model_megatron.token_logprobs(learner.model, tokens, mask, learner.parallel)[0]
        gaps.append((logp[mask == 1] - batch.logp[sequence, :length]).abs())
    return torch.cat(gaps).mean().item()


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=WAYS, help="measure this way in this process, and print it as JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.experts, args.steps)))
        return
    options = ("--experts", str(args.experts), "--steps", str(args.steps))
    measured = cases.measured_apart(__file__, WAYS, *options)
    rows = [{key: value for key, value in one.items() if key != "by_step"} for one in measured]
    cases.report(args, __doc__, rows, {"ways": measured})


if __name__ == "__main__":
    main()
