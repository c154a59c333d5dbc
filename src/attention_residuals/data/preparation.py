"""From a source of text to a corpus in a folder, which appears complete or not at all."""

import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attention_residuals.data.corpus import SCORED_VERSION, SPLITS, VERSION, Corpus, sha256
from attention_residuals.data.scored import check_ranges, scored_tokens
from attention_residuals.data.sources import Document, TextSource
from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.durable import advice
from attention_residuals.errors import ConfigError, DataError

__all__ = ["corpus_options", "prepare"]

Records = list[dict[str, Any]]
Documents = dict[str, list[Document]]

_ENCODED_AT_ONCE = 64  # documents: enough for every core, few enough to hold their tokens


def prepare(
    source: TextSource,
    folder: str | Path,
    *,
    vocab_size: int | None = None,
    valid_fraction: float = 0.05,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    r"""Turns a source of text into a corpus in a folder, or opens the folder if that was done before.

    The tokenizer learns from the training split only. Which split a document goes to depends on its name and
    text alone, so documents that come or go later move no other document. Documents without text are left
    out and counted in the manifest.

    Args:
        source: Where the text comes from; its documents are held in memory.
        folder: Where the corpus goes. A folder prepared from the same documents with the same options is
            used as it is; any other existing folder is refused.
        vocab_size: Number of token ids to train the tokenizer for, >= 257; default 4096.
        valid_fraction: Share of documents that go to validation, between 0 and 1.
        tokenizer: A tokenizer to use instead of training one; then vocab_size must not be given.

    Returns:
        The corpus, opened.

    Raises:
        ConfigError: An option is out of range, or the folder holds something else.
        DataError: There is no text, a split is empty, the folder is damaged or cannot be written.

    Example:
        >>> import tempfile
        >>> from attention_residuals.data import TextFiles
        >>> with tempfile.TemporaryDirectory() as place:
        ...     _ = Path(place, "poem.txt").write_text("\n".join(f"line {n}" for n in range(200)))
        ...     source = TextFiles(path=f"{place}/poem.txt", separator="\n")
        ...     corpus = prepare(source, f"{place}/corpus", vocab_size=260)
        ...     print({split: about["documents"] for split, about in corpus.manifest["splits"].items()})
        {'train': 191, 'valid': 9}
    """
    folder = Path(folder).absolute()
    options = corpus_options(vocab_size, valid_fraction, tokenizer)
    records, documents, num_empty = _read(source, valid_fraction)
    if _is_free(folder):
        texts = (document.text for document in documents["train"])
        tokenizer = tokenizer or Tokenizer.train(texts, options["vocab_size"])
        about = {"name": source.name, "licence": source.licence, "config": _config(source)}
        has_ranges = any(document.scored is not None for split in SPLITS for document in documents[split])
        version = SCORED_VERSION if has_ranges else VERSION
        manifest = {"version": version, "source": about, "options": options, "empty_documents": num_empty}
        _write(folder, manifest, records, documents, tokenizer)
    if not (folder / "manifest.json").exists():
        raise ConfigError(
            got=f"{folder}, which exists and is not a prepared corpus",
            expected="a new or empty folder, or one that prepare wrote",
            do="name another folder",
        )
    corpus = Corpus.load(folder)
    _check_same(corpus, options, records)
    corpus.verify()
    return corpus


def corpus_options(
    vocab_size: int | None, valid_fraction: float, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns what a corpus remembers of how it was prepared; see ``prepare``.

    Raises:
        ConfigError: An option is out of range, or two contradict each other.
    """
    if not 0 < valid_fraction < 1:
        raise ConfigError(
            got=f"valid_fraction={valid_fraction}", expected="0 < valid_fraction < 1", do="pass 0.05"
        )
    if tokenizer is None:
        return {"vocab_size": 4096 if vocab_size is None else vocab_size, "valid_fraction": valid_fraction}
    if vocab_size is not None:
        raise ConfigError(
            got=f"vocab_size={vocab_size} and a tokenizer",
            expected="one of them: a tokenizer brings its own vocabulary",
            do="leave out vocab_size, or leave out the tokenizer to have one trained",
        )
    return {"tokenizer": sha256(tokenizer.definition.encode()), "valid_fraction": valid_fraction}


def _read(source: TextSource, valid_fraction: float) -> tuple[Records, Documents, int]:
    """Reads everything once: a record for each document, those of each split, the number without text."""
    records: Records = []
    documents: Documents = {split: [] for split in SPLITS}
    num_empty = 0
    for document in source.documents():
        if not document.text:
            num_empty += 1
            continue
        record = _record(document, valid_fraction)
        records.append(record)
        documents[record["split"]].append(document)
    if not records:
        raise DataError(
            got=f"{num_empty} document(s), none with text, from source {source.name!r}",
            expected="at least two documents with text",
            do="check what the source's documents() yields",
        )
    for split in SPLITS:
        if not documents[split]:
            raise DataError(
                got=f"no document in split {split!r} of {len(records)} document(s) from {source.name!r}",
                expected=f"a document in each split at valid_fraction={valid_fraction}",
                do="add documents, change valid_fraction, or have files cut into documents by a separator, "
                "such as an empty line",
            )
    return records, documents, num_empty


def _record(document: Document, valid_fraction: float) -> dict[str, Any]:
    try:
        raw = document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            got=f"document {document.name!r} with half a surrogate pair at character {error.start}",
            expected="text that UTF-8 can hold",
            do="repair it: text.encode('utf-8', errors='replace').decode()",
        ) from error
    # A file's name may hold bytes that are not UTF-8, which Python writes as surrogates.
    name = document.name.encode("utf-8", errors="surrogatepass")
    place = int(sha256(name + b"\0" + raw)[:8], 16) / 16**8
    split = "valid" if place < valid_fraction else "train"
    record = {"name": document.name, "sha256": sha256(raw), "split": split, "bytes": len(raw)}
    if document.scored is not None:
        check_ranges(document)
        record["scored"] = sha256(repr(document.scored).encode())
    return record


def _config(source: TextSource) -> dict[str, Any]:
    return dataclasses.asdict(source) if dataclasses.is_dataclass(source) else {}


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _write(
    folder: Path, manifest: dict[str, Any], records: Records, documents: Documents, tokenizer: Tokenizer
) -> None:
    """Writes into a folder beside the wanted one, then gives it its name."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    tokenizer_json = tokenizer.to_json().encode()
    try:
        partial.mkdir(parents=True)
        splits = {}
        for split in SPLITS:
            counts = _write_tokens(partial / f"{split}.bin", documents[split], tokenizer, dtype)
            num_bytes = sum(record["bytes"] for record in records if record["split"] == split)
            splits[split] = {"documents": len(documents[split]), "bytes": num_bytes, **counts}
            if manifest["version"] == SCORED_VERSION:
                splits[split] |= _write_scored(partial / f"{split}.scored.bin", documents[split], tokenizer)
        manifest = manifest | {
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_sha256": sha256(tokenizer_json),
            "splits": splits,
            "documents": records,
        }
        _write_chunks(partial / "tokenizer.json", [tokenizer_json])
        _write_chunks(partial / "manifest.json", [json.dumps(manifest, indent=1).encode()])
        _sync_folder(partial)
        _rename(partial, folder)
    except OSError as error:
        expected, do = advice(error)
        raise DataError(
            got=f"{folder} could not be written: {error}",
            expected=f"{expected}, with about 7 bytes per 10 bytes of text",
            do=f"{do}; nothing half-written was left behind",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if _is_free(folder):
            raise
        # Another process was first: its folder stays, and prepare compares it with what was asked for.
    _sync_folder(folder.parent)


def _write_tokens(path: Path, documents: list[Document], tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    num_tokens, digest = 0, hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        nonlocal num_tokens
        for _, ids in _encoded(documents, tokenizer):
            chunk = np.insert(ids, 0, tokenizer.end_of_text).astype(dtype).tobytes()
            num_tokens += len(ids) + 1
            digest.update(chunk)
            yield chunk

    _write_chunks(path, chunks())
    return {"tokens": num_tokens, "sha256": digest.hexdigest()}


def _write_scored(path: Path, documents: list[Document], tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes one byte for each token: whether it counts in the loss."""
    num_scored, digest = 0, hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        nonlocal num_scored
        for document, ids in _encoded(documents, tokenizer):
            scored = scored_tokens(document, ids, tokenizer)
            num_scored += int(scored.sum())
            digest.update(scored.tobytes())
            yield scored.tobytes()

    _write_chunks(path, chunks())
    return {"scored": num_scored, "scored_sha256": digest.hexdigest()}


def _encoded(
    documents: list[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, npt.NDArray[np.int64]]]:
    for first in range(0, len(documents), _ENCODED_AT_ONCE):
        some = documents[first : first + _ENCODED_AT_ONCE]
        yield from zip(some, tokenizer.encode_batch([document.text for document in some]), strict=True)


def _write_chunks(path: Path, chunks: Iterable[bytes]) -> None:
    with path.open("xb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlast a power cut."""
    if os.name == "nt":  # pragma: no cover  Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_same(corpus: Corpus, options: dict[str, Any], records: Records) -> None:
    old_options, old_records = corpus.manifest["options"], corpus.manifest["documents"]
    differing = [
        f"{name}={options.get(name)!r} (there: {old_options.get(name)!r})"
        for name in sorted(options.keys() | old_options.keys())
        if options.get(name) != old_options.get(name)
    ]
    if records != old_records:
        new = {(record["name"], record["sha256"]) for record in records}
        same = len(new & {(record["name"], record["sha256"]) for record in old_records})
        differing.append(f"{len(records)} documents (there: {len(old_records)}, {same} of them the same)")
    if differing:
        raise ConfigError(
            got=f"{corpus.folder}, prepared otherwise: {'; '.join(differing)}",
            expected="a new folder, or one prepared from the same documents with the same options",
            do="name another folder, or delete this one",
        )
