"""Byte-level BPE of other kinds than ours, made on the spot, shared by the tests of tokenizers and corpora."""

import json

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from attention_residuals.data import Tokenizer

TEXTS = [
    "the cat sat on the mat, 12 or 123 cats' hats?\n\n" * 20,
    "héllo ☃ endoftext 🙂🙂 🙂 im_start\n\t x" * 20,
    "a!\n\n\n\n b...\r\n  if x:\n        y = 1\n" * 20,
]
SPECIAL = ["<|im_start|>", "<|endoftext|>", "<|pad|>"]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(behavior, *, invert=False):
    return pre_tokenizers.Split(Regex(LLAMA), behavior=behavior, invert=invert)


def byte_level_step(**options):
    return pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | options))


def sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


def trained(before, *, special=SPECIAL, alphabet=None, normalizer=None, vocab_size=340, **model):
    """A tokenizer of the package, whose special tokens have the first ids."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = before, decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer=trainer)
    return edited(bpe, model=model)


def edited(bpe, *, ids=lambda index: index, model=(), **changes):
    """The same tokenizer with other ids or with changes to its file."""
    content = json.loads(bpe.to_str()) | changes
    content["model"] |= dict(model)
    content["model"]["vocab"] = {piece: ids(index) for piece, index in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        token["id"] = ids(token["id"])
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def with_added(bpe, *tokens, special=()):
    bpe.add_tokens(list(tokens))
    bpe.add_special_tokens(list(special))
    return bpe


SMOL = trained(sequence(pre_tokenizers.Digits(individual_digits=True), byte_level_step()))
FIRST = trained(byte_level_step(), special=SPECIAL[1:2])
GPT2 = edited(FIRST, ids=lambda index: (index - 1) % FIRST.get_vocab_size())
LAST = GPT2.get_vocab_size() - 1
SPACES = [AddedToken("  ", normalized=False), AddedToken("    ", normalized=False), "<think>"]
KINDS = {
    "digits apart, special first": SMOL,
    "special last": GPT2,
    "special in the middle, gaps": edited(SMOL, ids=lambda index: (index + 100) % SMOL.get_vocab_size() * 3),
    "own regex": with_added(
        trained(
            sequence(split("isolated"), byte_level_step(use_regex=False)), special=[], ignore_merges=True
        ),
        special=SPECIAL,
    ),
    "regex that keeps": trained(sequence(split("removed", invert=True), byte_level_step(use_regex=False))),
    "steps after the bytes": trained(
        sequence(pre_tokenizers.Punctuation(), byte_level_step(), pre_tokenizers.Digits())
    ),
    "no words": trained(byte_level_step(use_regex=False)),
    "spaces added": with_added(trained(byte_level_step()), *SPACES),
}
NFC = with_added(trained(byte_level_step(), normalizer=normalizers.NFC()), *SPACES[:2])
PREFIXED = trained(byte_level_step(add_prefix_space=True))


def loaded(bpe, folder, **options):
    path = folder / "theirs.json"
    path.write_text(bpe.to_str(), encoding="utf-8")
    return Tokenizer.load(path, **options)
