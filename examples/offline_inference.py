"""Offline inference with fastkv: load a config, complete some prompts, look at what the cache did.

    python examples/offline_inference.py [CONFIG]

The config decides the model, who owns the caches (v0 or v1) and what dtype they are stored in. Copy and change.
"""

from __future__ import annotations

import sys

from fastkv import FastKVError, load_config
from fastkv.core.messages import SamplingParams
from fastkv.engine.llm import LLM

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The three primary colours are",
]


def main(config_file: str) -> int:
    """Complete PROMPTS twice: the second time, the cache already holds their beginnings."""
    # Overrides win over the file; every key of the YAML can be given as a dotted path.
    config = load_config(config_file, {"cache.kv_cache_quant_type": "int8", "cache.block_size": 4})
    with LLM(config, worker="inline") as llm:
        for attempt in (1, 2):
            generation = llm.generate(PROMPTS, max_tokens=16, sampling=SamplingParams(temperature=0.0))
            report = generation.report
            hits, total = report.prefix_hit_tokens, report.prompt_tokens
            print(f"--- call {attempt}: {hits} of {total} prompt tokens came from the cache")
            for output in generation.outputs:
                print(f"{output.prompt!r} -> {output.text!r}")
        print(f"caches: {report.device_cache_bytes:,} bytes, stored as {report.storage_dtype}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "configs/smollm2.yaml"))
    except FastKVError as error:
        sys.exit(f"error: {error}")
