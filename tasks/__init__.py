"""Reads questions, scores answers and runs multi-turn environments, with data_gsm8k.py and reward_gsm8k.py."""
