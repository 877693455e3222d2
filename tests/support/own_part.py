"""What own.reward imports: a run records the checksum of this file, too."""


def share(completion: str) -> float:
    return sum(completion.encode()) % 7 / 7
