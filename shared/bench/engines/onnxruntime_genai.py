"""ONNX Runtime GenAI on the CPU; the model is built once by its own builder."""

import json
import os
import subprocess
import sys
import time

sys.path.pop(0)  # this folder: here `onnxruntime_genai` is the package, not this file
import numpy as np
import onnxruntime_genai as og

spec = json.load(sys.stdin)
precision = {"float32": "fp32", "float16": "fp16"}[spec["dtype"]]
built = os.path.join(spec["work"], f"onnx-{precision}")
if not os.path.exists(os.path.join(built, "genai_config.json")):
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", spec["model"], "-o", built]
    subprocess.run([*builder, "-p", precision, "-e", "cpu"], check=True, stdout=sys.stderr)
with open(os.path.join(built, "genai_config.json"), encoding="utf-8") as file:
    config = json.load(file)
# The last token of the vocabulary stands for both: no prompt holds it, and nothing stops before its time. Where it
# comes up all the same, the comparison of tokens shows it. It makes its mask from the padding: a prompt with the
# model's own pad token in it, as chat prompts have, would get holes.
unused = config["model"]["vocab_size"] - 1
config["model"] |= {"eos_token_id": unused, "pad_token_id": unused}
options = config["model"]["decoder"]["session_options"]
options["intra_op_num_threads"], options["inter_op_num_threads"] = spec["threads"], 1
with open(os.path.join(built, "genai_config.json"), "w", encoding="utf-8") as file:
    json.dump(config, file, indent=2)
model = og.Model(built)
longest = max(map(len, spec["prompts"]))
# Padded on the right: with left padding it gives wrong tokens without a word.
padded = np.array([prompt + [unused] * (longest - len(prompt)) for prompt in spec["prompts"]], dtype=np.int32)


def generate(new_tokens):
    params = og.GeneratorParams(model)
    params.set_search_options(
        max_length=longest + new_tokens, min_length=0, batch_size=len(padded), do_sample=False, num_beams=1
    )
    generator = og.Generator(model, params)
    generator.append_tokens(padded)
    rows = [[] for _ in padded]
    while len(rows[0]) < new_tokens:
        generator.generate_next_token()
        for row, token in zip(rows, generator.get_next_tokens()):
            row.append(int(token))
    return rows


generate(4)
start = time.perf_counter()
ids = generate(spec["new_tokens"])
seconds = time.perf_counter() - start
print(json.dumps({"token_ids": ids, "seconds": seconds, "version": og.__version__}))
