"""The parts of the report that are text, tables and pictures, made from the results alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from attention_residuals.contradiction.causal import DIRECTIONS, METRICS
from attention_residuals.contradiction.claims import Claim
from attention_residuals.contradiction.effects import PRIMARY
from attention_residuals.page import ReportFigure, Section

__all__ = ["sections"]

Result = Mapping[str, Any]


def sections(
    result: Result, claims: tuple[Claim, ...], pictures: Mapping[str, ReportFigure]
) -> Iterator[Section]:
    """Makes the parts of the report that need no model.

    Args:
        result: What confirm.json holds.
        claims: Of ``conclusions``.
        pictures: By name, those that there are of ``figures.FIGURES``.
    """
    yield Section(
        heading="What was found, and what was not", paragraphs=tuple(one.sentence for one in claims)
    )
    yield Section(
        heading="Preregistration",
        paragraphs=(
            f"The primary number is the {PRIMARY}. The document has SHA-256 "
            f"{result['preregistration']['sha256']} and was committed in {result['preregistration']['commit']}; "
            f"{result['preregistration']['num_items']} items were planned. Unit: the item. Clusters: family and "
            "template.",
        ),
    )
    yield replace(_accuracy(result), figures=(pictures["behaviour"],))
    routed = {seed: one for seed, one in result["seeds"].items() if one["routing"] is not None}
    if any(claim.about == "routing" for claim in claims):
        yield replace(_effects(routed), figures=(pictures["primary"], pictures["distance"]))
        profiles = ("profile-attention", "profile-mlp")
        yield Section(heading="Layer by layer", figures=tuple(pictures[name] for name in profiles))
        yield replace(_cells(routed), figures=_of(pictures, "cells"))
    if routed:
        yield _controls(routed)
    if any(claim.about == "causes" for claim in claims):
        yield replace(_causes(routed), figures=_of(pictures, "restoration"))
        if any("interactions" in one["causes"] for one in routed.values()):
            yield _interactions(routed)
        yield _exclusivity(routed)
        yield _agreement(routed)


def _of(pictures: Mapping[str, ReportFigure], name: str) -> tuple[ReportFigure, ...]:
    return (pictures[name],) if name in pictures else ()


def _accuracy(result: Result) -> Section:
    rows: list[tuple[str, ...]] = [
        ("seed and set", "family", "consistent right", "contradictory right", "verdict right")
    ]
    for seed, one in result["seeds"].items():
        for name, families in one["behaviour"]["accuracy"].items():
            for family, found in families.items():
                shares = (found[key] for key in ("consistent", "contradictory", "verdict"))
                told = ("not scored" if share is None else f"{share:.1%}" for share in shares)
                rows.append((f"{seed}: {name}", family, *told))
    return Section(
        heading="What the Block models answer, by family, kind and distance",
        paragraphs=(
            "The right answer follows from the statements, also where a claim contradicts them. Where a first claim is "
            'mended or repeated (corrected), the right verdict is "conflict" for all four texts; results of format 1 '
            "scored it otherwise, and that share is left out.",
        ),
        table=tuple(rows),
    )


def _effects(routed: Result) -> Section:
    rows: list[tuple[str, ...]] = [
        ("seed and number", "effect", "interval of 95 %", "p", "p by items", "dz", "items")
    ]
    for seed, one in routed.items():
        found = {"primary (Block)": one["routing"]["primary"]}
        if one["routing"]["full"] is not None:
            found["primary (Full)"] = one["routing"]["full"]
        found |= {f"at {place}": value for place, value in one["routing"]["places"].items()}
        found |= {f"{name} at answer": value for name, value in one["routing"]["numbers"].items()}
        rows += [(f"{seed}: {name}", *_tested(value)) for name, value in found.items()]
    return Section(
        heading="Crossed effects",
        paragraphs=(
            "Mean of the two mismatches less mean of the two matches of each item, over the attention reads of the "
            "middle third of the layers. The primary number is in nats of clr; weight, early mass and reach back are "
            "in shares of weight, entropy in shares of the largest one. Only the primary number was tested as "
            "preregistered; the rest describes it.",
        ),
        table=tuple(rows),
    )


def _tested(found: Result) -> tuple[str, ...]:
    return (
        f"{found['estimate']:+.5f}",
        f"{found['low']:+.5f} to {found['high']:+.5f}",
        f"{found['p']:.2g}",
        f"{found['item_p']:.2g}",
        f"{found['dz']:+.2f}",
        str(found["num_items"]),
    )


def _cells(routed: Result) -> Section:
    rows = [("seed and cell", "effect, nats", "p (max-T)", "q (BH)", "q (BY)", "may be named")]
    count = len(next(iter(routed.values()))["routing"]["cells"]["cells"])
    for seed, one in routed.items():
        found = one["routing"]["cells"]
        order = sorted(range(count), key=lambda place, found=found: found["max_t_p"][place])[:10]  # type: ignore[misc]
        rows += [
            (
                f"{seed}: {found['cells'][place]}",
                f"{found['effects'][place]:+.4f}",
                f"{found['max_t_p'][place]:.2g}",
                f"{found['q_hochberg'][place]:.2g}",
                f"{found['q_yekutieli'][place]:.2g}",
                "yes" if found["cells"][place] in found["named"] else "no",
            )
            for place in order
        ]
    return Section(
        heading="Reads and cells",
        paragraphs=(f"The ten cells with the smallest p of each seed, of m = {count} that were tested.",),
        table=tuple(rows),
    )


def _controls(routed: Result) -> Section:
    rows = [("control and seed", "expected", "found", "holds")]
    words = {True: "yes", False: "no", None: "to be read"}
    for name in next(iter(routed.values()))["routing"]["controls"]:
        for seed, one in routed.items():
            found = one["routing"]["controls"][name]
            rows.append((f"{name}, seed {seed}", found["expected"], found["found"], words[found["holds"]]))
    return Section(heading="The twelve controls", table=tuple(rows))


def _causes(routed: Result) -> Section:
    rows = [("seed, direction, patch", "metric", "moved, logits", "of a difference of", "share", "KL, nats")]
    for seed, one in routed.items():
        for direction in DIRECTIONS:
            for patch in ("weights", "values", "both"):
                found = one["causes"][direction][patch]
                for metric in METRICS:
                    share = found[metric]["share"]["estimate"]
                    rows.append(
                        (
                            f"{seed}: {direction}, {patch}",
                            metric,
                            f"{found[metric]['moved']['estimate']:+.4f}",
                            f"{found[metric]['total']['estimate']:+.4f}",
                            "none" if share is None else f"{share:+.1%}",
                            f"{found['divergence']:.2g}",
                        )
                    )
    routes = "; ".join(f"seed {seed}: {', '.join(one['causes']['routes'])}" for seed, one in routed.items())
    return Section(
        heading="What the routes do",
        paragraphs=(
            f"Routes that the pilot chose: {routes}. Patched at all tokens after the plant, between texts that "
            "differ in the planted token only. A patch without effect is no proof that a route has no role: other "
            "routes may stand in for it.",
        ),
        table=tuple(rows),
    )


def _interactions(routed: Result) -> Section:
    rows = [("seed, pair, direction", "beyond the sum", "interval of 95 %", "p (max-T)", "alone", "together")]
    for seed, one in routed.items():
        for pair in one["causes"].get("interactions", ())[:10]:
            beyond = pair["beyond"]
            rows.append(
                (
                    f"{seed}: {pair['first']} with {pair['second']}, {pair['direction']}",
                    f"{beyond['estimate']:+.4f}",
                    f"{beyond['low']:+.4f} to {beyond['high']:+.4f}",
                    f"{pair['family_p']:.2g}",
                    f"{pair['first_alone']:+.4f}, {pair['second_alone']:+.4f}",
                    f"{pair['together']:+.4f}",
                )
            )
    return Section(
        heading="Pairs of routes",
        paragraphs=(
            "Weights of the other text on two preregistered routes at once, less the sum of what each does alone, in "
            "logits of the answer towards the other text's. Above 0, one alone is made up for by the other; below "
            "0, both bring the same thing about. The ten smallest p of each seed, over all pairs in both directions. "
            "An interval is of its pair alone, and the largest of many is likely too large.",
        ),
        table=tuple(rows),
    )


def _exclusivity(routed: Result) -> Section:
    rows = [
        (
            "seed and read",
            "can move",
            "farthest possible",
            "contradiction moves",
            "KL, nats",
            "first answers stay",
        )
    ]
    for seed, one in routed.items():
        for read in one["causes"]["exclusivity"]["reads"]:
            rows.append(
                (
                    f"{seed}: {read['site']}",
                    f"{read['moved']:.1%} ({read['least']:.1%} to {read['most']:.1%})",
                    f"{read['farthest']:.1%}",
                    f"{read['pair']:.2%}",
                    f"{read['divergence']:.2g} (largest {read['largest_divergence']:.2g})",
                    f"{read['same_answers']:.1%}",
                )
            )
    found = next(iter(routed.values()))["causes"]["exclusivity"]
    return Section(
        heading="Would other weights give the same answer?",
        paragraphs=(
            f"For each read by itself, weights at the answer token as far from the model's own as a search could find "
            f"at a mean KL of {found['bound']:g} nats at the answer, over both texts of {found['num_items']} items. "
            "Distances are total variations: the share of the weight that moves; in brackets the least and the most "
            "of an item. Weights found from outside need not be such as a trained query could give.",
        ),
        table=tuple(rows),
    )


def _agreement(routed: Result) -> Section:
    rows = [("seed and number", "rank correlation", "interval of 95 %", "routes")]
    for seed, one in routed.items():
        for name, found in one["causes"]["agreement"]["correlations"].items():
            known = found["correlation"] is not None
            interval = f"{found['low']:+.2f} to {found['high']:+.2f}" if known else "none"
            told = f"{found['correlation']:+.2f}" if known else "undefined"
            rows.append((f"{seed}: {name}", told, interval, str(found["num_edges"])))
    return Section(
        heading="Which readable number can be trusted",
        paragraphs=("Ranks of routes by what is read, against ranks by what patching their weights does.",),
        table=tuple(rows),
    )
