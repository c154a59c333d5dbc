"""Generation: prompts in, text out as it comes; sequences join and leave the batch as they begin and end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, DataError, is_count
from attention_residuals.inference.cache import KVCache
from attention_residuals.inference.prefill import positions_of, prefill
from attention_residuals.inference.sampling import Sampling, choose
from attention_residuals.inference.text import TextStream
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Tap
from attention_residuals.models import LanguageModel

__all__ = ["Completion", "Engine", "Piece"]


class Piece(NamedTuple):
    """One generated token.

    ``text`` is what became certain with it, which may be nothing or several characters. ``ended`` is None
    while the sequence goes on, else ``"end of text"``, ``"stop string"`` or ``"length"``.
    """

    sequence: int
    token: int
    log_probability: float
    text: str
    ended: str | None


@dataclass(kw_only=True)
class Completion:
    """What was generated for one prompt, so far or in the end.

    ``prompt`` are the ids that ran, the mark before the text included; ``ended`` is None until the end.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    text: str = ""
    ended: str | None = None


class _Sequence(NamedTuple):
    """A sequence in the batch."""

    number: int
    completion: Completion
    stream: TextStream | None


class Engine:
    """Generates with a decoder.

    Args:
        model: Any decoder; is not changed.
        tokenizer: Turns texts into tokens and back; without one, prompts are ids and there is no text.
        residual: Another schedule of the model's residual rule, such as ``TwoPhaseRule``.
        chunk: Tokens of a prompt that are read at once.

    Raises:
        ConfigError: A tokenizer of another size than the model's vocabulary.

    Example:
        >>> from attention_residuals.models import presets
        >>> engine = Engine(Decoder(presets.scaled(2, vocab_size=300)))
        >>> found = engine.generate([[5, 6], [7]], max_new_tokens=3, sampling=Sampling(temperature=0.0))
        >>> [len(completion.tokens) for completion in found], found[0].ended
        ([3, 3], 'length')
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        *,
        residual: ResidualRule[Any] | None = None,
        chunk: int = 2048,
    ) -> None:
        if tokenizer is not None and tokenizer.vocab_size != model.config.vocab_size:
            raise ConfigError(
                got=f"a tokenizer of {tokenizer.vocab_size} ids for a model of {model.config.vocab_size}",
                expected="the tokenizer that the model was trained with",
                do="load tokenizer.json from the folder of the model's run",
            )
        self.model, self.tokenizer, self.residual, self.chunk = model, tokenizer, residual, chunk

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: Sequence[str] = (),
        batch_size: int = 8,
    ) -> list[Completion]:
        """Completes all prompts; those that wait join the batch when others have ended.

        What comes out for a prompt depends on its place among the prompts (which numbers its random
        numbers), and but for rounding not on the others.

        Args:
            prompts: Texts, or ids that run as they are.
            max_new_tokens: For each prompt, 1 or more; a sequence that fills the model's context ends too.
            sampling: How tokens are chosen.
            stop: Generation ends before the first of these strings.
            batch_size: Sequences at once.

        Raises:
            DataError: An empty prompt, or one that fills the context.
            ConfigError: A number out of range, or texts without a tokenizer.
        """
        completions = [Completion(prompt=ids) for ids in self._encoded(prompts)]
        for _ in self._run(completions, max_new_tokens, sampling, stop, batch_size, None):
            pass
        return completions

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: Sequence[str] = (),
        tap: Callable[[], Tap] | None = None,
    ) -> Iterator[Piece]:
        """Yields the completion of one prompt token by token.

        Args:
            prompt: A text, or ids that run as they are.
            max_new_tokens: 1 or more.
            sampling: How tokens are chosen.
            stop: Generation ends before the first of these strings.
            tap: Is called for a tap before each forward pass.

        Raises:
            DataError: An empty prompt, or one that fills the context.
            ConfigError: A number out of range, or a text without a tokenizer.
        """
        completions = [Completion(prompt=ids) for ids in self._encoded([prompt])]
        yield from self._run(completions, max_new_tokens, sampling, stop, 1, tap)

    def _encoded(self, prompts: Sequence[str | Sequence[int]]) -> list[tuple[int, ...]]:
        limit, encoded = self.model.config.max_tokens, []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise ConfigError(
                        got="a text as a prompt, and no tokenizer",
                        expected="a tokenizer, or prompts of token ids",
                        do="make the engine with Engine(model, tokenizer)",
                    )
                ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(prompt).tolist()] if prompt else []
            else:
                ids = [int(token) for token in prompt]
            if not ids:
                raise DataError(
                    got=f"prompt {number} of {len(prompts)}, which is empty",
                    expected="at least one character or token",
                    do="leave it out, or begin with the token that ends a text",
                )
            if len(ids) >= limit:
                raise DataError(
                    got=f"prompt {number} of {len(ids)} tokens",
                    expected=f"fewer than {limit}, the model's context, so that a token can follow",
                    do="cut the prompt, or use a model with a larger max_tokens",
                )
            encoded.append(tuple(ids))
        return encoded

    def _run(
        self,
        completions: list[Completion],
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        batch_size: int,
        tap: Callable[[], Tap] | None,
    ) -> Iterator[Piece]:
        for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if not is_count(value):
                raise ConfigError(got=f"{name}={value!r}", expected="1 or more", do=f"pass a positive {name}")
        if stop and self.tokenizer is None:
            raise ConfigError(got="stop strings, and no tokenizer", expected="a tokenizer", do="pass one")
        waiting = [
            _Sequence(number, completion, TextStream(self.tokenizer, stop) if self.tokenizer else None)
            for number, completion in enumerate(completions)
        ]
        batch = _Batch(self, tap)
        while waiting or batch.sequences:
            free = batch_size - len(batch.sequences)
            if waiting and free:
                batch.join(waiting[:free])
                waiting = waiting[free:]
            elif batch.sequences:
                batch.step()
            yield from batch.choose(sampling, max_new_tokens)


class _Batch:
    """The sequences that are being generated, aligned at their newest tokens."""

    def __init__(self, engine: Engine, tap: Callable[[], Tap] | None) -> None:
        self.engine, self.tap = engine, tap
        self.sequences: list[_Sequence] = []
        self.fresh: list[int] = []
        self.cache = KVCache()
        self.mask = torch.ones(0, 0, dtype=torch.bool)
        self.logits = torch.empty(0)

    def join(self, sequences: list[_Sequence]) -> None:
        """Reads the prompts of new sequences; the next choice is theirs alone."""
        device = next(self.engine.model.parameters()).device
        lengths = [len(sequence.completion.prompt) for sequence in sequences]
        tokens = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
        mask = torch.zeros(len(sequences), max(lengths), dtype=torch.bool)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            tokens[row, -length:] = torch.tensor(sequence.completion.prompt)
            mask[row, -length:] = True
        found = prefill(
            self.engine.model,
            tokens.to(device),
            mask=mask.to(device),
            chunk=self.engine.chunk,
            residual=self.engine.residual,
            tap=self.tap,
        )
        self.fresh = list(range(len(self.sequences), len(self.sequences) + len(sequences)))
        self.sequences += sequences
        self.cache.join(found.cache)
        total = self.cache.num_tokens
        padded = [
            torch.nn.functional.pad(part, (total - part.shape[1], 0))
            for part in (self.mask, mask.to(device))
            if len(part)
        ]
        self.mask = torch.cat(padded)
        self.logits = found.logits

    @torch.no_grad()
    def step(self) -> None:
        """Runs the newest token of every sequence."""
        newest = [sequence.completion.tokens[-1] for sequence in self.sequences]
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)
        self.logits = self.engine.model(
            torch.tensor(newest, device=self.mask.device)[:, None],
            positions=positions_of(self.mask)[:, -1:],
            mask=None if self.mask.all() else self.mask,
            cache=self.cache,
            residual=self.engine.residual,
            tap=None if self.tap is None else self.tap(),
        )[:, -1]
        self.fresh = list(range(len(self.sequences)))

    def choose(self, sampling: Sampling, max_new_tokens: int) -> Iterator[Piece]:
        """Chooses the next token of those that have just run, and lets go of what has ended."""
        chosen = [self.sequences[row] for row in self.fresh]
        choice = choose(
            self.logits,
            sampling,
            seen=[torch.tensor((*one.completion.prompt, *one.completion.tokens)) for one in chosen],
            sequences=[one.number for one in chosen],
            steps=[len(one.completion.tokens) for one in chosen],
        )
        pieces = [
            self._taken(one, int(token), float(log_probability), max_new_tokens)
            for one, token, log_probability in zip(chosen, *choice, strict=True)
        ]
        yield from pieces
        left = [row for row, one in enumerate(self.sequences) if one.completion.ended is None]
        if len(left) < len(self.sequences):
            self._keep(left)

    def _taken(self, one: _Sequence, token: int, log_probability: float, max_new_tokens: int) -> Piece:
        """Adds a token to its sequence."""
        completion, tokenizer = one.completion, self.engine.tokenizer
        completion.tokens.append(token)
        completion.log_probabilities.append(log_probability)
        total = len(completion.prompt) + len(completion.tokens)
        at_end = tokenizer is not None and token == tokenizer.end_of_text
        text = "" if one.stream is None or at_end else one.stream.push(token)
        if one.stream is not None and one.stream.stopped:
            completion.ended = "stop string"
        elif at_end:
            completion.ended = "end of text"
        elif len(completion.tokens) >= max_new_tokens or total >= self.engine.model.config.max_tokens:
            completion.ended = "length"
        if completion.ended is not None and one.stream is not None:
            text += one.stream.finish()
        completion.text += text
        return Piece(one.number, token, log_probability, text, completion.ended)

    def _keep(self, rows: list[int]) -> None:
        self.sequences = [self.sequences[row] for row in rows]
        if not rows:
            self.cache, self.mask = KVCache(), self.mask[:0, :0]
            return
        mask = self.mask[rows]
        start = int(mask.any(0).int().argmax())
        self.cache.keep(rows, start=start)
        self.mask = mask[:, start:]
