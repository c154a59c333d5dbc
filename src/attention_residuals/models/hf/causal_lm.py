"""The decoder as a Transformers model, so that whatever takes one takes ours: generate, Trainer, PEFT."""

import os
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.layers.tap import Tap
from attention_residuals.models.decoder import Decoder
from attention_residuals.models.hf.configuration import AttnResConfig
from attention_residuals.models.hf.translation import KeptTokens, MixedStates, joined, mask_and_positions

__all__ = ["AttnResForCausalLM"]


class AttnResForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """One ``Decoder`` behind the interface of Transformers.

    It computes what the decoder computes, bit for bit, and holds nothing of its own: ``decoder`` goes back
    to this library. Importing this module registers it, so that ``AutoModelForCausalLM.from_pretrained``
    knows its folders.

    Args:
        config: Made with ``AttnResConfig.of``.
        decoder: Is wrapped as it is; a new one of that config by default.

    Example:
        >>> from attention_residuals.models import presets
        >>> decoder = Decoder(presets.scaled(2, vocab_size=300))
        >>> model = AttnResForCausalLM.from_decoder(decoder)
        >>> tokens = torch.tensor([[5, 6, 7]])
        >>> torch.equal(model(tokens).logits, decoder(tokens)), model.decoder is decoder
        (True, True)
        >>> model.generate(tokens, max_new_tokens=2, do_sample=False).shape
        torch.Size([1, 5])
    """

    config_class = AttnResConfig
    config: AttnResConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the Trainer's num_items_in_batch
    _supports_sdpa = True
    _no_split_modules = ["Decoder"]  # noqa: RUF012  # its layers hand over more than one tensor

    def __init__(self, config: AttnResConfig, decoder: Decoder | None = None) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.decoder_config) if decoder is None else decoder
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_decoder(
        cls,
        decoder: Decoder,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
    ) -> "AttnResForCausalLM":
        """Wraps a decoder; both have the same parameters.

        Args:
            decoder: As trained or loaded by this library.
            bos_token_id: Begins a text.
            eos_token_id: Ends a text; ``Tokenizer.end_of_text`` for this library's tokenizer.
            pad_token_id: Fills up the shorter sequences of a batch.
        """
        config = AttnResConfig.of(
            decoder.config,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
        return cls(config, decoder)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Any:
        """Loads a model that ``save_pretrained`` wrote, every tensor of it; takes what Transformers' own takes.

        Args:
            pretrained_model_name_or_path: A folder, or a name on the hub.
            *model_args: Handed on.
            **kwargs: Handed on.

        Raises:
            CheckpointError: A tensor is missing, left over or of another shape.
            ConfigError: Weights in a format that can run code were asked for.
        """
        if kwargs.pop("use_safetensors", None) is False:
            raise ConfigError(
                got="use_safetensors=False",
                expected="weights as safetensors, since pickled files can run code",
                do="leave it out",
            )
        wants_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
        model, info = loaded
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[what]:
                raise CheckpointError(
                    got=f"{pretrained_model_name_or_path}: {len(info[what])} {what.replace('_', ' ')}, "
                    f"the first is {min(map(str, info[what]))}",
                    expected="the tensors of this very config",
                    do="load it with the config that it was saved with",
                )
        _freeze_like_new(model)
        return (model, info) if wants_info else model

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "_ T"] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Int[Tensor, " _"] = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        tap: Tap | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Computes next-token logits, and the loss where labels are given.

        Args:
            input_ids: Token ids.
            attention_mask: 1 for real tokens, [B, U]; U counts the cached tokens too.
            position_ids: Absolute positions, for each sequence or for all. By default real tokens are
                counted. Without a mask and a cache, positions that do not go on by 1 begin another text,
                which does not see the one before it.
            cache: A ``DynamicCache``; is extended.
            inputs_embeds: Refused.
            labels: Usually ``input_ids``; each is predicted from the tokens before it, -100 is left out.
            use_cache: Return keys and values; by default as the config says, except in training mode.
            logits_to_keep: Compute those of the last so many tokens, 0 for all; or which to return.
            num_items_in_batch: Divide the sum of losses by this rather than by the number of labels.
            output_attentions: Refused.
            output_hidden_states: Return L + 1 states: what each layer's attention reads, mixed and before
                its norm (with attention residuals the first is the embedding), and last what the head reads.
            return_dict: A ``CausalLMOutputWithPast`` rather than a tuple.
            tap: Sees and may change every depth read and every write.

        Raises:
            ConfigError: Something that the decoder does not do was asked for.
            ShapeError: Shapes that do not fit.
        """
        self._refuse(input_ids, inputs_embeds, output_attentions)
        assert input_ids is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        kept = None if cache is None else KeptTokens(cache)
        mask, positions = mask_and_positions(
            input_ids, attention_mask, position_ids, 0 if kept is None else kept.num_tokens
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = MixedStates(self.decoder.norm, self.dtype) if output_hidden_states else None
        logits = self.decoder(
            input_ids,
            positions=positions,
            mask=mask,
            cache=kept,
            tap=joined(tap, states),
            num_logits=None if isinstance(logits_to_keep, Tensor) else logits_to_keep or None,
        )
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        output = CausalLMOutputWithPast(
            loss=None if labels is None else self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            cache=cache,
            hidden_states=None if states is None else tuple(states.found),
        )
        as_object = self.config.return_dict if return_dict is None else return_dict
        return output if as_object else output.to_tuple()

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Lets the decoder drop what lies between layers and compute it again in backward.

        Args:
            activation_checkpointing_kwargs: Nothing, or ``{"use_reentrant": False}``.
            every_n_layers: 1.
            offload: False.

        Raises:
            ConfigError: The decoder's own checkpointing has no such option.
        """
        options = {"use_reentrant": False} | (activation_checkpointing_kwargs or {})
        if options != {"use_reentrant": False} or every_n_layers != 1 or offload:
            raise ConfigError(
                got=f"{options}, every_n_layers={every_n_layers}, offload={offload}",
                expected="non-reentrant checkpoints of every layer, on the device",
                do="pass no options",
            )
        super().activation_checkpointing_enable(options)

    @property
    def gradient_checkpointing(self) -> bool:
        """Transformers' name of the decoder's ``checkpoint_activations``."""
        return self.decoder.checkpoint_activations

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.decoder.checkpoint_activations = enable

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding."""
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding."""
        self.decoder.add_module("embedding", value)

    def get_output_embeddings(self) -> nn.Linear | None:
        """Returns the head, or None where it shares the embedding's matrix."""
        return self.decoder.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the head.

        Raises:
            ConfigError: The model is tied and has none.
        """
        if self.decoder.head is None:
            raise ConfigError(
                got="a head for a tied model",
                expected="a model with tied=False",
                do="replace the embedding, or make the model with DecoderConfig(tied=False, ...)",
            )
        self.decoder.head = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Changes the vocabulary's size; the configs of the model and of its decoder follow.

        Args:
            new_num_tokens: Rows of the embedding, and of the head; None leaves them as they are.
            pad_to_multiple_of: Round up to a multiple of this.
            mean_resizing: Draw new rows with the mean and covariance of the old ones.
        """
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.decoder.config = self.config.decoder_config
        return embedding

    def init_weights(self) -> None:
        """Does nothing: the decoder has drawn its weights itself, and a tied one shares them without help."""

    def _loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        loss: Tensor = self.loss_function(
            logits=logits,
            labels=labels,
            vocab_size=self.decoder.config.vocab_size,
            num_items_in_batch=num_items_in_batch,
        )
        return loss

    def _refuse(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, output_attentions: bool | None
    ) -> None:
        if output_attentions or self.config.output_attentions:
            raise ConfigError(
                got="output_attentions=True",
                expected="False, since attention over tokens is never stored",
                do="for the weights over depth, pass a Recorder of attention_residuals.trace as tap",
            )
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError(
                got="no input_ids" if inputs_embeds is None else "inputs_embeds",
                expected="input_ids, since the decoder embeds its tokens itself",
                do="pass token ids; a tap can change the embedding's write",
            )


def _freeze_like_new(model: AttnResForCausalLM) -> None:
    """Loading makes every parameter trainable, also those that have no effect and are not to be trained."""
    with torch.device("meta"):
        new = Decoder(model.config.decoder_config)
    frozen = {name for name, parameter in new.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.decoder.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


AutoModelForCausalLM.register(AttnResConfig, AttnResForCausalLM)
