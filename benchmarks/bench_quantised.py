"""Quantised experts on a layer of Qwen3-30B-A3B's shape, in bf16: memory and time of an update, beside the plan.

    python benchmarks/bench_quantised.py [--experts 64] [--only int4] [--json]

A random layer (hidden size 2,048, 32 heads, experts of width 768, 8 a token) and LoRA of configs/qwen3.yaml with
expert_rank 16; 64 experts are what each of two ranks holds. Every format runs in a process of its own, on one thread.
weights: growth of the process while the layer is made and filled, MiB. update: MiB of the fullest moment of an update
beyond what was there before. planned: by plan/memory.py. seconds: CPU seconds of an update of 1,536 tokens, the least
of three. error: rms of what the codes stand for minus the weight, over the rms of the weights, in the experts.
"""

import ctypes
import dataclasses
import gc
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import bench_policy
import cases
import torch

import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import weights_hf
from device import StepTimer
from knobs import Config
from learner import Learner
from plan import grid, memory
from plan.dry_run_meter import Meter
from rollout import Rollout
from tripwires import Heartbeat

FORMATS = ("none", *hf_config.FORMATS)
REPEATS = 3


def config(folder: Path, quantisation: str) -> Config:
    """One update of all sequences, in one micro-batch; adapters apart from the weights."""
    cfg = bench_policy.config(folder, "adapter", 1).model_dump()
    cfg["model"]["quantisation"], cfg["lora"]["expert_rank"], cfg["optim"]["warmup_steps"] = quantisation, 16, 0
    return Config.model_validate(cfg)


def resident() -> int:
    """Bytes of this process in main memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@torch.no_grad()
def fill(model: torch.nn.Module, arch: hf_config.Architecture, parallel: parallel_setup.Parallel) -> float:
    """Random weights; -> the error of the quantised experts."""
    generator, error, size = torch.Generator().manual_seed(0), 0.0, 0.0
    for slot in weights_hf.slots(model, arch, parallel):
        weight = 0.02 * torch.randn(slot.stored.shape, generator=generator)
        if isinstance(slot.stored, torch.Tensor):
            slot.stored.copy_(weight + (weight.dim() == 1))
            continue
        blocks = list(weight.chunk(len(slot.names)))
        slot.stored.fill_(blocks, blocks)
        found = slot.stored.dequantised().float()
        error, size = error + (found - weight).square().sum().item(), size + weight.square().sum().item()
    return (error / size) ** 0.5 if size else 0.0


def measure(quantisation: str, experts: int) -> dict:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench_policy.make_model(Path(folder), experts)
        cfg, arch = config(Path(folder), quantisation), hf_config.read(folder)
    with parallel_setup.open_world(cfg) as device:
        parallel = parallel_setup.open_layout(cfg.parallel, device)

        def make(arch: hf_config.Architecture) -> tuple[torch.nn.Module, float]:
            model = model_megatron.build_for(cfg.model, arch, parallel)
            return model, fill(model, arch, parallel)

        make(dataclasses.replace(arch, num_experts=8))  # loads the code that all sizes need
        before = resident()
        model, error = make(arch)
        weights = resident() - before
        adapters = lora_megatron.attach(model, cfg.lora, parallel, seed=0, merges=False)
        learner = Learner(cfg, arch, parallel, model, adapters, pad_token=0)
        prompts, group, new = cfg.rollout.prompts_per_step, cfg.rollout.group_size, cfg.rollout.max_new_tokens
        asked, sequences, generator = cfg.data.max_prompt_tokens, prompts * group, torch.Generator().manual_seed(1)
        batch = Rollout(
            prompts=torch.randint(1, arch.vocab_size, (prompts, asked), generator=generator).tolist(),
            tokens=torch.randint(1, arch.vocab_size, (sequences, new), generator=generator),
            logp=torch.full((sequences, new), -8.0), lengths=[new] * sequences,
            truncated=torch.zeros(sequences, dtype=torch.bool), rewards=torch.rand(prompts, group, generator=generator),
            parsable=torch.ones(prompts, group),
        )  # fmt: skip
        advantages, seconds = torch.randn(sequences, generator=generator), []

        def update(step: int) -> None:
            learner.update(batch, [], advantages, step, StepTimer(Heartbeat(0, 0), step, device))

        for step in range(REPEATS):
            begin = time.process_time()
            update(step)
            seconds.append(time.process_time() - begin)
        meter = Meter("cpu", answers=False)
        with meter:
            with meter.phase("before"):  # it counts memory from the first use on
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.view(-1)
                update(REPEATS)
                held = meter.held()
            with meter.phase("update"):
                update(REPEATS + 1)
    layout = grid.of(cfg, 1)
    planned = memory.step_memory(cfg, arch, layout, "cpu", 0)
    return {
        "format": quantisation,
        "weights": weights / 2**20,
        "weights planned": planned.parts["base"] / 2**20,
        "update": (meter.peak("update").bytes - held) / 2**20,
        "update planned": (planned.phases["update"] - sum(planned.parts[name] for name in memory.RESIDENT)) / 2**20,
        "seconds": min(seconds),
        "error": error,
        "all seconds": seconds,
    }


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--only", choices=FORMATS, help="measure this format in this process, and print it as JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.experts)))
        return
    measured = cases.measured_apart(__file__, FORMATS, "--experts", str(args.experts))
    rows = [{key: value for key, value in one.items() if key != "all seconds"} for one in measured]
    cases.report(args, __doc__, rows, {"formats": measured})


if __name__ == "__main__":
    main()
