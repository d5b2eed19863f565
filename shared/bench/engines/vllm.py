"""vLLM: its CPU build where there is no GPU. For several GPUs its flag is tensor_parallel_size."""

import json
import os
import sys
import time

sys.path.pop(0)  # this folder: here `vllm` is the package, not this file
spec = json.load(sys.stdin)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{spec['threads'] - 1}")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
stdout = os.dup(1)
os.dup2(2, 1)  # what it prints goes to standard error: the last line of standard output is ours

import vllm  # noqa: E402


def main():
    longest = max(map(len, spec["prompts"])) + spec["new_tokens"]
    engine = vllm.LLM(spec["model"], dtype=spec["dtype"], max_model_len=longest + 16, enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in spec["prompts"]]

    def generate(new_tokens):
        settings = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        return [list(out.outputs[0].token_ids) for out in engine.generate(prompts, settings, use_tqdm=False)]

    generate(4)
    start = time.perf_counter()
    ids = generate(spec["new_tokens"])
    seconds = time.perf_counter() - start
    os.write(stdout, json.dumps({"token_ids": ids, "seconds": seconds, "version": vllm.__version__}).encode() + b"\n")


if __name__ == "__main__":
    main()
