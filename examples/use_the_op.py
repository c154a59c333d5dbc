"""Depth attention on plain tensors: three sources, one learned query."""

import torch

from attention_residuals import depth_attention

embedding, attention_output, mlp_output = torch.randn(3, 2, 5, 16)  # each [batch, tokens, width]
pseudo_query = torch.zeros(16, requires_grad=True)  # zero at the start: the mean of the sources
key_gain = torch.ones(16, requires_grad=True)

read = depth_attention([embedding, attention_output, mlp_output], pseudo_query, key_gain, eps=1e-6)
print("weights of the first token:", read.weights[:, 0, 0].tolist())

read.mix.square().mean().backward()
print("the query's gradient has length", round(pseudo_query.grad.norm().item(), 4))
