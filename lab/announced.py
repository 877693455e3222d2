"""results/plan.yaml: the comparisons that were announced before their runs, and docs/benchmark.md about the methods.

The announcement fixes how many p-values are corrected together: those of one entry, or of all entries of a family. The
families whose names begin with "controls" are of planted faults.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from inputs.files import InputError, read_file
from lab import comparisons, figures
from lab.comparisons import Comparison
from lab.records import KINDS, Part, Run, validated

FIGURE = "figures/benchmark.png"
CONTROLS = "controls"  # how the names of families of planted faults begin; the others compare methods
# Families that were announced under an older rule: better and worse are met by every difference with a small p-value,
# also by one within the margin. They keep it, because a rule that changes after the results decides nothing.
OLDER = ("benchmark", "controls", "quantised", "rounding", "controls of rounding")
OF_OLDER = {"better": "larger", "worse": "smaller", "": "undecided"}
# Settings that make the sampler's policy another one than the trainer's.
MISMATCHES = ("rollout.round_bits", "rollout.route_flips", "rollout.logit_noise", "rollout.staleness", "aqn.")


class Planned(Part):
    title: str
    sweep: str = Field("", description="the file of configs/sweeps/ that makes the runs")
    base: str = Field(description="group of records that the others are compared with")
    others: tuple[str, ...] = Field(min_length=1, strict=False)
    kind: str = Field("sampled", pattern=f"^({'|'.join(KINDS)})$", description="outcome, see records.scores")
    margin: float = Field(0.0, ge=0, description="points: a variant whose interval lies within it is called equal")
    seeds: tuple[int, ...] | None = Field(None, strict=False, description="the announced seeds; by default the sweep's")
    missing: tuple[str, ...] = Field((), strict=False, description="NAME-seedN: why this announced run has no record")
    family: str = Field("", description="comparisons of a family are corrected together, and are in docs/benchmark.md")
    predicted: str = Field("", pattern="^(equal|larger|smaller|better|worse|)$", description="see `outcome`")
    why: str = Field("", description="the mechanism behind the prediction")
    control: str | list[str] = Field("", description="groups of runs that this design must find, or find equal")

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
    def controls(self) -> set[str]:
        return {self.control} - {""} if isinstance(self.control, str) else {*self.control}

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
    learned: tuple[str, ...] = Field((), strict=False, description="sentences with {names} of `numbers`, best first")
    drawn: dict[str, str] = Field({}, description="group -> its label in the figure of learning curves")
    gains: tuple[str, ...] = Field((), strict=False, description="groups whose gain is stated")
    rows: tuple[NotRun, ...] = Field((), strict=False)


Found = list[tuple[Planned, Comparison]]  # the announced comparisons that could be made


def read_plan(results: Path) -> Plan:
    """The plan of a folder of records; empty when there is no plan.yaml."""
    path = results / "plan.yaml"
    plan = validated(Plan, read_file(path) if path.exists() else {}, path)
    controls = {name for planned in plan.comparisons if planned.is_control for name in planned.others}
    for planned in plan.comparisons:
        if wrong := planned.controls - controls:
            raise InputError(f"{path}: {planned.title}: control: found {min(wrong)}; needed: one of {CONTROLS}")
    if unknown := {*plan.gains} - {name for planned in plan.comparisons for name in planned.names}:
        raise InputError(f"{path}: gains: found {min(unknown)}; needed: groups of comparisons")
    return plan


def compared(plan: Plan, groups: dict[str, list[Run]]) -> Found:
    """The announced comparisons whose variants all have records, with p-values corrected as announced."""
    found = [
        (planned, one)
        for planned in plan.comparisons
        if {*planned.names} <= groups.keys()
        for one in comparisons.compare({n: groups[n] for n in planned.names}, planned.kind, planned.margin / 100)
    ]
    for family in {planned.family for planned, _ in found} - {""}:
        places = [place for place, (planned, _) in enumerate(found) if planned.family == family]
        announced = sum(planned.family == family for planned in plan.comparisons)
        corrected = comparisons.corrected([found[place][1] for place in places], announced)
        for place, one in zip(places, corrected, strict=True):
            found[place] = found[place][0], one
    return found


def of(family: str, ready: Found) -> Found:
    """The comparisons of a family."""
    return [(planned, one) for planned, one in ready if planned.family == family]


def methods(ready: Found) -> Found:
    """The comparisons of all families, without the planted faults."""
    return [(planned, one) for planned, one in ready if planned.family and not planned.is_control]


def difference(one: Comparison) -> str:
    """equal: the interval lies within the margin. larger, smaller: it does not, and p is small. Otherwise undecided."""
    return "equal" if one.equal else OF_OLDER[one.direction]


def chance_of_equal(one: Comparison) -> float:
    """Probability that this design, with the spread that was found, calls a true difference of zero equal."""
    low, high = one.effect.interval()
    room = one.margin - (high - low) / 2  # for the mean, on both sides of zero
    outside = comparisons.Effect(room, one.effect.error, one.effect.freedom).p_value()
    return 1 - float(outside) if room > 0 else 0.0


def outcome(planned: Planned, one: Comparison, ready: Found) -> str:
    """Whether the prediction was met, in words. No statement is made if its control was not found, or not run."""
    if not one.decided:
        return one.verdict
    if planned.controls - found_controls(ready):
        return "no statement: its control was not found"
    found = _found(planned, one)
    return "met" if found == planned.predicted else found if found == "undecided" else f"not met: {found}"


def _found(planned: Planned, one: Comparison) -> str:
    """What was found, in the words of the prediction; the older rule asks for the margin only if it has to."""
    if planned.family in OLDER and one.direction and not (planned.predicted == "equal" and one.equal):
        return one.direction
    return difference(one)


def found_controls(ready: Found) -> set[str]:
    """The controls that were as predicted: planted faults that were found, and repetitions that are equal."""
    return {
        one.other
        for planned, one in ready
        if planned.is_control and one.decided and _found(planned, one) == planned.predicted
    }


def stated(ready: Found) -> Found:
    """The comparisons about which a statement is made: those whose controls are all as predicted."""
    found = found_controls(ready)
    return [(planned, one) for planned, one in ready if planned.controls <= found]


def mismatches(ready: Found) -> list[Comparison]:
    """The comparisons whose method adds a mismatch of sampler and trainer to its base."""
    return [one for _, one in methods(stated(ready)) if any(setting.startswith(MISMATCHES) for setting in one.changed)]


def losses(ready: Found) -> list[tuple[Comparison, Comparison]]:
    """(a loss by a mismatch, a correction): comparisons whose base another comparison found to lose."""
    lost = {one.other: one for one in mismatches(ready) if one.direction == "worse" and not one.equal}
    return [(lost[one.base], one) for _, one in methods(stated(ready)) if one.base in lost]


def numbers(plan: Plan, ready: Found, groups: dict[str, list[Run]]) -> dict[str, str]:
    """What a sentence can name: NAME, the difference of the first comparison of this variant; share_NAME, the share of
    a loss that it gives back; gain_NAME, what training changed in a group. Each has its 95 % interval. A comparison
    whose control was not found has no number."""
    controls = found_controls(ready)
    first = {one.other: (planned, one) for planned, one in reversed(ready)}
    found = {
        name: f"{one.effect.points} points ({one.effect.range})"
        for name, (planned, one) in first.items()
        if planned.controls <= controls
    }
    for loss, back in losses(ready):
        share, low, high = (100 * x for x in comparisons.recovered(loss, back))
        found[f"share_{back.other}"] = f"{share:.0f} % ({low:.0f} to {high:.0f} %)"
    for name in {*plan.gains} & groups.keys():
        gain = comparisons.gain(groups[name], comparisons.kind_of({name: groups[name]}))
        found[f"gain_{name}"] = f"{gain.points} points ({gain.range})"
    return found


def learned(plan: Plan, ready: Found, groups: dict[str, list[Run]]) -> str:
    """The sentences of the plan with their numbers. InputError for a name without records."""
    try:
        known = numbers(plan, ready, groups)
        return "\n".join(f"{i}. {text.format_map(known)}" for i, text in enumerate(plan.learned, 1))
    except KeyError as error:
        raise InputError(f"learned: {error.args[0]}: no such number; needed: one of {', '.join(known)}") from None


def by_the_rule_of_today(found: Found) -> str:
    """A note about the outcomes of older families that would be others today; empty if there are none."""
    others = [
        f"`{one.other}` ({100 * one.effect.mean:+.1f} points) is {difference(one)}, not {_found(planned, one)}"
        for planned, one in found
        if planned.family in OLDER
        and one.decided
        and difference(one) != OF_OLDER.get(_found(planned, one), _found(planned, one))
    ]
    return (
        "Note: this family was announced under an older rule, by which a difference with a small p-value counts even "
        f"within the margin. By the rule of newer announcements: {'; '.join(others)}."
    ) * bool(others)


# ------------------------------------------------------------------------------------------------ docs/benchmark.md


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table; the keys of the first row are its head."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def notes(found: Iterable[Comparison]) -> list[str]:
    """The limits of comparisons, a sentence each, with the variants that have it."""
    who: dict[str, dict[str, None]] = {}
    for note, name in ((note, one.other) for one in found for note in one.notes):
        who.setdefault(note, {})[name] = None
    return [f"Note: {note} ({', '.join(names)})." for note, names in sorted(who.items())]


def page(ready: Found, groups: dict[str, list[Run]]) -> str:
    """The generated part of docs/benchmark.md."""
    announced, controls = methods(ready), [(planned, one) for planned, one in ready if planned.is_control]
    if not announced:
        return "No record yet."
    parts = ["## What was found", f"![Effect of each method](../results/{FIGURE})"]
    sections: dict[str, Found] = {}
    for planned, one in announced:
        heading = "Families of one comparison" if one.num_comparisons == 1 else f"Family {planned.family}"
        sections.setdefault(heading, []).append((planned, one))
    for heading, found in sections.items():
        parts += [f"### {heading}", table([method_row(*each, ready, groups) for each in found])]
        parts += notes(one for _, one in found)
        parts += filter(None, [by_the_rule_of_today(found)])
    if controls:
        parts += ["## Controls", table([control_row(*each, ready) for each in controls])]
        parts += notes(one for _, one in controls)
    return "\n\n".join(parts)


def method_row(planned: Planned, one: Comparison, ready: Found, groups: dict[str, list[Run]]) -> dict[str, str]:
    """A comparison; its second outcome, the accuracy at the end, has a p-value that is not corrected."""
    (end,) = comparisons.compare({name: groups[name] for name in planned.names})
    return {
        "comparison": planned.title,
        "method": f"`{one.other}`",
        "against": f"`{one.base}`",
        "predicted": planned.predicted,
        "difference, points": one.effect.points,
        "95 % interval": one.effect.range,
        "p (Holm)": f"{one.p:.2g}",
        "detectable, points": f"{100 * one.detectable:.1f}",
        "chance of equal": f"{100 * chance_of_equal(one):.0f} %",
        "found": _found(planned, one) if one.decided else one.verdict,
        "prediction": outcome(planned, one, ready),
        "at the end": f"{end.effect.points} ({end.effect.range}; p {end.effect.p_value():.2g})",
    }


def control_row(planned: Planned, one: Comparison, ready: Found) -> dict[str, str]:
    return {
        "control": planned.title.removeprefix("Control: "),
        "run": f"`{one.other}`",
        "against": f"`{one.base}`",
        "seeds": str(len(one.seeds)),
        "difference, points": one.effect.points,
        "95 % interval": one.effect.range,
        "p (Holm)": f"{one.p:.2g}",
        "as predicted": "yes" if one.other in found_controls(ready) else "no",
    }


def figure_recovered(ready: Found) -> Any:
    """The share of each loss that each correction gives back, with its interval."""
    import matplotlib.figure

    found = sorted(losses(ready), key=lambda pair: comparisons.recovered(*pair)[0], reverse=True)
    titles = {one.other: planned.title for planned, one in ready}
    drawn = matplotlib.figure.Figure(figsize=(8, 0.32 * len(found) + 1.1), layout="constrained")
    axes = drawn.subplots()
    for place, (loss, back) in enumerate(found):
        share, *interval = (100 * x for x in comparisons.recovered(loss, back))
        color = figures.FOUND if min(interval) > 0 else figures.HARM if max(interval) < 0 else figures.NEITHER
        axes.plot(interval, [-place, -place], color=color, lw=2)
        axes.plot(share, -place, color=color, marker="o", ms=5)
    for x in (0, 100):
        axes.axvline(x, color="black", lw=0.8)
    axes.set_yticks([-place for place in range(len(found))], [titles[back.other] for _, back in found])
    figures.finish(axes, "")
    axes.set_title("Blue: it helps. Grey: no effect was shown. Orange: it harms.", loc="left", fontsize=9)
    axes.set_xlabel("share of the loss that is given back, %; 95 % interval", fontsize=9)
    return drawn


def figure_gap(ready: Found, groups: dict[str, list[Run]]) -> Any:
    """How far sampler and trainer are apart, against the points that this costs, with and without a correction.

    Old completions are left out: their log-probs are compared with those of the policy that sampled them.
    """
    import matplotlib.figure

    drawn = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes, titles = drawn.subplots(), {one.other: planned.title for planned, one in ready}
    named: set[tuple[str, ...]] = set()  # a repetition stands beside the first, which has the name
    for one in mismatches(ready):
        if any(setting.startswith("rollout.staleness") for setting in one.changed):
            continue
        apart, lost = figures.gap(groups[one.other]), 100 * float(one.effect.mean)
        ends = [lost + 100 * float(back.effect.mean) for _, back in methods(ready) if back.base == one.other]
        axes.plot([apart] * len(ends), ends, color=figures.FOUND, marker="_", ms=12, mew=2, ls="")
        axes.plot(apart, lost, color=figures.HARM, marker="o", ms=6)
        weak_noise = any(setting.startswith("aqn.") for setting in one.changed) and not one.direction
        if not weak_noise and tuple(one.changed) not in named:
            named.add(tuple(one.changed))
            axes.annotate(titles[one.other], (apart, lost), xytext=(8, -3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.4)
    figures.finish(axes, "difference to the sound sampler, points")
    axes.set_xlabel("mean difference of the log-probs of sampler and trainer, nats", fontsize=9)
    axes.set_title(
        "Orange: without a correction. Blue: with one. Without a name: AQN without an effect, and repetitions.",
        loc="left",
        fontsize=9,
    )
    return drawn


def figure(ready: Found) -> Any:
    """Every method's difference with its interval, and the direction that was predicted."""
    import matplotlib.figure

    announced = methods(ready)
    drawn = matplotlib.figure.Figure(figsize=(9, 0.36 * len(announced) + 1.4), layout="constrained")
    axes = drawn.subplots()
    for place, (planned, one) in enumerate(announced):
        low, high = one.effect.interval()
        color = figures.FOUND if outcome(planned, one, ready) == "met" else figures.HARM
        axes.plot([100 * low, 100 * high], [-place, -place], color=color, lw=2)
        axes.plot(100 * one.effect.mean, -place, color=color, marker="o", ms=5)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_ylim(-len(announced), 1)
    labels = [f"{planned.title} (predicted: {planned.predicted})" for planned, _ in announced]
    axes.set_yticks([-place for place in range(len(announced))], labels)
    figures.finish(axes, "")
    axes.set_xlabel("difference of the accuracy along the run, points; 95 % interval", fontsize=9)
    axes.set_title("Blue: as predicted. Orange: not, or undecided.", loc="left", fontsize=9)
    return drawn
