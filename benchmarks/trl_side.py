"""Runs TRL's side of bench_step.py: GRPOTrainer on the same model, questions and settings, on the CPU.

    PYTHON_WITH_TRL benchmarks/trl_side.py SETTINGS.json              step by step, with the protocol of our_side.py

It writes the completions and the results of its first step to the file that `record` in the settings names. All
completions have the same length. It runs in its own environment (requirements/bench.txt), so it imports nothing from
this repository.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

settings = json.loads(Path(sys.argv[1]).read_text())
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # stdout is for the answers; the libraries' output goes to stderr

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, set_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
tokenizer = AutoTokenizer.from_pretrained(settings["model"])
first: dict = {}  # completions and results of the first step


def asked(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


def answer(record: dict) -> None:
    print(json.dumps(record), file=answers, flush=True)


def watch(owner, name: str, see) -> None:
    """Wrap the method ``name`` of ``owner`` so that ``see`` gets the method's result in the first step."""
    function = getattr(owner, name)

    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        if not Turns.written:
            see(result)
        return result

    setattr(owner, name, run)


class Turns(TrainerCallback):
    """A callback that reports each step, and then waits for the next line on stdin."""

    written = False  # whether the record of the first step has been written

    def wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.start = time.process_time(), time.perf_counter()

    def on_train_begin(self, *args, **kwargs) -> None:
        chats = [asked(question) for question in settings["questions"]]
        encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        prompts = tokenizer(encoded, add_special_tokens=False)["input_ids"]
        answer({"prompts": prompts})
        self.wait()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Report a step. TRL calls this at the end of a step, when it has computed the metrics of the step."""
        if not logs or "completions/mean_length" not in logs:
            return
        seconds = {"cpu_s": time.process_time() - self.start[0], "wall_s": time.perf_counter() - self.start[1]}
        if not Turns.written:
            Turns.written = True
            Path(settings["record"]).write_text(json.dumps(first))
        (length,) = {logs[f"completions/{x}_length"] for x in ("min", "mean", "max")}  # all have one length
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20)
        rows = len(settings["questions"]) * settings["group"]
        answer(
            {
                **seconds,
                "new_tokens": int(length) * rows,
                "loss": logs["loss"],
                "kl": logs["kl"],
                "peak_mib": peak,
            }
        )
        self.wait()


def of_characters(completions, **kwargs) -> list[float]:
    """Return bench_cases.reward of each completion. TRL passes completions as lists of messages."""
    return [sum(map(ord, completion[0]["content"])) % 100 / 100 for completion in completions]


def see_batch(inputs: dict) -> None:
    """Keep the rows in the order in which the loss gets them, because TRL shuffles them after sampling."""
    ids, masks = inputs["prompt_ids"], inputs["prompt_mask"]
    first.update(
        prompts=[row[row_mask.bool()].tolist() for row, row_mask in zip(ids, masks, strict=True)],
        tokens=inputs["completion_ids"].tolist(),
        advantages=inputs["advantages"].tolist(),
        reference=inputs["ref_per_token_logps"].tolist(),
    )


def see_logps(result) -> None:
    if torch.is_grad_enabled():
        first["logp"] = (result[0] if isinstance(result, tuple) else result).tolist()


def see_loss(result) -> None:
    first["loss"] = (result[0] if isinstance(result, tuple) else result).item()


def take_turns() -> None:
    """Train with the adapter that our side has written, one step for each line on stdin."""
    length, modules = settings["new_tokens"], ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = LoraConfig(
        r=settings["rank"],
        lora_alpha=2 * settings["rank"],
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=modules + ["gate_proj", "up_proj", "down_proj"] * settings["shared_expert"],
        target_parameters=EXPERTS if settings["experts"] else None,
    )
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=settings["work"]),
        use_cpu=True,
        bf16=False,
        fp16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        learning_rate=settings["lr"],
        num_iterations=1,
        per_device_train_batch_size=len(settings["questions"]) * settings["group"],
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=settings["group"],
        max_completion_length=length,
        temperature=1.0,
        max_grad_norm=1.0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        seed=0,
        max_steps=10**6,
        lr_scheduler_type="constant",
        beta=settings["beta"],
        loss_type="grpo",
        generation_kwargs={"min_new_tokens": length, "max_new_tokens": length},
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, router_aux_loss_coef=0.0),
        reward_funcs=[of_characters],
        args=config,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[Turns()],
        train_dataset=Dataset.from_list([{"prompt": asked(question)} for question in settings["questions"]]),
    )
    loaded = set_peft_model_state_dict(trainer.model, load_file(settings["adapter"] + "/adapter_model.safetensors"))
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    watch(trainer, "_get_per_token_logps_and_entropies", see_logps)
    watch(trainer, "compute_loss", see_loss)
    watch(trainer, "_prepare_inputs", see_batch)
    trainer.train()


take_turns()
