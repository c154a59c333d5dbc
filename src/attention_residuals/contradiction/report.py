"""The report: one HTML page and claims.yaml, made from the results alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from attention_residuals.contradiction.conclusions import Claim, claims_yaml, conclusions
from attention_residuals.contradiction.effects import PRIMARY
from attention_residuals.contradiction.models import model_of
from attention_residuals.contradiction.study import Study
from attention_residuals.data.synthetic import step_tokenizer
from attention_residuals.durable import write_bytes
from attention_residuals.errors import ConfigError
from attention_residuals.models.weights import read_json
from attention_residuals.page import PageContent, Recorded, ReportFigure, Section, write
from attention_residuals.plots import layer_profile, png_bytes
from attention_residuals.trace import Recorder

__all__ = ["sections", "write_report"]

Result = Mapping[str, Any]

TITLE = "Does a model look back when a step contradicts an earlier one?"


def write_report(study: Study, folder: Path, *, device: str = "cpu") -> tuple[Claim, ...]:
    """Writes report.html and claims.yaml.

    Args:
        study: What was run.
        folder: With confirm.json; receives both.
        device: Where the example runs.

    Returns:
        What is claimed.

    Raises:
        ConfigError: There is no confirm.json yet, or there is a report already.
    """
    path = folder / "confirm.json"
    if (folder / "report.html").exists():
        raise ConfigError(
            got=f"{folder / 'report.html'}, which is finished",
            expected="a folder without a report",
            do="open it, or delete it to have it and claims.yaml written again",
        )
    if not path.is_file():
        raise ConfigError(
            got=f"{folder} without confirm.json",
            expected="the results of the confirming run",
            do="attnres study contradiction --stage confirm",
        )
    result = read_json(path, newest=1)
    claims = conclusions(result)
    about = {
        "preregistration": str(result["preregistration"]["sha256"]),
        "committed": str(result["preregistration"]["commit"]),
        "study": str(result["study"]),
        **{f"model of seed {seed}": str(one["behaviour"]["model"]) for seed, one in result["seeds"].items()},
        "items": str(next(iter(result["seeds"].values()))["behaviour"]["items"]),
        "code": str(next(iter(result["seeds"].values()))["behaviour"]["code"]),
    }
    is_shown = any(claim.about == "routing" for claim in claims)
    first, second, control = _example(study, folder, device) if is_shown else (None, None, None)
    content = PageContent(
        title=TITLE,
        lead=_lead(result),
        sections=tuple(sections(result, claims)),
        about=about,
        first=first,
        second=second,
        control=control,
        spell=step_tokenizer().tokens,
    )
    write_bytes(folder / "claims.yaml", claims_yaml(claims, about).encode())
    write(content, folder / "report.html")
    return claims


def sections(result: Result, claims: tuple[Claim, ...]) -> Iterator[Section]:
    """Makes the parts of the report that need no model.

    Args:
        result: What confirm.json holds.
        claims: Of ``conclusions``.
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
    yield _accuracy(result)
    routed = {seed: one for seed, one in result["seeds"].items() if one["routing"] is not None}
    if any(claim.about == "routing" for claim in claims):
        yield _effects(routed)
        yield _profile(routed)
        yield _cells(routed)
    if routed:
        yield _controls(routed)
    if any(claim.about == "causes" for claim in claims):
        yield _causes(routed)
        yield _agreement(routed)


def _lead(result: Result) -> str:
    passing = sum(one["routing"] is not None for one in result["seeds"].values())
    return (
        "Small models were trained on step-by-step problems. In otherwise identical texts one step contradicts an "
        "earlier one by a single token. Do later reads over depth shift towards the embedding, and does the shift "
        f"do anything? {passing} of {len(result['seeds'])} models pass the behavioural gate."
    )


def _accuracy(result: Result) -> Section:
    rows: list[tuple[str, ...]] = [
        ("seed and set", "family", "consistent right", "contradictory right", "verdict right")
    ]
    for seed, one in result["seeds"].items():
        for name, families in one["behaviour"]["accuracy"].items():
            for family, found in families.items():
                shares = (f"{found[key]:.1%}" for key in ("consistent", "contradictory", "verdict"))
                rows.append((f"{seed}: {name}", family, *shares))
    return Section(
        heading="What the Block models answer, by family, kind and distance",
        paragraphs=("The right answer follows from the statements, also where a claim contradicts them.",),
        table=tuple(rows),
    )


def _effects(routed: Result) -> Section:
    rows: list[tuple[str, ...]] = [
        ("seed and number", "effect", "interval of 95 %", "p", "p by items", "dz", "items")
    ]
    for seed, one in routed.items():
        found = {"primary (Block)": one["routing"]["primary"], "primary (Full)": one["routing"]["full"]}
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


def _profile(routed: Result) -> Section:
    figures = []
    for kind in ("attention", "mlp"):
        lines = {}
        for seed, one in routed.items():
            found = one["routing"]["profile"]
            own = [value for site, value in found.items() if site.endswith(kind)]
            lines[f"seed {seed}"] = own if kind == "mlp" else [0.0, *own]  # the first read has no choice
        figure = layer_profile(
            lines,
            y_label="crossed effect on clr of the embedding, nats",
            title=f"Effect of a contradiction at the answer, {kind} reads",
            footer=_footer(routed),
        )
        ends = ", ".join(f"{name} from {min(line):+.3f} to {max(line):+.3f}" for name, line in lines.items())
        figures.append(
            ReportFigure(
                png=png_bytes(figure), caption=f"Layer by layer, {kind} reads.", alt=f"Lines: {ends}."
            )
        )
    return Section(heading="Layer by layer", figures=tuple(figures))


def _footer(routed: Result) -> str:
    """Says how many items and which weights a figure is of."""
    count = next(iter(routed.values()))["routing"]["primary"]["num_items"]
    models = ", ".join(f"seed {seed} {one['behaviour']['model'][:12]}" for seed, one in routed.items())
    return f"n = {count} items, float32; models {models}"


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
        for direction in ("repair", "break"):
            for patch in ("weights", "values", "both"):
                found = one["causes"][direction][patch]
                for metric in ("answer", "verdict"):
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


def _example(study: Study, folder: Path, device: str) -> tuple[Recorded, Recorded, Recorded]:
    """Records the first confirming item: consistent, contradictory, and with another free word."""
    model = model_of(study, folder, "block", study.seeds[0]).to(device)
    item = study.items("confirm", "main", 1)[0]
    same = (item.rare[0] == item.ids[0, 0]).all(1)
    texts = {
        "consistent": item.ids[0, 0],
        "contradictory": item.ids[0, 1],
        "another free word": item.rare[0][int(same.argmin())],
    }
    passes = []
    for name, ids in texts.items():
        recorder, tokens = Recorder(), torch.from_numpy(ids)[None].to(device)
        with torch.no_grad():
            logits = model(tokens, tap=recorder)
        passes.append(
            Recorded(trace=recorder.trace(model, tokenizer=step_tokenizer()), name=name, logits=logits.cpu())
        )
    return passes[0], passes[1], passes[2]
