"""What a rank keeps of each microbatch between its stages: tensors on the way forward, gradients back."""

from dataclasses import dataclass

from torch import Tensor

from attention_residuals.parallel.plan import Piece

__all__ = ["Store"]


@dataclass
class _Entry:
    """A kept tensor and the account of its gradient."""

    tensor: Tensor
    gradient: Tensor | None = None


class Store:
    """The pieces that a rank has for later stages of its own, by microbatch.

    A piece is kept by the stage that received or made it, read as a leaf without history by later stages,
    whose gradients for it go to its account, and freed when the stage that kept it collects the account.

    Example:
        >>> import torch
        >>> store = Store()
        >>> store.keep(0, Piece(0, 1), torch.ones(2))
        >>> leaf = store.leaf(0, Piece(0, 1), needs_gradient=True)
        >>> store.deposit(0, Piece(0, 1), torch.tensor([1.0, 2.0]))
        >>> store.collect(0, Piece(0, 1)), len(store), store.most
        (tensor([1., 2.]), 0, 1)
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Piece], _Entry] = {}
        self.most = 0
        """The most pieces held at once, since this was last set to 0."""

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, microbatch: int, piece: Piece, tensor: Tensor) -> None:
        """Keeps a tensor, without its history."""
        assert (microbatch, piece) not in self._entries, f"{piece} of microbatch {microbatch} is kept twice"
        self._entries[microbatch, piece] = _Entry(tensor.detach())
        self.most = max(self.most, len(self))

    def leaf(self, microbatch: int, piece: Piece, *, needs_gradient: bool) -> Tensor:
        """Returns the kept tensor as the start of another graph."""
        return self._entries[microbatch, piece].tensor.detach().requires_grad_(needs_gradient)

    def deposit(self, microbatch: int, piece: Piece, gradient: Tensor | None) -> None:
        """Adds to the account of a piece; the gradient may be shared with others, so it is not changed."""
        entry = self._entries[microbatch, piece]
        if gradient is not None:
            entry.gradient = gradient if entry.gradient is None else entry.gradient + gradient

    def collect(self, microbatch: int, piece: Piece) -> Tensor | None:
        """Frees a piece and returns its account; None when no later stage has a gradient for it."""
        return self._entries.pop((microbatch, piece)).gradient

    def free(self, microbatch: int, piece: Piece) -> None:
        """Frees a piece that no backward follows."""
        del self._entries[microbatch, piece]

    def clear(self) -> None:
        """Frees everything, after an error."""
        self._entries.clear()
