"""Questions, scores of answers, and the environment of several turns, beside data_gsm8k.py and reward_gsm8k.py."""
