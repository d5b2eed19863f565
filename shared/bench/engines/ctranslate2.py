"""CTranslate2 on the CPU; the weights are converted once."""

import json
import os
import sys
import time

sys.path.pop(0)  # this folder: here `ctranslate2` is the package, not this file
import ctranslate2

spec = json.load(sys.stdin)
converted = os.path.join(spec["work"], "ctranslate2")
if not os.path.exists(os.path.join(converted, "model.bin")):
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(spec["model"]).convert(converted, force=True)
generator = ctranslate2.Generator(
    converted, device="cpu", compute_type=spec["dtype"], intra_threads=spec["threads"], inter_threads=1
)
with open(os.path.join(converted, "vocabulary.json"), encoding="utf-8") as file:
    words = json.load(file)
numbers = {word: number for number, word in enumerate(words)}
prompts = [[words[number] for number in prompt] for prompt in spec["prompts"]]


def generate(new_tokens):
    results = generator.generate_batch(
        prompts,
        max_length=new_tokens,
        min_length=new_tokens,
        end_token=words[-1],  # no prompt or answer has it, and min_length forbids it
        sampling_topk=1,
        include_prompt_in_result=False,
        max_batch_size=len(prompts),
    )
    return [[numbers[word] for word in result.sequences[0]] for result in results]


generate(4)
start = time.perf_counter()
ids = generate(spec["new_tokens"])
seconds = time.perf_counter() - start
print(json.dumps({"token_ids": ids, "seconds": seconds, "version": ctranslate2.__version__}))
