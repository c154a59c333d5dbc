"""Tuned lenses: a lens with a translator for each site, trained to say what the model will say in the end."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from attention_residuals.configs import decode, encode
from attention_residuals.durable import unwritable, write_bytes
from attention_residuals.errors import CheckpointError, ConfigError, is_finite
from attention_residuals.models import LanguageModel
from attention_residuals.models.weights import fingerprint, load_tensors, read_json
from attention_residuals.ops.depth_read import compute_dtype
from attention_residuals.trace.lenses import Lens, LensReading, Looking, SourceLens, lens_through

__all__ = ["TunedLens", "tune_lens"]

FORMAT = 1
"""Of lens.json; raised when an older version of this package could not read it."""


@dataclass(frozen=True, kw_only=True)
class TunedLens:
    """A lens that reads each site through an affine map of its own: x + A x + b.

    Args:
        target: What it looks at.
        sites: Where, in the order of the model.
        matrices: A of each site; 0 is the plain lens.
        biases: b of each site.
        model: The fingerprint of the one model that it is for.
    """

    target: Lens
    sites: tuple[str, ...]
    matrices: Float[Tensor, "R D D"]
    biases: Float[Tensor, "R D"]
    model: str

    def read(
        self,
        model: LanguageModel,
        tokens: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"] | None = None,
        *,
        num_top: int = 5,
    ) -> LensReading:
        """Looks at what the model would predict at each site, in the words of its end.

        Args:
            model: The one that the lens was tuned for.
            tokens: What it reads.
            mask: True for real tokens.
            num_top: How many of the likeliest tokens to keep, 1 to V.

        Raises:
            ConfigError: Another model.
        """
        found = fingerprint(model)
        if found != self.model:
            raise ConfigError(
                got=f"a model with the fingerprint {found[:12]}",
                expected=f"{self.model[:12]}, the one that this lens was tuned for",
                do="tune a lens for this model with tune_lens",
            )
        return lens_through(model, tokens, self.target, self._translated, mask=mask, num_top=num_top)

    def save(self, folder: Path | str) -> None:
        """Writes lens.json and lens.safetensors into a folder that holds no lens yet.

        Raises:
            CheckpointError: There is a lens already, or the folder cannot be written.
        """
        folder = Path(folder)
        if (folder / "lens.json").exists():
            raise CheckpointError(
                got=f"{folder} holds a lens", expected="a folder without one", do="name another folder"
            )
        description = {"format": FORMAT, "target": encode(self.target), "sites": self.sites,
                       "width": self.biases.shape[1], "model": self.model}  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = save({"matrices": self.matrices.contiguous(), "biases": self.biases.contiguous()})
            write_bytes(folder / "lens.safetensors", content)
            whole = {**description, "sha256": hashlib.sha256(content).hexdigest()}
            # Last, since it is what makes the folder a lens.
            write_bytes(folder / "lens.json", (json.dumps(whole, indent=1) + "\n").encode())
        except (OSError, SafetensorError) as error:
            raise unwritable(folder, error) from error

    @classmethod
    def load(cls, folder: Path | str, model: LanguageModel) -> "TunedLens":
        """Reads a lens back, with the same bits.

        Args:
            folder: Where it was saved.
            model: The one that it was tuned for.

        Raises:
            CheckpointError: A file is missing, damaged or of a newer format, or the lens is another model's.
        """
        path = Path(folder) / "lens.json"
        description = read_json(path, newest=FORMAT)
        tensors = load_tensors(path.with_suffix(".safetensors"), sha256_expected=description.get("sha256"))
        sites, width = description.get("sites"), description.get("width")
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if not isinstance(sites, list) or shapes != {
            "matrices": [len(sites), width, width],
            "biases": [len(sites), width],
        }:
            raise CheckpointError(
                got=f"{path} of {sites!r} and width {width!r} for tensors {shapes}",
                expected="a matrix and a bias for each site",
                do="copy both files again, or tune the lens again",
            )
        found = fingerprint(model)
        if description.get("model") != found:
            raise CheckpointError(
                got=f"{path} for a model with the fingerprint {str(description.get('model'))[:12]}",
                expected=f"one for this model, {found[:12]}",
                do="load the model that the lens was tuned for, or tune another lens with tune_lens",
            )
        place = next(model.parameters()).device
        return cls(
            target=_target_of(description.get("target"), path),
            sites=tuple(sites),
            matrices=tensors["matrices"].to(place),
            biases=tensors["biases"].to(place),
            model=found,
        )

    def _translated(self, site: str, state: Tensor) -> Tensor:
        number = self.sites.index(site)
        return _translate(state, self.matrices[number], self.biases[number])


def tune_lens(
    model: LanguageModel,
    batches: Sequence[Int[Tensor, "B T"]],
    *,
    target: Lens = "state",
    num_steps: int,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> TunedLens:
    """Trains a translator for each site to minimise KL(model's own prediction || lens's prediction).

    A plain lens misreads what is there in other directions than the head's; a tuned one asks what an affine
    map could make of it. Test it on texts that it was not tuned on.

    Args:
        model: Any language model; its parameters and their gradients stay as they are.
        batches: Texts without padding, taken in an order that is drawn anew each time they are through.
        target: What is looked at, as for ``lens``; a tuned lens is for one target.
        num_steps: One batch each, 0 or more; 0 gives the plain lens.
        learning_rate: Of Adam, above 0.
        seed: Of the order of the batches.

    Raises:
        ConfigError: An unknown target or source, no batches, or a number out of range.

    Source:
        Belrose et al., "Eliciting Latent Predictions from Transformers with the Tuned Lens"
        (arXiv:2303.08112), for models with a stream.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model, tokens = Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]])
        >>> tuned = tune_lens(model, [tokens], num_steps=3)
        >>> tuned.sites[-1], tuned.read(model, tokens).divergences.shape
        ('output', torch.Size([5, 1, 3]))
    """
    _require_usable(batches, num_steps, learning_rate)
    final, look = _looked(model, batches[0], target)
    state = look.states[0]
    dtype, width = compute_dtype(state.dtype), state.shape[-1]
    matrices = [state.new_zeros((width, width), dtype=dtype).requires_grad_() for _ in look.sites]
    biases = [state.new_zeros(width, dtype=dtype).requires_grad_() for _ in look.sites]
    # At the output there is nothing to learn: eps keeps Adam from making steps of its rounding errors.
    trainer = torch.optim.Adam([*matrices, *biases], lr=learning_rate, eps=1e-5)
    for number in _order(len(batches), num_steps, seed):
        final, look = _looked(model, batches[number], target)
        for state, matrix, bias in zip(look.states, matrices, biases, strict=True):
            # Site by site, so that no more than one site's logits are there at a time.
            with torch.enable_grad():
                predicted = _log_probabilities(model.unembed(_translate(state, matrix, bias)))
                loss = (final.exp() * (final - predicted)).sum(-1).mean()
                matrix.grad, bias.grad = torch.autograd.grad(loss, [matrix, bias])
        trainer.step()
    return TunedLens(
        target=target,
        sites=tuple(look.sites),
        matrices=torch.stack(matrices).detach(),
        biases=torch.stack(biases).detach(),
        model=fingerprint(model),
    )


def _translate(state: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    wide = state.to(matrix.dtype)
    return (wide + F.linear(wide, matrix, bias)).to(state.dtype)


@torch.no_grad()
def _looked(model: LanguageModel, tokens: Tensor, target: Lens) -> tuple[Tensor, Looking]:
    look = Looking(model, target)
    final = _log_probabilities(model(tokens, tap=look))
    look.require_found()
    return final, look


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(compute_dtype(logits.dtype)).log_softmax(-1)


def _order(count: int, num_steps: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        if step % count == 0:
            order = torch.randperm(count, generator=generator).tolist()
        yield order[step % count]


def _require_usable(batches: Sequence[Tensor], num_steps: int, learning_rate: float) -> None:
    if not batches:
        raise ConfigError(got="no batches", expected="one or more", do="pass a list of tokens [B, T]")
    if isinstance(num_steps, bool) or num_steps < 0:
        raise ConfigError(got=f"num_steps={num_steps!r}", expected="0 or more", do="pass 500 for a start")
    if not is_finite(learning_rate) or learning_rate <= 0:
        raise ConfigError(
            got=f"learning_rate={learning_rate!r}", expected="a number > 0", do="leave it out for the default"
        )


def _target_of(described: object, path: Path) -> Lens:
    target = decode(described, {"SourceLens": SourceLens})
    if not isinstance(target, (str, SourceLens)):
        raise CheckpointError(
            got=f"{path} with target {described!r}", expected="what a lens looks at", do="copy the file again"
        )
    return target
