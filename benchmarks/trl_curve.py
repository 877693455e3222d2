"""TRL's side of bench_curve.py: GRPOTrainer on the model, questions and settings of a run of ours, on the CPU.

    PYTHON_WITH_TRL benchmarks/trl_curve.py SETTINGS.json CURVE.json

It runs in its own environment (requirements/bench.txt). Of this repository it imports the reward only, which needs no
package. CURVE.json gets the mean reward of each step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import reward_gsm8k

settings = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def rewards(completions, gold, **kwargs) -> list[float]:
    """Our reward, for completions in the form that TRL gives them."""
    return [
        reward_gsm8k.score(completion[0]["content"], answer)
        for completion, answer in zip(completions, gold, strict=True)
    ]


tokenizer = AutoTokenizer.from_pretrained(settings["model"])
asked = settings["questions"]  # of all steps, in order
data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}], "gold": gold} for text, gold in asked])
config = GRPOConfig(
    output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, seed=settings["seed"], report_to="none",
    save_strategy="no", logging_steps=1, disable_tqdm=True, max_steps=settings["steps"], remove_unused_columns=False,
    per_device_train_batch_size=settings["prompts"] * settings["group"], gradient_accumulation_steps=1,
    num_generations=settings["group"], num_iterations=1, shuffle_dataset=False, dataloader_pin_memory=False,
    gradient_checkpointing=False, max_completion_length=settings["new_tokens"], temperature=1.0, top_p=1.0, top_k=0,
    beta=0.0, epsilon=0.2, loss_type="bnpo", scale_rewards="group", mask_truncated_completions=False,
    learning_rate=settings["lr"], adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.0,
    max_grad_norm=1.0,
)  # fmt: skip
lora = LoraConfig(
    r=settings["rank"], lora_alpha=settings["alpha"], lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
    target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, router_aux_loss_coef=0.0)
trainer = GRPOTrainer(
    model=model, reward_funcs=[rewards], args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora
)
optimizer = trainer.create_optimizer()
# The first step of ours has the rate lr / warmup_steps; transformers' own warm-up would begin with 0.
trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / settings["warmup_steps"])
)
trainer.train()
logged = [line for line in trainer.state.log_history if "reward" in line]
curve = {
    "reward": [line["reward"] for line in logged],
    "length": [line["completions/mean_length"] for line in logged],
    "parameters": sum(each.numel() for each in trainer.model.parameters() if each.requires_grad),
}
Path(sys.argv[2]).write_text(json.dumps(curve))
