"""A file that own.reward imports: a run also records its checksum."""


def share(completion: str) -> float:
    return sum(completion.encode()) % 7 / 7
