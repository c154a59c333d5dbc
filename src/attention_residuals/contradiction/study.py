"""What the planted-contradiction study trains and measures, as one frozen config."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from attention_residuals.configs import decode
from attention_residuals.data.synthetic import (
    FAMILIES,
    Item,
    Lesson,
    StepDocuments,
    StepItems,
    step_tokenizer,
)
from attention_residuals.data.synthetic.problems import Split
from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.models import DecoderConfig
from attention_residuals.train import TRAIN_CONFIGS, Cosine, Muon, TrainConfig

__all__ = ["ARMS", "ITEM_SETS", "STUDY_CONFIGS", "Study", "cluster_of", "digest", "least_items", "study_of"]

ARMS = ("block", "full", "standard")
"""The models that are trained, one of each for every seed."""

ITEM_SETS: dict[str, dict[str, Any]] = {
    "main": {},
    "distance 1": {"distance": 1},
    "distance 3": {"distance": 3},
    "copied": {"kind": "copied"},
    "copied, distance 1": {"kind": "copied", "distance": 1},
    "copied, distance 3": {"kind": "copied", "distance": 3},
    "irrelevant": {"kind": "irrelevant"},
    "corrected": {"kind": "corrected"},
    "held out": {},
}
"""What each set of items has that the main one has not; "held out" is told in templates that nobody trained on."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that decides the study, but for what the preregistration adds.

    Args:
        train: How a Block model is trained; the others differ in their residual rule and seed only.
        documents: The training texts.
        seeds: Of the models, each trained independently; 3 or more are wanted.
        num_steps: Statements before the claim of an item, 3 or more.
        pilot_items: Of the pilot, 16 or more; families take turns.
        confirm_items: The least number of the confirming run; the preregistration may ask for more.
        control_items: Of each set of items beside the main one, 16 or more.
        causal_items: On which routes are patched, 16 or more.
        num_routes: Routes that the pilot chooses, 1 or more.
        num_random: Random routes of the same mass for each of those sets, 1 or more.
        num_draws: Sign flips and bootstrap resamples, 1 or more; 10,000 for a report.

    Raises:
        ConfigError: A number out of range, no seed, a seed twice, or a model that is no Block one.

    Example:
        >>> Study().train.model.num_layers
        12
    """

    train: TrainConfig = field(default_factory=lambda: _recipe())
    documents: StepDocuments = field(
        default_factory=lambda: StepDocuments(
            num_documents=195_000,
            course=(
                Lesson(num_documents=36_000, echoes=0.5, pairs=0.5),
                Lesson(num_documents=20_000, echoes=1 / 3, lists=2 / 3),
                Lesson(num_documents=44_000, matches=0.2, graded_pairs=0.5, lists=0.15),
                Lesson(graded_pairs=0.1, lists=0.35),
            ),
            inconsistent_share=0.5,
            max_steps=3,
            num_values=12,
            max_move=2,
        )
    )
    seeds: tuple[int, ...] = (0, 1, 2)
    num_steps: int = 3
    pilot_items: int = 100
    confirm_items: int = 400
    control_items: int = 200
    causal_items: int = 96
    num_routes: int = 8
    num_random: int = 10
    num_draws: int = 10_000

    def __post_init__(self) -> None:
        least = {
            "num_steps": 3,
            "pilot_items": 16,
            "confirm_items": 16,
            "control_items": 16,
            "causal_items": 16,
        }
        for name, number in {**least, "num_routes": 1, "num_random": 1, "num_draws": 1}.items():
            value = getattr(self, name)
            if not is_count(value) or value < number:
                raise ConfigError(
                    got=f"{name}={value!r}", expected=f"{number} or more", do=f"pass {name}={number}"
                )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(
                got=f"seeds={self.seeds}", expected="one or more, each once", do="pass (0, 1, 2)"
            )
        rule, model = self.train.model.residual, self.train.model
        is_block = isinstance(rule, AttnRes) and rule.sublayers_per_block > 1
        if not is_block or not isinstance(model, DecoderConfig) or model.num_layers < 3:
            raise ConfigError(
                got=f"a model with {rule}, {getattr(model, 'num_layers', '?')} layers",
                expected="a Decoder of 3 layers or more with AttnRes of 2 sublayers per block or more",
                do="the Full and the standard model are made from the Block one",
            )

    def train_config(self, arm: str, seed: int) -> TrainConfig:
        """Makes the config of one run.

        Args:
            arm: One of ``ARMS``.
            seed: Of the weights and the order of the data.
        """
        model = self.train.model
        block = model.residual
        assert isinstance(model, DecoderConfig)
        assert isinstance(block, AttnRes)
        rules: dict[str, ResidualConfig] = {
            "block": block,
            "full": replace(block, sublayers_per_block=1),
            "standard": StandardResidual(),
        }
        return replace(self.train, model=replace(model, residual=rules[arm]), seed=seed)

    def items(self, split: Split, name: str, number: int) -> tuple[Item, ...]:
        """Makes the items of a set; families, and where it matters templates, take turns.

        The same number in another set tells the same problem, so that sets compare item by item.

        Args:
            split: ``pilot`` or ``confirm``.
            name: One of ``ITEM_SETS``.
            number: At least so many; a whole number of turns is made.
        """
        texts = self.documents
        hardness = {"num_values": texts.num_values, "max_move": texts.max_move}
        options: dict[str, Any] = {"split": split, **hardness, **ITEM_SETS[name]}
        families = texts.families
        told: list[Item] = []
        for index, family in product(range(-(-number // len(families))), families):
            held = [template.name for template in FAMILIES[family].templates if template.held_out]
            template = held[index % len(held)] if name == "held out" else None
            source = StepItems(family=family, num_steps=self.num_steps, template=template, **options)
            told.append(source.item(index))
        return tuple(told)


def cluster_of(item: Item) -> str:
    """Names the cluster that an item belongs to: its family and template."""
    return "/".join(item.name.split("/")[:2])


def least_items(study: Study) -> dict[str, int]:
    """Says how many items each set has in a confirming run at least."""
    return {name: study.confirm_items if name == "main" else study.control_items for name in ITEM_SETS}


def digest(data: Any) -> str:
    """Returns the SHA-256 of what JSON holds of some data.

    Example:
        >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
        True
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def study_of(data: Mapping[str, Any]) -> Study:
    """Reads a study from what JSON holds of it; see ``configs.encode``.

    Raises:
        ConfigError: It holds something else.

    Example:
        >>> from attention_residuals.configs import encode
        >>> study_of(json.loads(json.dumps(encode(Study())))) == Study()
        True
    """
    study = decode(data, STUDY_CONFIGS)
    if not isinstance(study, Study):
        raise ConfigError(
            got=f"a {type(study).__name__}", expected="a Study", do="write it with configs.encode"
        )
    return study


STUDY_CONFIGS: dict[str, type] = {
    **TRAIN_CONFIGS,
    "Study": Study,
    "StepDocuments": StepDocuments,
    "Lesson": Lesson,
}
"""The types that a study's JSON may hold."""


def _recipe() -> TrainConfig:
    """The recipe that pilots of training ended with; README.md of the study tells them."""
    model = DecoderConfig(
        vocab_size=step_tokenizer().vocab_size,
        num_layers=12,
        width=64,
        num_heads=4,
        num_kv_heads=4,
        head_width=16,
        mlp_width=192,
        max_tokens=256,
        rope_base=100.0,
        init_std=0.125,
        common_std=0.125,
        residual=AttnRes(sublayers_per_block=6),
    )
    return TrainConfig(
        model=model,
        optimizer=Muon(learning_rate=3e-3),
        schedule=Cosine(warmup_steps=100),
        num_steps=6000,
        batch_size=8,
        sequence_length=256,
        shuffled_within=1000,
    )
