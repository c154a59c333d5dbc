"""Step-by-step texts with exact ground truth, and items that plant one contradicting step in them.

Example:
    >>> items = StepItems(family="arithmetic", template="sums", distance=1, num_steps=2)
    >>> item = items.item(0)
    >>> for planted in range(2):
    ...     print(items.text(item.ids[0, planted]))
    s is 16 . q is 18 . v is q plus 2 so v is 20 indeed . b is v plus 2 . check unsaid . so b is 22 .
    s is 16 . q is 18 . v is q plus 2 so v is 22 indeed . b is v plus 2 . check unsaid . so b is 22 .
"""

from attention_residuals.data.synthetic.binding import (
    BindingDocuments,
    BindingItem,
    BindingItems,
    binding_tokenizer,
)
from attention_residuals.data.synthetic.documents import StepDocuments
from attention_residuals.data.synthetic.families import FAMILIES
from attention_residuals.data.synthetic.items import Item, StepItems, step_tokenizer
from attention_residuals.data.synthetic.lessons import Lesson
from attention_residuals.data.synthetic.problems import KINDS
from attention_residuals.data.synthetic.reasoning import ReasoningGym
from attention_residuals.data.synthetic.stories import CLAIM_PLACES
from attention_residuals.data.synthetic.words import REMARKS, VERDICTS, word_tokenizer

__all__ = [
    "CLAIM_PLACES",
    "FAMILIES",
    "KINDS",
    "REMARKS",
    "VERDICTS",
    "BindingDocuments",
    "BindingItem",
    "BindingItems",
    "Item",
    "Lesson",
    "ReasoningGym",
    "StepDocuments",
    "StepItems",
    "binding_tokenizer",
    "step_tokenizer",
    "word_tokenizer",
]
