"""Our decoder, layer by layer the one of Transformers: its Llama's weights give its Llama's logits."""

import pytest
import torch
from closeness import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from attention_residuals.layers.residual import StandardResidual
from attention_residuals.models import Decoder, DecoderConfig

OURS = {
    "input_layernorm.weight": "attention.norm.gain",
    "self_attn.q_proj.weight": "attention.query.weight",
    "self_attn.k_proj.weight": "attention.key.weight",
    "self_attn.v_proj.weight": "attention.value.weight",
    "self_attn.o_proj.weight": "attention.output.weight",
    "post_attention_layernorm.weight": "mlp.norm.gain",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}


@pytest.mark.parametrize("tied", [True, False])
def test_llama_in_our_decoder_has_llamas_logits(tied):
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=tied,
        )
    )
    ours = Decoder(
        DecoderConfig(
            vocab_size=64,
            num_layers=3,
            width=48,
            num_heads=4,
            num_kv_heads=2,
            head_width=16,
            mlp_width=80,
            max_tokens=64,
            tied=tied,
            norm_eps=1e-5,
            rope_base=500_000.0,
            residual=StandardResidual(),
        )
    )
    state = {"embedding.weight": "model.embed_tokens.weight", "norm.gain": "model.norm.weight"}
    state |= {} if tied else {"head.weight": "lm_head.weight"}
    for layer in range(3):
        state |= {f"layers.{layer}.{own}": f"model.layers.{layer}.{name}" for name, own in OURS.items()}
    stored = theirs.state_dict()
    for name, parameter in theirs.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        assert name in state.values()
    ours.load_state_dict({own: stored[name] for own, name in state.items()})
    tokens = torch.randint(64, (2, 40))
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits)
