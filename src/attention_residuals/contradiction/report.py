"""The report: one HTML page, claims.yaml, tables and figures, made from the results alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attention_residuals.contradiction.claims import Claim, claims_yaml
from attention_residuals.contradiction.conclusions import conclusions
from attention_residuals.contradiction.figures import FIGURES, figures
from attention_residuals.contradiction.models import model_of, unfinished
from attention_residuals.contradiction.results import read_results
from attention_residuals.contradiction.sections import sections
from attention_residuals.contradiction.study import Study
from attention_residuals.contradiction.tables import TABLES, tables
from attention_residuals.csv_text import csv_text
from attention_residuals.data.synthetic import step_tokenizer
from attention_residuals.durable import write_bytes
from attention_residuals.errors import ConfigError
from attention_residuals.models.weights import fingerprint
from attention_residuals.page import PageContent, Recorded, ReportFigure, write
from attention_residuals.plots import png_bytes, svg_bytes
from attention_residuals.trace import Recorder

__all__ = ["write_report"]

Result = Mapping[str, Any]

NO_EXAMPLE = " No pair of texts is shown read by read: this report was made in a folder without the models."

TITLE = "Does a model look back when a step contradicts an earlier one?"


def write_report(study: Study, folder: Path, *, device: str = "cpu") -> tuple[Claim, ...]:
    """Writes report.html, claims.yaml, tables/ (CSV) and figures/ (PNG and SVG).

    Args:
        study: What was run.
        folder: With confirm.json; receives them all.
        device: Where the example runs.

    Returns:
        What is claimed.

    Raises:
        ConfigError: There is no confirm.json yet, it is of another study or of other models than those of the
            folder, or there is a report already.
    """
    path = folder / "confirm.json"
    if (folder / "report.html").exists():
        raise ConfigError(
            got=f"{folder / 'report.html'}, which is finished",
            expected="a folder without a report",
            do="open it, or delete it to have it, claims.yaml, tables and figures written again",
        )
    if not path.is_file():
        raise ConfigError(
            got=f"{folder} without confirm.json",
            expected="the results of the confirming run",
            do="attnres study contradiction --stage confirm",
        )
    result = read_results(path, study)
    _check_models(study, folder, result)
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
    pictures = _written(result, claims, folder)
    is_trained = "block" not in unfinished(study, folder, study.seeds[0])
    example = _example(study, folder, device) if is_shown and is_trained else (None, None, None)
    first, second, control = example
    content = PageContent(
        title=TITLE,
        lead=_lead(result) + (NO_EXAMPLE if is_shown and not is_trained else ""),
        sections=tuple(sections(result, claims, pictures)),
        about=about,
        first=first,
        second=second,
        control=control,
        spell=step_tokenizer().tokens,
    )
    write_bytes(folder / "claims.yaml", claims_yaml(claims, about).encode())
    write(content, folder / "report.html")
    return claims


def _written(result: Result, claims: tuple[Claim, ...], folder: Path) -> dict[str, ReportFigure]:
    """Writes tables and figures, and takes away those of an earlier report that this one has not."""
    found = tables(result, claims)
    files = {Path("tables", f"{name}.csv"): csv_text(rows).encode() for name, rows in found.items()}
    pictures = {}
    for name, drawn in figures(result, claims).items():
        png = png_bytes(drawn.figure)
        files[Path("figures", f"{name}.png")] = png
        files[Path("figures", f"{name}.svg")] = svg_bytes(drawn.figure)
        pictures[name] = ReportFigure(png=png, caption=drawn.caption, alt=drawn.alt)
    known = [Path("tables", f"{name}.csv") for name in TABLES]
    known += [Path("figures", f"{name}.{ending}") for name in FIGURES for ending in ("png", "svg")]
    for path in known:
        if path in files:
            (folder / path.parent).mkdir(exist_ok=True)
            write_bytes(folder / path, files[path])
        else:
            (folder / path).unlink(missing_ok=True)
    return pictures


def _check_models(study: Study, folder: Path, result: Result) -> None:
    """Refuses results of other models than those that are in the folder; models may be gone."""
    for seed in study.seeds:
        if "block" in unfinished(study, folder, seed):
            continue
        theirs = str(result["seeds"][str(seed)]["behaviour"]["model"])
        ours = fingerprint(model_of(study, folder, "block", seed))
        if theirs != ours:
            raise ConfigError(
                got=f"{folder / 'confirm.json'} with results of the Block model {theirs[:12]} for seed {seed}",
                expected=f"results of the one in this folder, {ours[:12]}",
                do="run --stage confirm here, or make the report in the folder that the results are from",
            )


def _lead(result: Result) -> str:
    passing = sum(one["routing"] is not None for one in result["seeds"].values())
    return (
        "Small models were trained on step-by-step problems. In otherwise identical texts one step contradicts an "
        "earlier one by a single token. Do later reads over depth shift towards the embedding, and does the shift "
        f"do anything? {passing} of {len(result['seeds'])} models pass the behavioural gate."
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
