"""results/plan.yaml: the comparisons that were announced before their runs, and what the records say about them.

The announcement fixes how many p-values are corrected together: those of one entry, or of all entries of a family.
"""

from pathlib import Path

from pydantic import Field, model_validator

from input_files import InputError, read_file
from lab import comparisons
from lab.comparisons import Comparison
from lab.records import Part, Run, validated

CONTROLS = "controls"  # how the names of families of planted faults begin; the others compare methods
# Families that were announced under an older rule: better and worse are met by every difference with a small p-value,
# also by one within the margin. They keep it, because a rule that changes after the results decides nothing.
OLDER = ("benchmark", "controls", "quantised", "rounding", "controls of rounding")
OF_OLDER = {"better": "larger", "worse": "smaller", "": "undecided"}


class Planned(Part):
    title: str
    sweep: str = Field("", description="the file of configs/sweeps/ that makes the runs")
    base: str = Field(description="group of records that the others are compared with")
    others: tuple[str, ...] = Field(min_length=1, strict=False)
    kind: str = Field("sampled", pattern="^(sampled|greedy|reward|curve)$", description="outcome, see records.scores")
    margin: float = Field(0.0, ge=0, description="points: a variant whose interval lies within it is called equal")
    seeds: tuple[int, ...] | None = Field(None, strict=False, description="the announced seeds; by default the sweep's")
    missing: tuple[str, ...] = Field((), strict=False, description="NAME-seedN: why this announced run has no record")
    family: str = Field("", description="comparisons of a family are corrected together, and are in docs/benchmark.md")
    predicted: str = Field("", pattern="^(equal|larger|smaller|better|worse|)$", description="see `outcome`")
    why: str = Field("", description="the mechanism behind the prediction")
    control: str = Field("", description="group of runs with a planted fault, which this design must find")

    @model_validator(mode="after")
    def _one_prediction(self) -> "Planned":
        if self.family and not (len(self.others) == 1 and self.predicted):
            raise ValueError("an entry of a family needs one name in others, and predicted")
        if self.predicted in ("better", "worse") and self.family not in OLDER:
            raise ValueError(f"predicted: {self.predicted} is of older families; needed: equal, larger or smaller")
        return self

    @property
    def is_control(self) -> bool:
        return self.family.startswith(CONTROLS)

    @property
    def is_method(self) -> bool:
        return bool(self.family) and not self.is_control

    @property
    def names(self) -> tuple[str, ...]:
        return (self.base, *self.others)


class NotRun(Part):
    group: str = Field(description="name of the future records; when they exist, the row is no longer shown")
    what: str
    command: str
    plan: str


class Plan(Part):
    """results/plan.yaml."""

    comparisons: tuple[Planned, ...] = Field((), strict=False)
    gains: tuple[str, ...] = Field((), strict=False, description="groups whose gain is stated among the findings")
    rows: tuple[NotRun, ...] = Field((), strict=False)
    benchmarks: tuple[str, ...] | None = Field(
        None, strict=False, description="scripts shown in RESULTS.md; all if none"
    )


def read_plan(results: Path) -> Plan:
    """The plan of a folder of records; empty when there is no plan.yaml."""
    path = results / "plan.yaml"
    plan = validated(Plan, read_file(path) if path.exists() else {}, path)
    controls = {name for planned in plan.comparisons if planned.is_control for name in planned.others}
    for planned in plan.comparisons:
        if planned.control and planned.control not in controls:
            raise InputError(f"{path}: {planned.title}: control: found {planned.control}; needed: one of {CONTROLS}")
    if unknown := {*plan.gains} - {name for planned in plan.comparisons for name in planned.names}:
        raise InputError(f"{path}: gains: found {min(unknown)}; needed: groups of comparisons")
    return plan


def compared(plan: Plan, groups: dict[str, list[Run]]) -> dict[Planned, list[Comparison]]:
    """The announced comparisons whose variants all have records, with p-values corrected as announced."""
    found = {}
    for planned in plan.comparisons:
        if {*planned.names} <= groups.keys():
            variants = {name: groups[name] for name in planned.names}
            found[planned] = comparisons.compare(variants, planned.kind, planned.margin / 100)
    for family in {planned.family for planned in found} - {""}:
        members, ones = zip(*of(family, found), strict=True)
        announced = sum(planned.family == family for planned in plan.comparisons)
        corrected = comparisons.corrected(list(ones), announced)
        found |= {planned: [one] for planned, one in zip(members, corrected, strict=True)}
    return found


def of(family: str, ready: dict[Planned, list[Comparison]]) -> list[tuple[Planned, Comparison]]:
    """The comparisons of a family."""
    return [(planned, one) for planned, found in ready.items() if planned.family == family for one in found]


def methods(ready: dict[Planned, list[Comparison]]) -> list[tuple[Planned, Comparison]]:
    """The comparisons of all families, without the planted faults."""
    return [(planned, one) for planned, found in ready.items() if planned.is_method for one in found]


def controls(ready: dict[Planned, list[Comparison]]) -> list[tuple[Planned, Comparison]]:
    """The comparisons with planted faults."""
    return [(planned, one) for planned, found in ready.items() if planned.is_control for one in found]


def difference(one: Comparison) -> str:
    """equal: the interval lies within the margin. larger, smaller: it does not, and p is small. Otherwise undecided."""
    return "equal" if one.equal else OF_OLDER[one.direction]


def outcome(planned: Planned, one: Comparison, ready: dict[Planned, list[Comparison]]) -> str:
    """Whether the prediction was met, in words. No statement is made if its control was not found, or not run."""
    if not one.decided:
        return one.verdict
    if planned.control and planned.control not in found_controls(ready):
        return "no statement: its control was not found"
    found = _found(planned, one)
    return "met" if found == planned.predicted else found if found == "undecided" else f"not met: {found}"


def _found(planned: Planned, one: Comparison) -> str:
    """What was found, in the words of the prediction; the older rule asks for the margin only if it has to."""
    if planned.family not in OLDER:
        return difference(one)
    if planned.predicted == "equal" and one.equal:
        return "equal"
    return one.direction or difference(one)


def by_the_rule_of_today(family: str, ready: dict[Planned, list[Comparison]]) -> str:
    """A note about the outcomes of an older family that would be others today; empty if there are none."""
    others = [
        f"`{one.other}` ({100 * one.effect.mean:+.1f} points) is {difference(one)}, not {_found(planned, one)}"
        for planned, one in of(family, ready)
        if planned.family in OLDER
        and one.decided
        and difference(one) != OF_OLDER.get(_found(planned, one), _found(planned, one))
    ]
    return (
        "Note: this family was announced under an older rule, by which a difference with a small p-value counts even "
        f"within the margin. By the rule of newer announcements: {'; '.join(others)}."
    ) * bool(others)


def found_controls(ready: dict[Planned, list[Comparison]]) -> set[str]:
    """The planted faults that were found as predicted."""
    return {one.other for planned, one in controls(ready) if one.decided and _found(planned, one) == planned.predicted}
