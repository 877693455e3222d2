"""Functions as a user would write them, for tests/rooms/tasks/test_scoring.py and tests/runs/test_resume.py."""

import random
import re
import time


def reward(completion, gold, row):
    """Different completions earn different rewards, so that a random model learns something."""
    from own_part import share

    return share(completion), bool(completion), sum(completion.encode()) % 2 == 0 or completion == row.get("answer")


def advantages(rewards):
    return (rewards - rewards.mean(dim=1, keepdim=True)) * 2


def loss(x):
    ratio = (x.logp - x.old_logp).exp()
    return -x.advantages * ratio, {"ratio_gap": (ratio - 1).abs(), "own": x.advantages.abs()}


# ------------------------------------------------------------------------------------------------ faults


def by_chance(completion, gold, row):
    return random.random()


def by_place(x):
    return x * 0 + x[0]


def by_column(x):
    return x * 0 + x[:, :1]


def by_row(x):
    return x.logp * x.mask.cumsum(0), {}


def crash(completion, gold, row):
    return row["level"]


def endless(completion, gold, row):
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b"))) if completion == "hang" else 1.0


def sleeps(completion, gold, row):
    time.sleep(60 if completion == "hang" else 0)
    return 1.0


def ends(completion, gold, row):
    if completion == "hang":
        import os

        os._exit(3)
    return 1.0


def number_as_text(completion, gold, row):
    return "1.0"


def texts_as_flags(completion, gold, row):
    return 1.0, "yes", "no"


def not_finite(completion, gold, row):
    return float("nan")


def text(completion, gold, row):
    return "good"


def two(completion, gold):
    return 1.0


def fewer(x):
    return x[:1]


def infinite(x):
    return x / 0


def one_value(x):
    return x.logp


def flat(x):
    return x.logp.sum(), {}


def in_place(rewards):
    rewards -= rewards.mean(dim=1, keepdim=True)
    return rewards


def without_epsilon(rewards):
    return (rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)


def as_array(rewards):
    return rewards.numpy()


def detached(x):
    return -x.advantages * (x.logp - x.old_logp).detach(), {}


def of_others(x):
    return -x.advantages * x.logp.detach() + 0 * x.logp, {}


def unbounded(x):
    return x.logp / (x.logp - x.logp), {}


def divided(x):
    return -x.advantages * (x.logp - x.old_logp).exp() / x.mask.sum(), {}


def named_as_the_trainers(x):
    return -x.advantages * x.logp, {"entropy": x.logp}


def silent(turns, row):
    """No answer: after an end token a row ends, after other texts the policy goes on."""
    return None if turns[-1].endswith("<|im_end|>") else ""


def environment(turns, row):
    """An answer of at most three characters, which depends on the turn; to some turns none, after which a row ends."""
    number = sum(turns[-1].encode()) % 5
    if turns[-1].endswith("<|im_end|>"):
        return None if len(turns) > 3 else f"[{number}]"
    return None if number == 4 else "=" * number
