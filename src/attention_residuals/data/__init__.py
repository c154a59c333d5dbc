r"""Text into batches: sources of documents, a byte-level tokenizer, prepared corpora, and an order of data.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = Path(place, "tale.txt").write_text("\n\n".join(f"Once, {n} ducks swam." for n in range(99)))
    ...     corpus = prepare(
    ...         TextFiles(path=f"{place}/tale.txt", separator="\n\n"),
    ...         f"{place}/corpus",
    ...         vocab_size=300,
    ...         valid_fraction=0.2,
    ...     )
    ...     batches = Batches(corpus.train, sequence_length=16, batch_size=4, seed=0)
    ...     print(tuple(batches.at(step=7).tokens_BT.shape))
    (4, 16)
"""

from attention_residuals.data.batches import Batch, Batches, sequential
from attention_residuals.data.corpus import Corpus
from attention_residuals.data.preparation import corpus_options, prepare
from attention_residuals.data.sources import (
    SOURCES,
    Document,
    HuggingFaceDataset,
    Shakespeare,
    StandardLibrary,
    TextFiles,
    TextSource,
)
from attention_residuals.data.synthetic import (
    BindingDocuments,
    BindingItems,
    Item,
    Lesson,
    ReasoningGym,
    StepDocuments,
    StepItems,
    step_tokenizer,
)
from attention_residuals.data.tokenizer import Tokenizer, bits_per_byte

__all__ = [
    "SOURCES",
    "Batch",
    "Batches",
    "BindingDocuments",
    "BindingItems",
    "Corpus",
    "Document",
    "HuggingFaceDataset",
    "Item",
    "Lesson",
    "ReasoningGym",
    "Shakespeare",
    "StandardLibrary",
    "StepDocuments",
    "StepItems",
    "TextFiles",
    "TextSource",
    "Tokenizer",
    "bits_per_byte",
    "corpus_options",
    "prepare",
    "sequential",
    "step_tokenizer",
]
