"""Run llama.cpp's server with some of the options of `llama-server`, in a Python that has `xllamacpp`, until SIGTERM.

python benchmarks/peers/llama_server.py -m MODEL.gguf --port 8080 --spec-type ngram-simple --spec-ngram-simple-size-n 4
"""

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("-md", dest="draft_model")
    parser.add_argument("-t", dest="threads", type=int, default=2)
    parser.add_argument("-c", dest="context", type=int, default=4096)
    parser.add_argument("-np", dest="slots", type=int, default=1)
    parser.add_argument("-kvu", dest="unified", action="store_true")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--spec-type", default="none")
    options, sizes = parser.parse_known_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.verbosity = options.model, options.port, 0
    params.n_ctx, params.n_parallel, params.kv_unified = options.context, options.slots, options.unified
    speculative = params.speculative
    kind = f"COMMON_SPECULATIVE_TYPE_{options.spec_type.upper().replace('-', '_')}"
    speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    if options.draft_model:
        speculative.draft.mparams.path = options.draft_model
    for part in (params, speculative.draft):
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = options.threads
    for name, value in zip(sizes[::2], sizes[1::2], strict=True):  # such as --spec-ngram-simple-size-n 4
        group, setting = name.removeprefix("--spec-").rsplit("-", 2)[0], "_".join(name.rsplit("-", 2)[1:])
        setattr(getattr(speculative, group.replace("-", "_")), setting, int(value))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
