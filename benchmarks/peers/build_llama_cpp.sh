#!/usr/bin/env bash
# Build llama.cpp's server for the processor at hand:  build_llama_cpp.sh FOLDER   (a quarter of an hour on two cores)
#
# The program is FOLDER/build/bin/llama-server. With AMX, llama.cpp is built for AVX-512 without its AMX path, which ends in an
# illegal instruction where we ran it; bfloat16 is as fast either way.
set -euo pipefail
mkdir -p "$1" && cd "$1"
pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
tar xzf llama_cpp_python-*.tar.gz
kernels="-DGGML_NATIVE=ON"
if grep -q amx_tile /proc/cpuinfo; then
    kernels="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX_VNNI=ON -DGGML_AVX512=ON
        -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
fi
# shellcheck disable=SC2086
cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release $kernels \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build build -j2 --target llama-server
