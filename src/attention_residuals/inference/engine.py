"""Generation: prompts in, text out as it comes; sequences join and leave the batch as they begin and end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, is_count
from attention_residuals.inference.cache import KVCache
from attention_residuals.inference.prefill import checked_schedule, positions_of, prefill
from attention_residuals.inference.prompts import encoded_prompts
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
    """Generates with a language model.

    Args:
        model: Any language model; is not changed.
        tokenizer: Turns texts into tokens and back; without one, prompts are ids and there is no text.
        residual: Another schedule of the model's own rule, such as ``TwoPhaseRule(model.residual)``.
        chunk: Tokens of a prompt that are read at once.

    Raises:
        ConfigError: A tokenizer of another size than the model's vocabulary, the rule of another model, or a
            chunk below 1.

    Example:
        >>> from attention_residuals.models import Decoder, presets
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
        if not is_count(chunk):
            raise ConfigError(got=f"chunk={chunk!r}", expected="1 or more tokens", do="2048 is usual")
        checked_schedule(model, residual)
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
            prompts: Texts, which run behind the token that ends a text, or ids, which run as they are. An
                empty text is a new one.
            max_new_tokens: For each prompt, 1 or more; a sequence that fills the model's context ends too.
            sampling: How tokens are chosen.
            stop: Generation ends before the first of these strings.
            batch_size: Sequences at once.

        Raises:
            DataError: No list of prompts, or one of them is no prompt, has no token or fills the context.
            ConfigError: A number out of range, or texts without a tokenizer.
        """
        self._require(max_new_tokens, batch_size, stop)
        sequences = self._sequences(prompts, stop)
        for _ in self._run(sequences, max_new_tokens, sampling, batch_size, None):
            pass
        return [sequence.completion for sequence in sequences]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: Sequence[str] = (),
        tap: Callable[[], Tap] | None = None,
    ) -> Iterator[Piece]:
        """Yields the completion of one prompt token by token; what is wrong with the request is told at once.

        Args:
            prompt: A text, which runs behind the token that ends a text, or ids, which run as they are.
            max_new_tokens: 1 or more.
            sampling: How tokens are chosen.
            stop: Generation ends before the first of these strings.
            tap: Is called for a tap before each forward pass.

        Raises:
            DataError: No prompt, one without a token, or one that fills the context.
            ConfigError: A number out of range, or a text without a tokenizer.
        """
        self._require(max_new_tokens, 1, stop)
        return self._run(self._sequences([prompt], stop), max_new_tokens, sampling, 1, tap)

    def _require(self, max_new_tokens: int, batch_size: int, stop: Sequence[str]) -> None:
        for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if not is_count(value):
                raise ConfigError(got=f"{name}={value!r}", expected="1 or more", do=f"pass a positive {name}")
        if stop and self.tokenizer is None:
            raise ConfigError(got="stop strings, and no tokenizer", expected="a tokenizer", do="pass one")

    def _sequences(self, prompts: Any, stop: Sequence[str]) -> list[_Sequence]:
        config = self.model.config
        encoded = encoded_prompts(
            prompts, self.tokenizer, vocab_size=config.vocab_size, max_tokens=config.max_tokens
        )
        return [
            _Sequence(
                number,
                Completion(prompt=ids),
                None if self.tokenizer is None else TextStream(self.tokenizer, stop),
            )
            for number, ids in enumerate(encoded)
        ]

    def _run(
        self,
        waiting: list[_Sequence],
        max_new_tokens: int,
        sampling: Sampling,
        batch_size: int,
        tap: Callable[[], Tap] | None,
    ) -> Iterator[Piece]:
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
        self.logits = found.logits

    @torch.no_grad()
    def step(self) -> None:
        """Runs the newest token of every sequence."""
        newest = [sequence.completion.tokens[-1] for sequence in self.sequences]
        mask = self.cache.mask(1)
        self.logits = self.engine.model(
            torch.tensor(newest, device=mask.device)[:, None],
            positions=positions_of(mask)[:, -1:],
            mask=mask if any(self.cache.padding) else None,
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
            if one.stream.stopped:  # by the replacement of half a character
                completion.ended = "stop string"
        completion.text += text
        return Piece(one.number, token, log_probability, text, completion.ended)

    def _keep(self, rows: list[int]) -> None:
        self.sequences = [self.sequences[row] for row in rows]
        if rows:
            self.cache.keep(rows, start=min(self.cache.padding[row] for row in rows))
        else:
            self.cache = KVCache()
