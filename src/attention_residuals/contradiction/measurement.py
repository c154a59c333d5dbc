"""Measuring items on a model: one table of arrays with the items as rows, on disk with what it comes from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

import attention_residuals
from attention_residuals.contradiction.passes import Passed, by_item, check_null, passed
from attention_residuals.contradiction.predictions import predictions, remark_texts
from attention_residuals.contradiction.study import cluster_of, digest
from attention_residuals.data.synthetic import CLAIM_PLACES, Item
from attention_residuals.durable import write_bytes, write_new
from attention_residuals.errors import CheckpointError, ConfigError, nearest
from attention_residuals.models import LanguageModel
from attention_residuals.models.weights import fingerprint, read_json, sha256
from attention_residuals.stats.units import Numbers
from attention_residuals.trace import Means
from attention_residuals.train.environment import describe

__all__ = [
    "Measured",
    "code_digest",
    "equal_shaped",
    "items_digest",
    "measure",
    "measured_once",
    "middle_third",
]

AT_ONCE = 16
"""Items in one call: enough to be fast, few enough to hold all states."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was measured on one model and one set of items.

    Args:
        items: Names, in the order of the rows.
        clusters: Family and template of each item.
        sites: Where reads happen, the first one apart.
        cells: Sites with sources, as in ``"L3.mlp < embedding"``.
        arrays: By name, float32, items first. ``weight``, ``clr`` and so on (``passes.ROUTING``, ``SHARES``) are
            [items, u, p, place, site]; those that begin with ``cell`` are [items, u, p, cell] at the answer;
            ``surprisal`` (of the plant, nats), ``answer`` (logit of the right answer less that of the one which
            the wrong claim implies), ``verdict`` (logit of "conflict" less that of "fine"), ``right`` and
            ``misled`` (0 or 1) are [items, u, p]; ``state`` is [items, u, p, width]; ``remark ...`` have
            common and rare remark in place of p.
        about: Digests of model, items and code, versions, and how many tokens were the same before the plant.
    """

    items: tuple[str, ...]
    clusters: tuple[str, ...]
    sites: tuple[str, ...]
    cells: tuple[str, ...]
    arrays: dict[str, npt.NDArray[np.float32]]
    about: dict[str, Any]

    def __getitem__(self, name: str) -> Numbers:
        """Returns an array as float64.

        Raises:
            ConfigError: There is none of that name, as of weights in a standard model.
        """
        if name not in self.arrays:
            raise ConfigError(got=f"array {name!r}", expected="a measured one", do=nearest(name, self.arrays))
        return self.arrays[name].astype(np.float64)

    def at(self, name: str, place: str) -> Numbers:
        """Returns an array [items, u, p, site] at one place.

        Args:
            name: Of ``passes.ROUTING`` or ``SHARES``, or ``"remark clr"``.
            place: One of ``CLAIM_PLACES``.
        """
        return self[name][:, :, :, CLAIM_PLACES.index(place)]

    def save(self, path: Path) -> None:
        """Writes the arrays, with all else beside them in a JSON file.

        Raises:
            CheckpointError: There is such a file, or it cannot be written.
        """
        write_new(path, save({name: np.ascontiguousarray(array) for name, array in self.arrays.items()}))
        names = {"items": self.items, "clusters": self.clusters, "sites": self.sites, "cells": self.cells}
        told = {"format": 1, **names, "about": self.about, "sha256": sha256(path)}
        write_bytes(path.with_suffix(".json"), (json.dumps(told, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "Measured":
        """Reads it back.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        told = read_json(path.with_suffix(".json"), newest=1)
        try:
            names = {name: tuple(told[name]) for name in ("items", "clusters", "sites", "cells")}
            about, wanted = told["about"], told["sha256"]
        except KeyError as error:
            raise _damaged(path.with_suffix(".json"), f"without {error}", "what was measured") from error
        if sha256(path) != wanted:
            raise _damaged(path, f"with SHA-256 {sha256(path)[:12]}", f"{str(wanted)[:12]}, as it was saved")
        try:
            return cls(**names, arrays=load_file(path), about=about)
        except SafetensorError as error:
            raise _damaged(path, f"that cannot be read ({error})", "arrays") from error


def measure(model: LanguageModel, items: Sequence[Item], *, static: Means | None = None) -> Measured:
    """Runs all texts of items in calls of equal shape, and measures them.

    Texts of the two planted values run in two calls with the same other texts in the same rows, so that
    everything before the plant is the same bit for bit, which is checked.

    Args:
        model: Of AttnRes or standard residuals.
        items: One or more.
        static: Replace weights by these means.

    Raises:
        DataError: Something differs before the plant.
    """
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    num_same, last = 0, None
    for rows, group in equal_shaped(items):
        last, found, same = _measured(model, group, static)
        num_same += same
        for name, tensor in found.items():
            part = tensor.float().cpu().numpy()
            arrays.setdefault(name, np.zeros((len(items), *part.shape[1:]), np.float32))[rows] = part
    assert last is not None
    return Measured(
        items=tuple(item.name for item in items),
        clusters=tuple(cluster_of(item) for item in items),
        sites=last.sites,
        cells=last.cells,
        arrays=arrays,
        about={
            "model": fingerprint(model),
            "items": items_digest(items),
            "code": code_digest(),
            "is_static": static is not None,
            "tokens_before_plant": num_same,
            **{key: value for key, value in describe().items() if key != "command"},
        },
    )


def measured_once(
    folder: Path, model: LanguageModel, items: Sequence[Item], *, static: Means | None = None
) -> Measured:
    """Measures items, or reads what an earlier call of the same code measured on the same model.

    Args:
        folder: Receives a file for each combination of model, items and code; none is ever written over.
        model: As for ``measure``, and so on.
        items: The same.
        static: The same.
    """
    key = digest([fingerprint(model), items_digest(items), code_digest(), static is not None])
    path = folder / f"{key[:16]}.safetensors"
    if path.with_suffix(".json").exists():
        return Measured.load(path)
    path.unlink(missing_ok=True)  # of a process that was killed before it wrote the JSON file
    found = measure(model, items, static=static)
    found.save(path)
    return found


def equal_shaped(items: Sequence[Item]) -> Iterator[tuple[list[int], list[Item]]]:
    """Puts items together whose texts have the same length and the same places, with their numbers."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault((item.ids.shape[-1], *sorted(item.places.items())), []).append(number)
    for numbers in groups.values():
        for first in range(0, len(numbers), AT_ONCE):
            rows = numbers[first : first + AT_ONCE]
            yield rows, [items[row] for row in rows]


def middle_third(sites: Sequence[str], kind: str = "attention") -> list[int]:
    """Numbers the sites of a kind in the middle third of the layers.

    Example:
        >>> sites = [f"L{layer}.{kind}" for layer in range(6) for kind in ("attention", "mlp")]
        >>> [sites[number] for number in middle_third([*sites, "output"])]
        ['L2.attention', 'L3.attention']
    """
    layers = {name: int(name[1:].split(".")[0]) for name in sites if name.startswith("L")}
    depth = max(layers.values()) + 1
    wanted = range(max(1, depth // 3), max(2, 2 * depth // 3))
    return [
        number for number, name in enumerate(sites) if name.endswith(kind) and layers.get(name, -1) in wanted
    ]


def items_digest(items: Sequence[Item]) -> str:
    """Returns the SHA-256 of the texts of items."""
    return digest([[item.name, item.ids.tolist(), item.rare.tolist(), dict(item.places)] for item in items])


def _damaged(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        got=f"{path} {found}", expected=expected, do="delete it and the file beside it, and measure again"
    )


@cache
def code_digest() -> str:
    """Returns the SHA-256 of the package's source, by which a measurement knows what made it."""
    root = Path(attention_residuals.__file__).parent
    return digest([[path.relative_to(root).as_posix(), sha256(path)] for path in sorted(root.rglob("*.py"))])


def _measured(
    model: LanguageModel, items: Sequence[Item], static: Means | None
) -> tuple[Passed, dict[str, Tensor], int]:
    ids = torch.from_numpy(np.stack([item.ids for item in items]))
    places, length, device = items[0].places, ids.shape[-1], next(model.parameters()).device

    def run(texts: Tensor) -> Passed:
        return passed(model, texts.reshape(-1, length).to(device), static=static)

    both = [run(ids[:, :, planted]) for planted in range(2)]
    before = (torch.arange(length, device=device) < places["plant"]).expand(2 * len(items), -1)
    same = check_null(both[0], both[1], before, tuple(item.name for item in items))
    found = {
        name: torch.stack([_taken(one, places)[name] for one in both], 2) for name in _taken(both[0], places)
    }
    found |= predictions(both, items, ids)

    kinds, told = remark_texts(both, items)
    pair = [run(text) for text in kinds]
    if "clr" in both[0].numbers:
        found["remark clr"] = torch.stack([_taken(one, places)["clr"] for one in pair], 2)
    found["remark surprisal"] = told
    return both[0], found, same


def _taken(one: Passed, places: Any) -> dict[str, Tensor]:
    """Takes what was measured at the places of claims: [items, u, place, site], [items, u, cell]."""
    columns, answer = [places[place] for place in CLAIM_PLACES], places["answer"]
    found = {name: by_item(numbers[..., columns].permute(1, 2, 0)) for name, numbers in one.numbers.items()}
    found |= {f"cell {name}": by_item(numbers[..., answer].T) for name, numbers in one.by_cell.items()}
    probed = middle_third(one.sites)[-1]
    return found | {"state": by_item(one.states[probed, :, answer])}
