"""Kimi Linear where Transformers' modules are too slow or lack something: linear attention, and routers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearDeltaAttention,
    KimiLinearTopkRouter,
)
from transformers.utils.import_utils import is_flash_linear_attention_available

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.tap import ExpertChoice, ExpertTap, Tap
from attention_residuals.models.hf.keys import Keys
from attention_residuals.models.kimi_linear import FULL, LINEAR
from attention_residuals.ops.delta import chunked_delta_rule

__all__ = [
    "BALANCE_RATE",
    "BalancedRouter",
    "ChunkedDeltaAttention",
    "choices_told",
    "documents_of",
    "own_kimi_modules",
    "require_possible",
    "routers_of",
]

BALANCE_RATE = 1e-3
"""How far one step moves the bias of an expert, as in DeepSeek-V3 (arXiv:2412.19437)."""


class ChunkedDeltaAttention(KimiLinearDeltaAttention):
    """Kimi Delta Attention on this library's chunked delta rule, with the parameters of Transformers' own.

    Transformers' rule in plain PyTorch makes a number for each pair of tokens of a chunk and each channel,
    which is ten times slower. It is also told of documents, so that none reads what another has written.
    Where FLA's kernels are installed and there is a GPU, they run.

    Source:
        Kimi Linear (arXiv:2510.26692).
    """

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Reads and writes the memory of each head.

        Args:
            hidden_states: Normalised inputs.
            cache: Holds the memory and the newest inputs of the convolutions.
            attention_mask: Each token's document, numbered from 1; 0 for padding.
            **kwargs: What Transformers hands to every attention.
        """
        starts = None
        if attention_mask is not None:
            starts = _starts(attention_mask)
            hidden_states = hidden_states * (attention_mask > 0)[..., None].to(hidden_states.dtype)
        fits_kernels = starts is None and not isinstance(cache, Keys)  # theirs change a cache in place
        if fits_kernels and hidden_states.is_cuda and is_flash_linear_attention_available():
            output: Tensor = super().forward(hidden_states, cache, **kwargs)
            return output
        query, key, value = self._convolved(hidden_states, cache, starts)
        log_decay = self.forget_gate(hidden_states)
        if starts is not None:
            log_decay = log_decay.masked_fill(starts[..., None, None], float("-inf"))
        recalled, memory = chunked_delta_rule(
            _unit(query) * self.head_dim**-0.5,
            _unit(key),
            value,
            log_decay,
            self.b_proj(hidden_states).sigmoid(),
            memory=None if cache is None else cache.get_recurrent_state(self.layer_idx),
        )
        if cache is not None:
            cache.update_recurrent_state(memory, self.layer_idx)
        gate = self.g_b_proj(self.g_a_proj(hidden_states)).unflatten(-1, (-1, self.head_dim))
        projected: Tensor = self.o_proj(self.o_norm(recalled.to(value.dtype), gate).flatten(2))
        return projected

    def _convolved(self, inputs: Tensor, cache: Cache | None, starts: Tensor | None) -> tuple[Tensor, ...]:
        """Makes queries, keys and values, each a short causal convolution over the newest tokens."""
        projected = torch.cat([self.q_proj(inputs), self.k_proj(inputs), self.v_proj(inputs)], -1)
        length, size = inputs.shape[1], self.conv_kernel_size
        seen = projected.transpose(1, 2)
        if cache is not None:
            seen = cache.update_conv_state(seen, self.layer_idx, conv_kernel_size=size)
        seen = F.pad(seen, (size - 1, 0))[..., -(length + size - 1) :]
        weight = self.conv1d.weight
        if starts is None:
            mixed = F.conv1d(seen, weight, groups=self.conv_dim)
        else:
            mixed = _convolved_apart(seen, weight[:, 0], starts)
        heads: Tensor = F.silu(mixed).transpose(1, 2).unflatten(-1, (3, -1, self.head_dim))
        return heads.unbind(2)


class BalancedRouter(KimiLinearTopkRouter):
    """A router that counts what it chooses in training, and then prefers experts that were chosen too rarely.

    Transformers keeps the bias of each expert and never changes it. It means its scores to be of float32,
    which they are here under autocast, too.

    Source:
        Wang et al. (loss-free balancing), arXiv:2408.15664.
    """

    counts: Tensor | None = None
    """How often each expert was chosen since the last step; None before the first pass."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, weights and numbers of the chosen experts, a row for each token."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits, weights, chosen = super().forward(hidden_states)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and self.weight.requires_grad and not _is_recomputed():
            counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
            self.counts = counts if self.counts is None else self.counts + counts
        return logits, weights, chosen

    def balance(self) -> None:
        """Moves each expert's bias up where it was chosen less than the mean, down where more."""
        if self.counts is not None:
            counts = self.counts.to(self.e_score_correction_bias.dtype)
            self.e_score_correction_bias.add_(BALANCE_RATE * (counts.mean() - counts).sign())
            self.counts = None


def _is_recomputed() -> bool:
    """Tells whether backward asks for this pass, as of a checkpointed layer: what it chooses is counted already."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


_OWN: dict[type, type] = {
    KimiLinearDeltaAttention: ChunkedDeltaAttention,
    KimiLinearTopkRouter: BalancedRouter,
}


def own_kimi_modules(model: nn.Module) -> dict[nn.Module, type]:
    """Finds the modules that this library has better ones for, with the class that each should be of."""
    return {module: _OWN[type(module)] for module in model.modules() if type(module) in _OWN}


def routers_of(model: nn.Module) -> dict[str, BalancedRouter]:
    """Finds the routers, by the name of the sublayer that each belongs to."""
    return {
        f"L{name.split('.layers.')[1].split('.')[0]}.mlp": module
        for name, module in model.named_modules()
        if isinstance(module, BalancedRouter)
    }


@contextmanager
def choices_told(model: nn.Module, tap: Tap | None, batch: int) -> Iterator[None]:
    """Tells a tap that asks for it which experts are chosen in passes over so many texts."""
    if not isinstance(tap, ExpertTap):
        yield
        return

    def told(writer: str) -> Any:
        def tell(router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
            _, weights, chosen = (part.unflatten(0, (batch, -1)) for part in outputs)
            tap.choose(ExpertChoice(writer, chosen, weights))

        return tell

    hooks = [router.register_forward_hook(told(writer)) for writer, router in routers_of(model).items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_possible(fields: Mapping[str, Any]) -> None:
    """Checks what Transformers does not of a Kimi Linear model, or tells far from the cause.

    Args:
        fields: A config of Transformers as JSON holds it; other models than Kimi Linear are not looked at.

    Raises:
        ConfigError: ``layer_types`` or ``mlp_layer_types`` of the wrong length or with unknown words, no layer
            that attends to the whole text, or numbers of experts that do not go together.
    """
    if fields.get("model_type") != "kimi_linear":
        return
    for name, words in {"layer_types": (LINEAR, FULL), "mlp_layer_types": ("dense", "sparse")}.items():
        types, layers = fields.get(name), fields.get("num_hidden_layers")
        if types is not None and (len(types) != layers or not set(types) <= set(words)):
            raise ConfigError(
                got=f"{name} with {len(types)} entries: {', '.join(sorted(set(map(str, types))))}",
                expected=f"{layers}, one for each layer: {' or '.join(words)}",
                do=f"name the kind of every layer in {name}",
            )
    types = fields.get("layer_types")
    if types is not None and FULL not in types:
        raise ConfigError(
            got=f"layer_types with {len(types)} layers of {LINEAR} and none of {FULL}",
            expected=f"at least one of {FULL}, by which Transformers counts the tokens in a cache",
            do=f"make every fourth layer, and the last, one of {FULL}",
        )
    if "sparse" in (fields.get("mlp_layer_types") or ()):
        _require_experts(fields)


def _require_experts(fields: Mapping[str, Any]) -> None:
    # Transformers writes the names of the checkpoint, and reads its own as well.
    names = {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_group": "num_expert_group",
        "topk_group": "topk_group",
    }
    experts, active, groups, chosen = (fields.get(own, fields.get(other)) for own, other in names.items())
    counts = all(isinstance(count, int) and is_count(count) for count in (experts, active, groups, chosen))
    if not counts or experts % groups or chosen > groups:
        raise ConfigError(
            got=f"{experts} experts in {groups} groups, of which {chosen} are chosen",
            expected="positive numbers, groups of the same size, and no more chosen than there are",
            do="use n_group=1 and topk_group=1, as Kimi Linear does",
        )
    if experts // groups < 2 or active > chosen * (experts // groups):
        raise ConfigError(
            got=f"{active} experts for each token, from {chosen} of {groups} groups of {experts // groups}",
            expected="two experts or more in a group, and as many in the chosen groups as a token takes",
            do="take more experts, or fewer for each token",
        )


def documents_of(mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"], num_tokens: int) -> Int[Tensor, "B T"]:
    """Numbers each token's document from 1, and padding 0, as linear attention needs to be told.

    Args:
        mask: True for real tokens, or for pairs of tokens of one document.
        num_tokens: The newest ones of the mask, that the pass is over.

    Raises:
        ConfigError: Pairs that are not those of documents behind each other, of new tokens only.

    Example:
        >>> document = torch.tensor([[0, 0, 1]])
        >>> documents_of(document[:, :, None] == document[:, None, :], 3)
        tensor([[1, 1, 2]])
    """
    if mask.ndim == 2:
        return mask[:, -num_tokens:].long()
    if mask.shape[1] == mask.shape[2]:
        follows = F.pad(mask.diagonal(-1, 1, 2), (1, 0))
        documents = (~follows).long().cumsum(1)
        same = documents[:, :, None] == documents[:, None, :]
        if not ((mask != same).tril()).any():
            return documents
    raise ConfigError(
        got=f"a mask of pairs {list(mask.shape)} that are not those of documents behind each other",
        expected="for linear attention: pairs of tokens of the same document, without a cache",
        do="pass documents[:, :, None] == documents[:, None, :], or a mask of real tokens [B, U]",
    )


def _starts(documents: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """Marks the first token of each document but the first; None where there is one only."""
    if int(documents.max()) <= 1:
        return None
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))


def _convolved_apart(
    seen: Float[Tensor, "B C U"], weight: Float[Tensor, "C X"], starts: Bool[Tensor, "B T"]
) -> Float[Tensor, "B C T"]:
    """Convolves within documents: what lies before a document's first token counts as zero."""
    length, size = starts.shape[1], weight.shape[1]
    document = starts.long().cumsum(1)
    mixed = seen[..., size - 1 :] * weight[:, -1, None]
    for back in range(1, size):
        same = F.pad(document, (back, 0), value=-1)[:, :length] == document
        earlier = seen[..., size - 1 - back : size - 1 - back + length]
        mixed = mixed + earlier * weight[:, -1 - back, None] * same[:, None]
    return mixed


def _unit(vector: Tensor) -> Tensor:
    """Gives vectors length 1, as FLA does."""
    vector = vector if vector.dtype == torch.float64 else vector.float()
    return vector / (vector.square().sum(-1, keepdim=True) + 1e-6).sqrt()
