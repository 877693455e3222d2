"""The records of benchmarks/check_ascend.py as rows of the table "What was checked how" of docs/npu.md."""

from pathlib import Path

from pydantic import Field

from lab import store
from lab.markdown import table
from lab.records import Part, validated


class Checked(Part):
    """What benchmarks/check_ascend.py measured."""

    check: str
    shows: str = Field(description="what the tests executed")
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    totals: dict[str, dict[str, int]] = Field(min_length=1, description="versions -> outcome -> number of tests")


def rows(results: Path) -> list[dict[str, str]]:
    """The newest record of each check, with one row for each set of versions."""
    found = []
    for measured in store.benchmarks_by_script(results).values():
        *_, (record_id, newest) = measured.items()
        if "check" not in newest.measured:  # another benchmark
            continue
        checked = validated(Checked, newest.measured, results / record_id)
        for versions, totals in checked.totals.items():
            found.append(
                {
                    "check": checked.check,
                    "what was executed": checked.shows,
                    "versions": versions,
                    "tests": ", ".join(f"{number} {outcome}" for outcome, number in totals.items() if number),
                    "record": f"{record_id}, {checked.date}, commit `{newest.commit[:7]}`",
                }
            )
    return found


def page(results: Path) -> str:
    """The generated part of docs/npu.md."""
    return table(found) if (found := rows(results)) else "No record yet."
