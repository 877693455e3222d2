"""The config.json of two models as they were published: the files in configs/, without keys that no code reads."""

import json

from inputs import hf_config


def config_of(name: str) -> dict:
    return json.loads((hf_config.PUBLISHED / f"{name}.config.json").read_text())


QWEN3_30B_A3B, QWEN15_MOE = config_of("Qwen3-30B-A3B-Instruct-2507"), config_of("Qwen1.5-MoE-A2.7B-Chat")
