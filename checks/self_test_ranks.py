"""The command --self-test: does a tiny model learn, and do two ranks train what one does?

    python preflight.py --self-test [CONFIG] [section.key=value ...] [--ranks 2]
    torchrun --nproc_per_node=2 preflight.py --self-test CONFIG [section.key=value ...] --ranks 2             on devices

The first question is that of checks/self_test.py. For the second one, the first update of the trainer's own run
(train_grpo.train) is compared with checks/self_test_reference.py on DP2, EP2 and TP2: samples, rewards, the rows that
each rank trains, gradients, their norm, AdamW and the metrics. The adapters begin with random values, so that every
factor has a gradient and the KL penalty is not 0. docs/self_test.md says what was measured.
"""

import argparse
import contextlib
import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import device as devices
import parallel_setup
import startup
import train_grpo
from checks import self_test
from checks.self_test import GROUP, PROMPTS, SEED, Observer, watching
from checks.self_test_schedules import GAP, Findings, NotAsExpected, learner_state
from config import command, command_line, derive_seed, resolve_config
from engines.interface import Completion
from engines.torch_sampler import TorchSampler
from inputs import check
from inputs.config_rules import OTHER_RULES
from inputs.files import BAD_INPUT, InputError, refused
from inputs.scoring import Scorer
from knobs import Config
from learner import Learner
from rollout import MicroBatch, Rollout
from runlog import Heartbeat, StepTimer

RANKS = 2
WATCHED = (  # functions that RanksObserver's of the same name stand in for
    (startup, "open_run"), (Learner, "_loss"), (Learner, "update"), (TorchSampler, "load_weights"),
)  # fmt: skip
LAYOUTS = {name: {"tensor": tensor, "expert": expert}
           for name, tensor, expert in (("DP2", 1, 1), ("EP2", 1, 2), ("TP2", 2, 1))}  # fmt: skip
MEAN = {"fp32": (0.01, 1e-4), "bf16": (0.25, 0.1)}  # largest difference of a metric: relative, plus absolute
LOOK_AT = self_test.LOOK_AT | {  # where two ranks differ
    "initial": "lora_megatron: each expert of the whole model draws its own A, on whatever rank it lies",
    "restored": "adapter_weights.scatter and whole: which experts, which shard, the order of fused blocks",
    "samples": "rollout.own_places, in_prompt_order, the seeds of rollout.sample; weight_sync.py: equal engines",
    "rewards": "rollout.sample: the question that a score belongs to, and the order in which ranks are gathered",
    "advantages": "grpo.group_advantages, and whether every rank has the rewards of all prompts",
    "sampler": "weights_hf.export and adapter_weights.whole (the order of the shards), rollout.in_prompt_order",
    "rows": "rollout.plan (the shares), Parallel.data_rank, rollout.pack: a sequence belongs to one data rank",
    "gradient": "Parallel.sync_gradients_ (which group sums which factor; marks in lora_megatron.py), gradient_norm, "
    "copies; the counts in Learner._pack, which are those of all ranks",
    "AdamW": "Learner._step: is the gradient clipped by the norm of all ranks?",
    "copies": "Parallel.sync_gradients_ and gradient_norm: every rank must update its copy of a factor equally",
    "metrics": "Parallel.sum_over_data, and the counts in Learner.update",
}


def layout_run(cfg: Config, folder: Path, layout: str) -> Config:
    """The self-test's run of ``cfg`` on two ranks, which wait for each other no longer than two minutes."""
    tree = self_test.tiny_run(cfg, folder).model_dump(mode="json")
    tree["train"]["out_dir"], tree["parallel"] = str(folder / layout), LAYOUTS[layout] | {"timeout_seconds": 120}
    # Every gradient is clipped; a wrong KL or entropy term shows in the gradient; AQN's noise begins in the first step.
    tree["optim"]["max_grad_norm"] = 1e-3
    tree["eval"] = {"samples": 0, "num_questions": 1}
    tree["loss"] |= {key: 0.3 for key in ("kl_coef", "entropy_coef") if tree["loss"][key]}
    tree["aqn"]["schedule"] = "off" if tree["aqn"]["schedule"] == "off" else "constant"
    return Config.model_validate(tree)


def everyones(value: Any) -> list:
    """The ``value`` of both ranks. Parallel.gather_objects is not used, because it is tested here."""
    by_rank: list = [None] * RANKS
    dist.all_gather_object(by_rank, value)
    return by_rank


class RanksObserver(Observer):
    """Compares the first update of a run of two ranks. Both ranks make the same calls."""

    def open_run(self, real: Callable, *arguments: Any) -> startup.Run:
        """startup.open_run, after which Learner.restore gives the adapters random values."""
        self.run, self.trained = real(*arguments), Counter[tuple]()
        generator, (whole, counts) = torch.Generator().manual_seed(SEED), self.run.learner.state()
        made = {name: x.make() for name, x in whole["adapter"].items()}  # collective
        equal = [
            name
            for name, x in made.items()
            if self.run.parallel.rank == 0 and x.dim() == 3 and x.any() and len(x.flatten(1).unique(dim=0)) < len(x)
        ]
        self.findings.add("initial", not equal, f"{len(equal)} factors are equal for two experts: {equal[:1]}")
        chosen = {
            kind: {
                name: torch.randn(x.shape, generator=generator) * 0.05 * (kind == "adapter") for name, x in part.items()
            }
            for kind, part in whole.items()
        }
        self.run.learner.restore(chosen, counts)
        wrong = [
            name
            for name, x in learner_state(self.run.learner, 0).factors.items()
            if not torch.equal(x.float(), chosen["adapter"][name])
        ]
        self.findings.add("restored", not wrong, f"{len(wrong)} factors are not as they were given: {wrong[:1]}")
        return self.run

    def _loss(self, real: Callable, learner: Learner, micro: MicroBatch, *arguments: Any) -> tuple:
        """Learner._loss. Its rows are counted: tokens, number of trained tokens, advantage."""
        for tokens, mask, advantage in zip(
            micro.tokens.tolist(), micro.mask.tolist(), micro.advantages.tolist(), strict=True
        ):
            if any(mask):
                self.trained[*tokens[: len(mask) - mask[::-1].index(1)], sum(mask), advantage] += 1
        return real(learner, micro, *arguments)

    def update(
        self, real_update: Callable, learner: Learner, batch: Rollout, completions: list[list[Completion]],
        advantages: Tensor, step: int, timer: StepTimer,
    ) -> dict[str, float]:  # fmt: skip
        """Learner.update, compared with the reference. It always ends with NotAsExpected, which ends the run."""
        by_rank = everyones(completions)  # rank r has sampled the prompts r, r + 2, ..
        groups = [by_rank[place % RANKS][place // RANKS] for place in range(PROMPTS)]
        self._compare_samples(batch)
        with contextlib.suppress(NotAsExpected):
            metrics = super().update(
                lambda learner, batch, _, *rest: real_update(learner, batch, completions, *rest),
                learner, batch, groups, advantages, step, timer,
            )  # fmt: skip
            (relative, absolute), expected = MEAN[self.cfg.model.dtype], self.expected.metrics
            wrong = [
                f"{key} is {metrics.get(key, 0.0):.4g}, expected {x:.4g}"
                for key, x in expected.items()
                if not abs(metrics.get(key, 0.0) - x) <= relative * abs(x) + absolute  # absent if no row was trained
            ]
            self.findings.add("metrics", not wrong, "; ".join(wrong) or f"{len(expected)} are as expected")
        self._compare_rows(batch, groups, advantages)
        sums = everyones({name: x.sum().item() for name, x in learner_state(learner, 0).factors.items()})
        apart = [name for name in sums[0] if sums[0][name] != sums[1][name]]
        self.findings.add("copies", not apart, f"{len(apart)} factors are not the same on both ranks: {apart[:1]}")
        raise NotAsExpected

    def _compare_samples(self, batch: Rollout) -> None:
        """This rank's engine would have sampled the whole rollout as it is."""
        rollout, bound = self.cfg.rollout, GAP[self.cfg.model.dtype]
        again = self.run.sampler.engine.sample(
            batch.prompts,
            seeds=[derive_seed(SEED, "rollout", 0, place) for place in range(PROMPTS)],
            num_samples=GROUP,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        gaps = [
            abs(a - b)
            for row, one in zip(batch.logp.tolist(), (one for group in again for one in group), strict=True)
            for a, b in zip(row, one.logp, strict=False)
        ]
        gap = sum(gaps) / len(gaps)
        self.findings.add(
            "samples", gap <= bound, f"the rollout is {gap:.2g} nats a token from this rank's engine, at most {bound:g}"
        )

    def _compare_rows(self, batch: Rollout, groups: list[list[Completion]], advantages: Tensor) -> None:
        """Each sequence is trained once over the data ranks, with its own advantage."""
        loss, tensor, by_rank = self.cfg.loss, self.cfg.parallel.tensor, everyones(self.trained)
        expected = Counter(
            (*batch.prompts[s // GROUP], *one.tokens, len(one.tokens), advantages[s].item())
            for s, one in enumerate(one for group in groups for one in group)
            if not (loss.skip_equal_groups and len(set(batch.rewards[s // GROUP].tolist())) == 1)
            and not (loss.mask_truncated and one.finish_reason == "length")
        )
        shares = [sum(by_rank[rank::tensor], Counter()) for rank in range(tensor)]  # tensor ranks train equal rows
        lost, surplus = (
            sum((expected - share).total() for share in shares),
            sum((share - expected).total() for share in shares),
        )
        self.findings.add(
            "rows",
            not lost and not surplus and (all(by_rank) or expected.total() < RANKS),
            f"{' and '.join(str(rows.total()) for rows in by_rank)} rows on the ranks, of {expected.total()}; "
            f"{lost} are not trained, {surplus} are surplus or have another advantage",
        )


def judge_layout(cfg: Config, folder: Path, layout: str, answers: dict[str, str], device: torch.device) -> Findings:
    """The findings of both ranks. The world of two ranks is open; ``folder`` has what self_test.write_inputs writes."""
    findings, tiny = Findings(), layout_run(cfg, folder, layout)
    observer, parallel = RanksObserver(tiny, answers, findings), parallel_setup.open_layout(tiny.parallel, device)
    log_path = folder / f"log-{layout}-{parallel.rank}.txt"
    with watching(observer, WATCHED, log_path), contextlib.suppress(NotAsExpected):
        with contextlib.closing(Scorer(tiny.reward)) as scorer:
            inputs = check.check_inputs(tiny, parallel.world_size, scorer)
            train_grpo.train(tiny, parallel, Heartbeat(parallel.rank, 0), inputs)
    parallel_setup.close_layout()
    of_both = (finding for theirs in everyones(dict(findings)) for finding in theirs.items())
    return Findings(sorted(of_both, key=lambda finding: finding[1][0], reverse=True))  # what is wrong on a rank counts


def judge(cfg: Config, folder: Path) -> Findings:
    """On rank 0 each layout's gradients, and whatever is wrong in it; nothing on rank 1.

    InputError if torchrun has not started two ranks. Each rank has a ``folder``; both work in that of rank 0.
    """
    rank, ranks, of_all_layouts = parallel_setup.check_launch(), parallel_setup.launched_world_size(), Findings()
    if ranks != RANKS:
        raise InputError(f"--ranks {RANKS}: torchrun has started {ranks}; needed: --nproc_per_node={RANKS}")
    with parallel_setup.open_world(layout_run(cfg, folder, "DP2")) as device:
        folder = everyones(folder)[0]
        # Two ranks can divide 260 tokens. The two answers get larger rows in the head, so that many samples are right.
        answers = everyones(self_test.write_inputs(cfg, folder, 260, boost=1.3) if rank == 0 else {})[0]
        for layout in LAYOUTS:
            findings = judge_layout(cfg, folder, layout, answers, device)
            of_all_layouts |= {
                f"{layout} {name}": one for name, one in findings.items() if name == "gradient" or not one[0]
            }
    return of_all_layouts if rank == 0 else Findings()


# ------------------------------------------------------------------------------------------------ the command


def introduction(cfg: Config, source: str) -> str:
    """What the configuration contributes to the test, and what is set here."""
    loss, updates = cfg.loss, self_test.num_updates(cfg)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core"))
    return (
        f"self-test of {source}: {versions}, device {cfg.device}, {cfg.model.dtype}\n"
        f"  kept: loss {loss.kind}, {loss.aggregate}, advantage {loss.advantage}, kl {loss.kl}, importance "
        f"{loss.importance} and its other keys; aqn {cfg.aqn.schedule}, replay {cfg.replay.mode}, lora.targets, "
        "AdamW's betas, weight decay and clipping, temperature, top_p, top_k\n"
        f"  set here: a random model of 2 layers, {self_test.STEPS} steps on one rank (and one on two) of {PROMPTS} x "
        f"{GROUP} answers, {updates} update{'s' * (updates > 1)} a step, lr 3e-3, LoRA of rank 16 and 8, the "
        "embedded sampler, with the newest policy"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line of --self-test, with the default configuration and its override."""
    default = str(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")
    parser = command_line(
        "preflight.py --self-test", __doc__, nargs="?", default=default,
        help="default: configs/tiny_cpu.yaml, device auto",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, choices=[2], help="only compare two ranks with the reference")
    args = parser.parse_intermixed_args(arguments)
    args.overrides = args.overrides or (["device=auto"] if args.config == default else [])
    return args


def examine(args: argparse.Namespace, judge: Callable[[Config, Path], Findings], yes: str, no: str) -> int:
    """Print what ``judge`` finds in a new folder, and the verdict. The exit code as of main."""
    start, folder, kept = time.perf_counter(), Path(tempfile.mkdtemp(prefix="self_test-")), False
    try:
        findings = judge(resolve_config(args.config, args.overrides, rules=OTHER_RULES)[0], folder)
        for name, (good, measured) in findings.items():
            print(f"{'ok  ' if good else 'FAIL'}  {name:12} {measured}")
            if not good:
                print(f"      look at: {(LOOK_AT if ' ' in name else self_test.LOOK_AT)[name.split()[-1]]}")
        kept = not findings.good()
        if findings:
            print(
                f"{no if kept else yes}, {time.perf_counter() - start:.0f} s"
                + f"; the run and its log are in {folder}" * kept,
                flush=True,
            )
    except BAD_INPUT as error:
        return refused(error)
    except Exception:
        kept = True
        print(f"{traceback.format_exc()}{no}: the run ended with this error; its log is in {folder}", flush=True)
    finally:
        if not kept:
            shutil.rmtree(folder)
    return int(kept)


def compare(args: argparse.Namespace) -> int:
    """The exit code of this rank of two. Only rank 0 knows whether they agree."""
    return examine(args, judge, "two ranks agree with the reference", "two ranks do not agree with the reference")


def both_ranks(args: argparse.Namespace) -> int:
    """The exit code of two ranks that are forked here, on a CPU. torch must not have computed before."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
    try:
        torch.multiprocessing.start_processes(_rank, (args, place), nprocs=RANKS, start_method="fork")
    except torch.multiprocessing.ProcessExitedException as error:
        return 2 if error.exit_code == 2 else 1
    return 0


def _rank(rank: int, args: argparse.Namespace, place: dict[str, str]) -> None:
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(compare(args))


@command
def main(arguments: list[str]) -> int:
    """Exit code 0: it learned, and two ranks agree with the reference. 1: not so. 2: unusable input, or a full disk.

    With --ranks 2 only the ranks are compared. Without it, they are where two can run: on a CPU of two cores.
    """
    args = parse(arguments)
    if args.ranks and "RANK" in os.environ:
        return compare(args)
    cfg, _ = resolve_config(args.config, args.overrides, rules=OTHER_RULES)
    # Where the usable cores are not known, as on macOS, a fork is not safe either.
    device, cores = (
        devices.resolve(cfg.device).type,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    )
    print(introduction(cfg, Path(args.config).name), flush=True)
    possible = device == "cpu" and (args.ranks or cores >= RANKS)
    if not possible:
        print(
            f"{'error: ' if args.ranks else ''}two ranks cannot be compared here (device {device}, {cores} cores); "
            f"needed: torchrun --nproc_per_node={RANKS} preflight.py --self-test CONFIG --ranks {RANKS}",
            file=sys.stderr if args.ranks else sys.stdout,
            flush=True,
        )
    code = both_ranks(args) if possible else 2 * bool(args.ranks)
    if args.ranks or code == 2:
        return code
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # this part has one rank, even under torchrun
    return max(code, examine(args, self_test.judge, "it learned", "it did not learn"))
