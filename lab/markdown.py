"""Pieces of the Markdown pages."""

from numpy.typing import NDArray


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table; the keys of the first row are its head."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def points(low: float | NDArray, high: float | NDArray) -> str:
    """An interval of shares, in points."""
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def point(share: float | NDArray) -> str:
    return f"{100 * share:+.1f}"
