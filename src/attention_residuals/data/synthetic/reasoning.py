"""Tasks of the optional package ``reasoning-gym``, as a source of texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attention_residuals.data.sources import Document
from attention_residuals.errors import ConfigError, DataError, is_count

__all__ = ["ReasoningGym"]


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """Questions with answers from one of the tasks of ``reasoning-gym``.

    They are single problems without matched twins: more text of the kind to train on, or a check outside of
    the generated items. Their words are not those of ``step_tokenizer``; ``prepare`` trains a tokenizer.

    Args:
        task: Name of a task, such as ``"chain_sum"``.
        num_documents: How many, >= 1.
        seed: >= 0.

    Raises:
        ConfigError: No task, or no documents.

    Source:
        Reasoning Gym (arXiv:2505.24760).

    Example:
        >>> ReasoningGym(task="chain_sum", num_documents=10).licence
        'Apache-2.0'
    """

    name: ClassVar[str] = "reasoning-gym"
    licence: ClassVar[str] = "Apache-2.0"

    task: str
    num_documents: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.task:
            raise ConfigError(got="task=''", expected="the name of a task", do="pass task='chain_sum'")
        if not is_count(self.num_documents):
            raise ConfigError(
                got=f"num_documents={self.num_documents}", expected="1 or more", do="pass 10_000"
            )

    def documents(self) -> Iterator[Document]:
        """Yields one document for each question: the question, a line break, the answer.

        Raises:
            DataError: The package ``reasoning-gym`` is missing, or has no such task.
        """
        try:
            import reasoning_gym
        except ModuleNotFoundError as error:
            raise DataError(
                got="no package 'reasoning-gym'",
                expected="the optional package that makes its tasks",
                do="pip install 'attention-residuals[reasoning]', or use StepDocuments, which needs nothing",
            ) from error
        try:
            tasks = reasoning_gym.create_dataset(self.task, size=self.num_documents, seed=self.seed)
        except ValueError as error:
            raise DataError(
                got=f"task={self.task!r} ({error})",
                expected="a task that reasoning-gym has",
                do="list them: sorted(reasoning_gym.factory.DATASETS)",
            ) from error
        for entry in tasks:
            yield Document(self.task, f"{entry['question']}\n{entry['answer']}")
