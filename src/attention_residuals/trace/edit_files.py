"""Lists of edits as JSON and YAML, and back."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from attention_residuals.configs import decode, encode
from attention_residuals.durable import unwritable, write_bytes
from attention_residuals.errors import CheckpointError, ConfigError, nearest
from attention_residuals.trace.edits import Edit
from attention_residuals.trace.query_edits import ReplaceQuery, RotateQuery, ScaleQuery
from attention_residuals.trace.value_edits import Mean, Patch, RemoveWriter, Resample, Zero
from attention_residuals.trace.weight_edits import (
    Drop,
    Force,
    PatchWeights,
    Shuffle,
    Static,
    Temperature,
)
from attention_residuals.trace.write_edits import MeanWrite, PatchWrite, ResampleWrite, Skip, ZeroWrite

__all__ = ["EDITS", "decode_edits", "encode_edits", "load_edits", "save_edits"]

EDITS: dict[str, type[Edit]] = {
    kind.__name__: kind
    for kind in (
        Drop,
        Force,
        Mean,
        MeanWrite,
        Patch,
        PatchWeights,
        PatchWrite,
        RemoveWriter,
        ReplaceQuery,
        Resample,
        ResampleWrite,
        RotateQuery,
        ScaleQuery,
        Shuffle,
        Skip,
        Static,
        Temperature,
        Zero,
        ZeroWrite,
    )
}
"""All verbs by name, as files name them."""

_SUFFIXES = (".json", ".yaml", ".yml")


def encode_edits(edits: Iterable[Edit]) -> list[dict[str, Any]]:
    """Turns edits into what JSON and YAML can hold.

    Example:
        >>> encode_edits([Zero(sites="output", sources="B1")])[0]["sources"]
        'B1'
    """
    return [encode(edit) for edit in edits]


def decode_edits(data: Any) -> tuple[Edit, ...]:
    """Turns what ``encode_edits`` gave, or what was written by hand, into edits.

    Args:
        data: A list; each edit has its verb as ``type``, and may leave out what has a default.

    Raises:
        ConfigError: No list, or an edit with a verb, field or value that does not exist.

    Example:
        >>> decode_edits([{"type": "Skip", "layers": ["2..4"]}])
        (Skip(positions=None, rows=None, layers=('2..4',)),)
    """
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        raise ConfigError(
            got=f"{type(data).__name__} as edits", expected="a list of edits", do="put '- type: Drop' first"
        )
    return tuple(decode(one, EDITS) for one in data)


def save_edits(edits: Iterable[Edit], path: Path | str) -> None:
    """Writes edits into a new file, JSON or YAML by its name.

    Raises:
        CheckpointError: There is such a file, or it cannot be written.
        ConfigError: Another name than ``.json``, ``.yaml`` or ``.yml``.
    """
    path = Path(path)
    data = encode_edits(edits)
    text = (
        json.dumps(data, indent=1)
        if _suffix(path) == ".json"
        else yaml.safe_dump(data, sort_keys=False).rstrip()
    )
    if path.exists():
        raise CheckpointError(got=f"{path} exists", expected="a new file", do="name another one")
    try:
        write_bytes(path, f"{text}\n".encode())
    except OSError as error:
        raise unwritable(path, error) from error


def load_edits(path: Path | str) -> tuple[Edit, ...]:
    """Reads edits from a JSON or YAML file.

    Raises:
        CheckpointError: There is no such file, or it is no JSON or YAML.
        ConfigError: It holds something else than edits.
    """
    path = Path(path)
    is_json = _suffix(path) == ".json"
    try:
        text = path.read_text()
        data = json.loads(text) if is_json else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(
            got=f"{path}: {error}", expected="a file of edits", do="write one with save_edits"
        ) from error
    return decode_edits(data)


def _suffix(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            got=f"a file named {path.name!r}",
            expected=f"one that ends in {', '.join(_SUFFIXES)}",
            do=nearest(path.suffix, _SUFFIXES),
        )
    return path.suffix
