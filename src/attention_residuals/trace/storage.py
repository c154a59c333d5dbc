"""A trace on disk: trace.json, which says what it is, and trace.safetensors, which holds its numbers."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from attention_residuals.durable import unwritable, write_bytes
from attention_residuals.errors import CheckpointError
from attention_residuals.models.weights import load_tensors, read_json

__all__ = ["FORMAT", "read_trace", "write_trace"]

FORMAT = 3
"""Of trace.json; raised when an older version of this package could not read it."""


def write_trace(folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes both files into a folder that holds no trace yet.

    Raises:
        CheckpointError: There is a trace already, or the folder cannot be written.
    """
    if (folder / "trace.json").exists():
        raise CheckpointError(
            got=f"{folder} holds a trace", expected="a folder without one", do="name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        write_bytes(folder / "trace.safetensors", content)
        whole = {"format": FORMAT, **description, "sha256": hashlib.sha256(content).hexdigest()}
        # Last, since it is what makes the folder a trace.
        write_bytes(folder / "trace.json", (json.dumps(whole, indent=1) + "\n").encode())
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from error


def read_trace(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads both files back.

    Raises:
        CheckpointError: Missing, damaged, or written by an older or a newer version.
    """
    description = read_json(folder / "trace.json", newest=FORMAT)
    if description["format"] < FORMAT:
        raise CheckpointError(
            got=f"{folder / 'trace.json'} of format {description['format']}",
            expected=f"format {FORMAT}, which holds the lengths of contributions",
            do="record the trace again: they cannot be computed without the model",
        )
    tensors = load_tensors(folder / "trace.safetensors", sha256_expected=str(description.get("sha256")))
    return description, tensors
