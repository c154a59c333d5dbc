"""Tensors that several ranks have written, each its part, put together in one process."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attention_residuals.errors import CheckpointError
from attention_residuals.models.weights import read_json

__all__ = ["is_shard", "is_sharded", "read_parts", "read_shards"]

WHOLE, SHARDED = 1, 2
"""The formats of state.json: of whole files, and of parts that each rank has written."""

OFFSETS = "DCP_SHARDING_INFO"
"""Under which PyTorch's distributed checkpoints note where in the whole tensor a part begins."""


def is_shard(name: str) -> bool:
    """Tells whether a file is called as PyTorch calls the part of a rank.

    Example:
        >>> is_shard("shard-00002-model-00001-of-00001.safetensors"), is_shard("model.safetensors")
        (True, False)
    """
    return re.fullmatch(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors", name) is not None


def is_sharded(checkpoint: Path) -> bool:
    """Tells whether a verified checkpoint lies in the parts that several ranks have written."""
    return bool(read_json(checkpoint / "state.json", newest=SHARDED)["format"] == SHARDED)


def read_parts(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reads the weights of a verified checkpoint in parts, and what its optimizer keeps of each.

    Raises:
        CheckpointError: As for ``read_shards``.
    """
    digests = read_json(checkpoint / "state.json", newest=SHARDED)["sha256"]
    weights = read_shards(checkpoint, filter(is_shard, digests))
    moments = {name: weights.pop(name) for name in list(weights) if "/" in name}
    return weights, moments


def read_shards(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads the parts of all ranks and puts each tensor together.

    Args:
        folder: Of a checkpoint.
        names: The files with the parts.

    Raises:
        CheckpointError: A file cannot be read, or parts are missing.
    """
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for name in names:
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                offsets = json.loads((file.metadata() or {}).get(OFFSETS, "null"))
                for key in file.keys():  # noqa: SIM118 - it is no mapping
                    parts.setdefault(key, []).append((offsets[key]["saved_offsets"], file.get_tensor(key)))
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                got=f"{path}: {error}", expected="the part of a rank", do="use an older checkpoint"
            ) from error
    return {key: _whole(key, parts.pop(key), folder) for key in sorted(parts)}


def _whole(key: str, parts: list[tuple[list[int], Tensor]], folder: Path) -> Tensor:
    ends = [[first + size for first, size in zip(offset, p.shape, strict=True)] for offset, p in parts]
    whole = torch.empty([max(axis) for axis in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
    for (offset, part), end in zip(parts, ends, strict=True):
        whole[tuple(map(slice, offset, end))] = part
    if sum(part.numel() for _, part in parts) != whole.numel():
        raise CheckpointError(
            got=f"{folder} with only some parts of {key}",
            expected=f"all {whole.numel()} numbers of it, each once",
            do="use an older checkpoint",
        )
    return whole
