"""Other people's checkpoints: a folder with config.json and safetensors, every tensor of which is claimed.

Nothing of a checkpoint is ever run: no pickle is opened, no code is imported, and ``auto_map`` in a config,
which names code that lies in the folder, is at most a reason to refuse.
"""

import difflib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attention_residuals.durable import PARTIAL, sync, unwritable
from attention_residuals.errors import CheckpointError, nearest

__all__ = ["FLOATS", "Checkpoint", "StoredTensor", "read_checkpoint", "refuse_own_code", "write_checkpoint"]

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that a claimed tensor may have, as safetensors spells them."""

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class StoredTensor(NamedTuple):
    """What a file's header says of one tensor, whose data nobody has read yet."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder whose config and headers have been read and checked, and none of whose data.

    A loader claims tensors by name and shape. All claims are checked before the first byte of data is read,
    so nothing is ever loaded by half.

    Args:
        folder: Where it lies.
        config: The object in config.json.
        tensors: What is stored, by name.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def load(self, claims: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Reads every tensor, each with the dtype that it is stored in.

        Args:
            claims: The shape of each tensor, by name.

        Raises:
            CheckpointError: A claimed tensor is missing, has another shape or is no floating-point tensor,
                or a stored one is not claimed.
        """
        self._check(claims)
        unclaimed = self.unclaimed(claims)
        if unclaimed:
            raise CheckpointError(
                got=f"{self.folder}: {_counted(unclaimed)} that no part of the model claims",
                expected="only tensors that the config speaks of",
                do="load it with the loader of its own format; what is not understood is not dropped",
            )
        return self._read(claims)

    def load_part(self, claims: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Reads the claimed tensors alone; ``unclaimed`` names the rest.

        Raises:
            CheckpointError: A claimed tensor is missing, has another shape or is no floating-point tensor.
        """
        self._check(claims)
        return self._read(claims)

    def unclaimed(self, claims: Iterable[str]) -> tuple[str, ...]:
        """Names the stored tensors that are not among the claims, in order of name."""
        return tuple(sorted(self.tensors.keys() - set(claims)))

    def _check(self, claims: Mapping[str, tuple[int, ...]]) -> None:
        missing = sorted(claims.keys() - self.tensors.keys())
        if missing:
            raise CheckpointError(
                got=f"{self.folder} without {_counted(missing)}",
                expected=f"{missing[0]} of shape {list(claims[missing[0]])}",
                do=self._likely(claims, missing[0]),
            )
        for name, shape in claims.items():
            stored = self.tensors[name]
            if stored.shape != tuple(shape) or stored.dtype not in FLOATS:
                raise CheckpointError(
                    got=f"{stored.file}: {name} is {stored.dtype} of shape {list(stored.shape)}",
                    expected=f"shape {list(shape)}, stored as {', '.join(FLOATS[:-1])} or {FLOATS[-1]}",
                    do="see whether the config belongs to these weights, and whether they are quantised",
                )

    def _likely(self, claims: Mapping[str, tuple[int, ...]], missing: str) -> str:
        """Names what may be the missing tensor under another name: it has the same shape."""
        shape = tuple(claims[missing])
        alike = [name for name in self.unclaimed(claims) if self.tensors[name].shape == shape]
        closest = difflib.get_close_matches(missing, alike, n=3, cutoff=0.0)
        return nearest(missing, closest) if closest else "see whether the download is complete"

    def _read(self, claims: Iterable[str]) -> dict[str, Tensor]:
        by_file: dict[Path, list[str]] = {}
        for name in claims:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        tensors = {}
        for path, names in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    tensors.update({name: file.get_tensor(name) for name in names})
            except (OSError, SafetensorError) as error:
                raise _damaged(path, error) from error
        return tensors


def read_checkpoint(folder: Path | str) -> Checkpoint:
    """Reads config and headers of a folder in Hugging Face's layout; data is read by ``load``.

    Args:
        folder: Holds config.json, and model.safetensors or model.safetensors.index.json with its shards.

    Raises:
        CheckpointError: A file is missing, damaged or a pickle, an index that does not fit its shards, or a
            tensor that lies in two of them.

    Example:
        >>> import tempfile, torch
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_checkpoint(folder, config={"width": 2}, tensors={"gain": torch.ones(2)})
        >>> read_checkpoint(folder).tensors["gain"].shape
        (2,)
    """
    folder = Path(folder)
    config = _json_object(folder / CONFIG)
    if (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        raise CheckpointError(
            got=f"{folder} with both {WEIGHTS} and {INDEX}",
            expected="the weights once",
            do="remove the one that does not belong to this checkpoint",
        )
    if (folder / INDEX).exists():
        return Checkpoint(folder=folder, config=config, tensors=_sharded(folder))
    if not (folder / WEIGHTS).exists():
        raise _without_weights(folder)
    return Checkpoint(folder=folder, config=config, tensors=_header(folder / WEIGHTS))


def refuse_own_code(checkpoint: Checkpoint) -> None:
    """Refuses a config that wants code out of the checkpoint, for formats that only such code would define.

    Raises:
        CheckpointError: The config has ``auto_map`` or ``trust_remote_code``.
    """
    for key in ("auto_map", "trust_remote_code"):
        if checkpoint.config.get(key):
            raise CheckpointError(
                got=f"{checkpoint.folder / CONFIG} with {key}: {checkpoint.config[key]!r}",
                expected="a model that is defined by its config alone",
                do=f"code from a checkpoint is never run; remove {key} if the weights need none of it",
            )


def write_checkpoint(folder: Path | str, *, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors into a folder that holds no checkpoint yet.

    Args:
        folder: Is made if it does not exist.
        config: What JSON can hold.
        tensors: By name; kept bit for bit, dtype and all.

    Raises:
        CheckpointError: The folder holds a config or weights already, or cannot be written.
    """
    folder = Path(folder)
    taken = [path for path in (folder / CONFIG, folder / WEIGHTS, folder / INDEX) if path.exists()]
    if taken:
        raise CheckpointError(
            got=f"{taken[0]} exists", expected="a folder without a model", do="name another"
        )
    prefix = f"{PARTIAL}{secrets.token_hex(4)}-"
    partial = {name: folder / (prefix + name) for name in (WEIGHTS, CONFIG)}
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Transformers reads a file only if it says that it is PyTorch's.
            save_file(stored, partial[WEIGHTS], metadata={"format": "pt"})
            partial[CONFIG].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name, path in partial.items():
                sync(path)
                path.replace(folder / name)
            sync(folder)
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from error


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    """Reads the headers of all shards, which hold what the index says and nothing else."""
    listed = _json_object(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(
            got=f"{folder / INDEX} without weight_map",
            expected='"weight_map": {"name of a tensor": "name of its file", ...}',
            do="copy the index again",
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted({_file_name(folder, file) for file in listed.values()}):
        for name, stored in _header(folder / shard).items():
            place = listed.get(name, "not listed")
            if place != shard:
                raise CheckpointError(
                    got=f"{folder / shard} with {name}, whose place is {place}",
                    expected=f"every tensor once, in the file that {INDEX} says",
                    do="copy the index and its shards again from the same place",
                )
            tensors[name] = stored
    absent = sorted(listed.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            got=f"{folder / listed[absent[0]]} without {_counted(absent)}",
            expected=f"what {INDEX} says",
            do="copy the index and its shards again from the same place",
        )
    return tensors


def _file_name(folder: Path, file: object) -> str:
    """Returns a shard's name if it is one: a path could lead out of the folder."""
    if not isinstance(file, str) or not file.endswith(".safetensors") or any(mark in file for mark in "/\\:"):
        raise CheckpointError(
            got=f"{folder / INDEX} with a shard {file!r}",
            expected="the name of a .safetensors file in the same folder",
            do="do not load this checkpoint, unless you know why its index points elsewhere",
        )
    return file


def _header(path: Path) -> dict[str, StoredTensor]:
    """Reads a file's header, which must account for every byte of the file."""
    if not path.is_file():
        raise CheckpointError(got=f"no file {path}", expected="weights", do="download the rest")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            return {
                name: StoredTensor(tuple(part.get_shape()), str(part.get_dtype()), path)
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(got=f"no file {path}", expected="a checkpoint's folder", do="check the name")
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            got=f"{path} with {type(data).__name__}", expected="a JSON object", do="copy the file again"
        )
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of its members; JSON would let the last of two with one name win silently."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return result


def _without_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    convert = "a pickle can run any code and is never opened: ask for safetensors, or convert it to them"
    return CheckpointError(
        got=f"{folder} with {_counted(pickles) if pickles else 'no weights'}, and no safetensors",
        expected=f"{WEIGHTS}, or {INDEX} with its shards",
        do=f"{convert} where you trust it" if pickles else "download the rest",
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        got=f"{path}: {error}",
        expected="a whole file",
        do="it is truncated, changed or not readable: copy it again",
    )


def _counted(names: Iterable[str]) -> str:
    """Names the first of several, and counts the others."""
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
