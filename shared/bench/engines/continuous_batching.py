"""transformers' own continuous batching (paged), in the environment of this project."""

import json
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

spec = json.load(sys.stdin)
torch.set_num_threads(spec["threads"])
model = AutoModelForCausalLM.from_pretrained(
    spec["model"], dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
).eval()
if torch.cuda.is_available() and spec["device"] != "cpu":
    model.to(spec["device"])
model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
longest = max(map(len, spec["prompts"])) + spec["new_tokens"]
# The defaults take all memory there is.
cache = ContinuousBatchingConfig(
    page_size=16, num_blocks=len(spec["prompts"]) * (longest // 16 + 2), max_batch_tokens=max(512, longest)
)


def generate(new_tokens):
    # -1 is no token: nothing stops before its time.
    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(spec["prompts"], generation_config=config, continuous_batching_config=cache)
    order = sorted(outputs, key=lambda name: int(name.rsplit("_", 1)[-1]))
    return [list(outputs[name].generated_tokens) for name in order]


generate(4)
start = time.perf_counter()
ids = generate(spec["new_tokens"])
seconds = time.perf_counter() - start
print(json.dumps({"token_ids": ids, "seconds": seconds, "version": transformers.__version__}))
