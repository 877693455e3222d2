"""Questions and the scores of their answers, beside data_gsm8k.py and reward_gsm8k.py."""
