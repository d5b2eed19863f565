"""The calls on the page about outgrowing this repo, on a tiny random model."""

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=72,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=128,
)
model = LlamaForCausalLM(config).eval()
prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]

# --8<-- [start:continuous_batching]
answers = model.generate_batch(
    prompts,  # lists of token ids
    GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1),  # -1: no token ends an answer
    ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64),
)
new_tokens = [answer.generated_tokens for answer in answers.values()]
assert [len(tokens) for tokens in new_tokens] == [8, 8]
# --8<-- [end:continuous_batching]
