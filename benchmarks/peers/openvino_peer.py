"""Serve OpenVINO GenAI with one line of JSON per request, in OpenVINO's own environment.

    python openvino_peer.py TARGET DRAFTER THREADS PRECISION

Started by `systems.py`, which defines requests and responses. Settings are the engine's
fastest: continuous batching with paged attention in both modes, so that plain decoding and
speculation differ in the draft only.
"""

import json
import sys
import time

import numpy
import openvino
import openvino_genai as genai


def pipeline(target: str, properties: dict, drafter: str | None = None):
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    more = {"draft_model": genai.draft_model(drafter, "CPU", **properties)} if drafter else {}
    return genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **properties, **more)


def settings(request: dict) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = request["num_tokens"]
    config.ignore_eos = True
    if request["temperature"]:
        config.do_sample = True
        config.temperature = request["temperature"]
        config.rng_seed = request["seed"]
        config.top_k = 2**31 - 1
        config.top_p = 1.0
    if request["draft_length"]:
        config.num_assistant_tokens = request["draft_length"]
    return config


def main() -> None:
    target, drafter, threads, precision = sys.argv[1:]
    properties = {"INFERENCE_NUM_THREADS": int(threads), "INFERENCE_PRECISION_HINT": precision}
    plain, assisted = pipeline(target, properties), pipeline(target, properties, drafter)
    print(json.dumps({"version": genai.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompt = openvino.Tensor(numpy.array([request["prompt"]], dtype=numpy.int64))
        engine = assisted if request["draft_length"] else plain
        start = time.perf_counter()
        try:
            result = engine.generate(prompt, settings(request))
        except RuntimeError as error:
            print(json.dumps({"error": str(error)[:200]}), flush=True)
            continue
        seconds = time.perf_counter() - start
        print(json.dumps({"tokens": list(result.tokens[0]), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
