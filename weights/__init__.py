"""Weights under their Hugging Face names: read, exported, saved, made; and the policy, which is base and adapters."""
