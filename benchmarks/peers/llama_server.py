"""Run llama.cpp's server with a model, in a Python that has `xllamacpp`, until the standard input ends.

    python benchmarks/peers/llama_server.py MODEL.gguf [--threads 2]

The first line of the standard output is the server's address; it is printed when the model has been loaded.
"""

import argparse
import os
import sys

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_ctx, params.n_parallel, params.verbosity, params.warmup = 4096, 1, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
