#!/usr/bin/env bash
# Engines and weights for compare.py, in throwaway environments:  prepare.sh ENGINES PAIR...
#
# ENGINES is a directory to build in (llama.cpp takes a quarter of an hour once); each PAIR comes from make_pair.py.
# Versions are those of the stored results. Two traps: optimum-intel asks for a torch without bound, and for a torchvision
# that breaks Transformers. With AMX, llama.cpp is built for AVX-512 without its AMX path, which ends in an illegal instruction
# where we ran it; bfloat16 is as fast either way.
set -euo pipefail
engines=$(realpath -m "$1"); shift
here=$(cd "$(dirname "$0")" && pwd)
export OPENVINO_TELEMETRY=0
mkdir -p "$engines"

if [ ! -x "$engines/openvino/bin/optimum-cli" ]; then
    python3 -m venv "$engines/openvino"
    "$engines/openvino/bin/pip" install -q torch==2.13.0
    echo "torch==2.13.0" > "$engines/constraints.txt"
    "$engines/openvino/bin/pip" install -q -c "$engines/constraints.txt" \
        openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0
    "$engines/openvino/bin/pip" uninstall -qy torchvision
fi
if [ ! -x "$engines/llama.cpp/bin/llama-quantize" ]; then
    (cd "$engines" && pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-*.tar.gz)
    kernels="-DGGML_NATIVE=ON"
    if grep -q amx_tile /proc/cpuinfo; then
        kernels="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX_VNNI=ON -DGGML_AVX512=ON
            -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
    fi
    # shellcheck disable=SC2086
    cmake -S "$engines"/llama_cpp_python-0.3.36/vendor/llama.cpp -B "$engines/llama.cpp" -DCMAKE_BUILD_TYPE=Release $kernels \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build "$engines/llama.cpp" -j2 --target llama-speculative-simple llama-completion llama-quantize llama-server
fi

# OpenVINO wants a tokenizer that it can convert, and uses none: ids go in and out.
tokenizer=$engines/tokenizer
[ -d "$tokenizer" ] || "$engines/openvino/bin/convert_tokenizer" "$here/../../src/secondguess/builtin/target" -o "$tokenizer"
for pair in "$@"; do
    for model in target drafter; do
        for format in fp16 int8 int4; do
            out=$pair/openvino/$format/$model
            [ -d "$out" ] || "$engines/openvino/bin/optimum-cli" export openvino --model "$pair/$model" \
                --task text-generation-with-past --weight-format "$format" "$out"
            cp "$tokenizer"/* "$out"
        done
        [ -f "$pair/$model.gguf" ] || PYTHONPATH=$engines/llama_cpp_python-0.3.36/vendor/llama.cpp/gguf-py \
            "$here/../../.venv/bin/python" "$here/to_gguf.py" "$pair/$model" "$pair/$model.gguf"
    done
    for file in target-q8_0 target-q4_0 target-q4_k_m drafter-q8_0; do
        [ -f "$pair/$file.gguf" ] ||
            "$engines/llama.cpp/bin/llama-quantize" "$pair/${file%%-*}.gguf" "$pair/$file.gguf" "${file#*-}"
    done
done
