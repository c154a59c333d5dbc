"""Small models of Transformers, by family, with weights drawn at random."""

import copy

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITHOUT_GROUPS = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
}

PRE_NORM = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "smollm3": transformers.SmolLM3Config(**SIZES),
    "phi3": transformers.Phi3Config(**SIZES),
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=8),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=8),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=8),
    "granite": transformers.GraniteConfig(**SIZES, residual_multiplier=0.3),
    "gpt-neox": transformers.GPTNeoXConfig(**WITHOUT_GROUPS, use_parallel_residual=False),
    "gpt2": transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "starcoder2": transformers.Starcoder2Config(**SIZES),
    "bloom": transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4),
    "deepseek-v3": transformers.DeepseekV3Config(
        **{**SIZES, **LATENT},
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        first_k_dense_replace=1,
    ),
    "kimi-linear": transformers.KimiLinearConfig(
        **{**SIZES, **LATENT},
        num_experts=8,
        num_experts_per_token=2,
        linear_num_heads=4,
        linear_head_dim=8,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
}
"""Families that convert."""

OTHERS = {
    "gpt-neox, parallel": (transformers.GPTNeoXConfig(**WITHOUT_GROUPS), "parallel sublayers"),
    "gpt-j": (
        transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=4, n_head=4, rotary_dim=8),
        "5 reads and 4 writes for 4 layers",
    ),
    "cohere": (transformers.CohereConfig(**SIZES), "written to twice after one read"),
    "olmo": (transformers.OlmoConfig(**SIZES), "OlmoLayerNorm without an eps"),
    "olmo2": (
        transformers.Olmo2Config(**SIZES),
        r"linear of the residual stream in model\.layers\.0\.self_attn",
    ),
    "mamba": (
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, state_size=4),
        "of the residual stream",
    ),
}
"""Families that do not, and what they are told."""

TOKENS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))


def made(config):
    """A model in evaluation mode whose norms have gains, so that none can be left out unseen."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    return model


def trained(model):
    """As a model is once its queries have learned something."""
    for name, parameter in model.attention_residuals.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("gain" in name), std=0.5)
    return model
