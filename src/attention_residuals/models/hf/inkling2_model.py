"""Inkling2's text sublayers, by Transformers, around this library's ``Inkling2`` rule."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Inkling2ForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)
from transformers.models.inkling2.modeling_inkling2 import get_relative_distance

from attention_residuals.errors import ConfigError
from attention_residuals.layers.attention import Cache
from attention_residuals.layers.residual import Inkling2, ResidualRule
from attention_residuals.layers.residual.inkling2 import Inkling2Rule
from attention_residuals.layers.residual.sources import reader_name
from attention_residuals.layers.tap import OUTPUT, Pass, Site, Tap
from attention_residuals.models.formats.checkpoint import Checkpoint
from attention_residuals.models.hf.saving import described
from attention_residuals.models.hf.trained import NOT_A_CONFIG, own_config, senseless
from attention_residuals.models.language_model import LanguageModel, checked_positions

__all__ = ["Inkling2Config", "Inkling2Model"]

KEY_EPS = 1e-6
"""Of the norm on sources, which is written into Transformers' code and stands in no config."""


@dataclass(frozen=True, kw_only=True)
class Inkling2Config:
    """What an Inkling2 text model is.

    Args:
        transformers: Its config as Transformers has it, as JSON.
        vocab_size: V; the stored table may have more rows, which are no tokens.
        num_layers: L.
        width: D.
        max_tokens: The longest sequence.
        residual: The rule.
    """

    transformers: str
    vocab_size: int
    num_layers: int
    width: int
    max_tokens: int
    residual: Inkling2

    @property
    def original(self) -> dict[str, Any]:
        """The config of Transformers."""
        return dict(json.loads(self.transformers))


class Inkling2Model(LanguageModel):
    """Runs the sublayers of Transformers' Inkling2 text model, and reads and writes by our rule.

    The depth queries move into ``residual``; a layer with sliding attention has one, which is its reader of
    queries, keys and values alike. There is no cache: texts are computed whole. Like all models here it runs
    without dropout.

    Args:
        model: A text model of Transformers, which is taken apart.
    """

    def __init__(self, model: Inkling2ForCausalLM) -> None:
        super().__init__()
        text = model.config
        num_layers = text.num_hidden_layers
        short = model.dtype in (torch.bfloat16, torch.float16)
        rule = Inkling2(
            sublayers_per_block=2 * min(text.n_layers_per_attn_res_block, num_layers),
            key_eps=KEY_EPS,
            source_dtype="float32" if short else None,  # in which Transformers, too, mixes
        )
        self.config = Inkling2Config(
            transformers=described(model.config),
            vocab_size=text.unpadded_vocab_size,
            num_layers=num_layers,
            width=text.hidden_size,
            max_tokens=text.max_position_embeddings,
            residual=rule,
        )
        self.residual: Inkling2Rule = rule.build(num_layers=num_layers, width=text.hidden_size)
        for name, query in _taken_queries(model).items():
            _set_queries(self.residual, name, query)
        self.transformers = model
        self.train()

    @classmethod
    def read(cls, checkpoint: Checkpoint, fields: Mapping[str, Any]) -> "Inkling2Model":
        """Makes a model of a checkpoint, all of whose tensors it claims.

        What Transformers keeps in float32, among it the queries, is float32 here.

        Args:
            checkpoint: Where it lies.
            fields: Of the text model's config, with its dtype.

        Raises:
            CheckpointError: The config makes no sense, or tensors are missing, left over or misshapen.
        """
        where = checkpoint.folder / "config.json"
        config: Any = own_config({**fields, "attn_implementation": "eager"}, where)
        try:
            with torch.device("meta"):
                empty = Inkling2ForCausalLM(config)
        except NOT_A_CONFIG as error:
            raise senseless(where, error) from error
        shapes = _by_stored_name(empty, dict(empty.state_dict()))
        tensors = checkpoint.load({name: tuple(shape.shape) for name, shape in shapes.items()})
        loaded: Any = Inkling2ForCausalLM.from_pretrained(
            None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True
        )
        model, report = loaded
        assert not any(report.values()), report
        return cls(model)

    def stored(self) -> dict[str, Tensor]:
        """Gives all tensors by the names that Transformers stores them under.

        Raises:
            ConfigError: A layer that stores one query reads with three.
        """
        state = {name: tensor.detach() for name, tensor in self.transformers.state_dict().items()}
        for site in self.residual.sites()[1:]:
            name = f"model.layers.{site.layer}.{site.kind}_input.query"
            queries = [self._query(site, part) for part in self.residual.parts(site)]
            if site != OUTPUT and self._is_full(site):
                state[name] = torch.stack(queries)
                continue
            if any(not torch.equal(query, queries[0]) for query in queries):
                raise ConfigError(
                    got=f"readers of q, k and v at {site} that differ",
                    expected="one query, since this layer's attention is sliding",
                    do="set them equal, or keep the weights with state_dict()",
                )
            state["model.final_input.query" if site == OUTPUT else name] = queries[0]
        return _by_stored_name(self.transformers, state)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "B T"] | None = None,
        mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"] | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
        residual: ResidualRule[Any] | None = None,
        num_logits: int | None = None,
    ) -> Float[Tensor, "B _ V"]:
        """Computes the logits of every next token; see ``LanguageModel.forward``.

        Raises:
            ConfigError: A cache, or a mask of pairs.
        """
        if cache is not None or (mask is not None and mask.ndim == 3):
            raise ConfigError(
                got="a cache" if cache is not None else "a mask of pairs",
                expected="whole texts, and a mask of tokens if any: convolutions look back too",
                do="leave it out; Transformers' own Inkling2ForCausalLM generates with a cache",
            )
        positions = checked_positions(self.config, tokens, positions, mask, 0, num_logits)
        if tap is not None:
            tap.begin(Pass(tokens, positions, mask))
        state = self._last_state(
            tokens, positions, mask, self.residual if residual is None else residual, tap
        )
        return self.unembed(state if num_logits is None else state[:, -num_logits:])

    def unembed(self, state: Float[Tensor, "*BT D"]) -> Float[Tensor, "*BT V"]:
        """Makes logits of a state: the last norm, the head, and the soft cap."""
        own: Any = self.transformers
        logits = own.lm_head(own.model.norm(state).to(own.lm_head.weight.dtype))
        capped: Tensor = own.logit_softcap(logits.float())
        return capped

    def train(self, mode: bool = True) -> "Inkling2Model":
        """Leaves dropout off, whatever the mode."""
        super().train(False)
        return self

    def _last_state(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, rule: ResidualRule[Any], tap: Tap | None
    ) -> Tensor:
        text: Any = self.transformers.model
        embedding = text.embed_tokens(tokens)
        dtype, given = embedding.dtype, _masks(text.config, embedding, positions, mask)
        state = rule.open(embedding, tap)
        for number, layer in enumerate(text.layers):
            shared = {"conv_mask": given["conv_mask"], "position_ids": positions}
            inputs, state = rule.read(state, site := Site(number, "attention"), _itself, tap)
            named = _normed(layer, inputs, dtype)
            output, _ = layer.self_attn(**named, **given[layer.attention_type], **shared)
            output = layer.post_attention_convolution(output, **shared)
            state = rule.write(state, site, output, tap)

            (mixed, *_), state = rule.read(state, site := Site(number, "mlp"), _itself, tap)
            output = layer.mlp(layer.post_attention_layernorm(mixed).to(dtype))
            state = rule.write(state, site, layer.post_mlp_convolution(output, **shared), tap)
        (mixed, *_), _ = rule.read(state, OUTPUT, _itself, tap)
        return mixed

    def _query(self, site: Site, part: str) -> Tensor:
        query = self.residual.readers[reader_name(site, part)].pseudo_query
        assert isinstance(query, Tensor)
        return query.detach()

    def _is_full(self, site: Site) -> bool:
        kinds = self.config.original["layer_types"]
        return site.kind == "attention" and kinds[site.layer] != "hybrid_sliding"


def _taken_queries(model: Any) -> dict[str, Tensor]:
    """Takes the depth queries out of a model, and gives them by site."""
    queries = {str(OUTPUT): model.model.final_input.query}
    del model.model.final_input
    for number, layer in enumerate(model.model.layers):
        for kind in ("attention", "mlp"):
            reader = getattr(layer, f"{kind}_input")
            if reader is not None:
                queries[str(Site(number, kind))] = reader.query
            delattr(layer, f"{kind}_input")
    return queries


def _set_queries(rule: Inkling2Rule, name: str, query: Tensor) -> None:
    """Gives a site its query: one for all of its parts, or one for each."""
    site = next(site for site in rule.sites() if str(site) == name)
    parts = rule.parts(site)
    one = nn.Parameter(query.detach())
    for number, part in enumerate(parts):
        own = one if query.ndim == 1 else nn.Parameter(query.detach()[number].clone())
        rule.readers[reader_name(site, part)].pseudo_query = own


def _by_stored_name(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = revert_weight_conversion(model, state)
    return stored


def _masks(text: Any, embedding: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Makes what attention sees, by its type, and what convolutions see."""
    told = {
        "config": text,
        "inputs_embeds": embedding,
        "attention_mask": None if mask is None else mask.long(),
        "cache": None,
        "position_ids": positions,
    }
    # As far back as it is, in tokens: the same for both kinds of attention where there is no cache.
    distance = get_relative_distance(embedding, None, is_sliding=False)
    return {
        "full_attention": {"attention_mask": create_causal_mask(**told), "relative_distance": distance},
        "sliding_attention": {
            "attention_mask": create_sliding_window_causal_mask(**told),
            "relative_distance": distance,
        },
        "conv_mask": create_recurrent_attention_mask(**told),
    }


def _normed(layer: Any, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Norms what attention reads, by norms of its own for queries, keys and values where it has them."""
    if layer.attention_type == "sliding_attention":
        return {"hidden_states": layer.input_layernorm(inputs[0]).to(dtype)}
    norms = {
        "hidden_states": layer.q_input_layernorm,
        "key_hidden_states": layer.k_input_layernorm,
        "value_hidden_states": layer.v_input_layernorm,
    }
    return {name: norm(mixed).to(dtype) for (name, norm), mixed in zip(norms.items(), inputs, strict=True)}


def _itself(tensor: Tensor) -> Tensor:
    return tensor
