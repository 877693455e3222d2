"""Questions, scores of answers, and environments of several turns, in addition to data_gsm8k.py and reward_gsm8k.py."""
