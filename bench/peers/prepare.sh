#!/usr/bin/env bash
# Puts into folder $1 what peers.py, streaming.py and sessions.py compare: llama.cpp built for this machine, mlx-lm, and the
# random models named after it (models.py has them; all by default) in both forms. It takes 14 GB of disk and about half an
# hour, once: what is there already stays. It needs .venv (make setup).
set -euo pipefail
folder=${1:?a folder to work in}
bin=$(cd .venv/bin && pwd)
version=0.3.36 # of llama-cpp-python, whose source carries llama.cpp
llama=$folder/llama_cpp_python-$version/vendor/llama.cpp
shift
models=${*:-a3b deepseek}
mkdir -p "$folder"

if [ ! -x "$folder/llama/bin/llama-bench" ] || [ ! -x "$folder/llama/bin/llama-batched-bench" ]; then
  "$bin/pip" download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$folder" "llama-cpp-python==$version"
  tar -xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder"
  # GCC 12 takes the operand of _tile_loadconfig for 8 bytes and drops the stores that fill the other 56.
  if ! grep -q 'asm volatile("" : : "r"(&tc)' "$llama/ggml/src/ggml-cpu/amx/mmq.cpp"; then
    sed -i 's|^    _tile_loadconfig(&tc);|    asm volatile("" : : "r"(\&tc) : "memory");\n&|' "$llama/ggml/src/ggml-cpu/amx/mmq.cpp"
  fi
  "$bin/cmake" -S "$llama" -B "$folder/llama" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_WEBUI=OFF -DBUILD_SHARED_LIBS=ON -DCMAKE_MAKE_PROGRAM="$bin/ninja"
  "$bin/cmake" --build "$folder/llama" --target llama-bench llama-batched-bench
fi

# These go beside our own environment, not into it.
[ -d "$folder/gguf" ] || "$bin/pip" install --quiet --no-deps --target "$folder/gguf" gguf==0.19.0 tqdm==4.70.1 pyyaml
[ -d "$folder/mlx" ] || "$bin/pip" install --quiet --target "$folder/mlx" --requirement <(grep ^mlx tests/golden/requirements-peers.txt)
for model in $models; do
  [ -f "$folder/$model/moeflux.json" ] || "$bin/python" bench/peers/models.py "$model" "$folder/$model"
  [ -f "$folder/$model.gguf" ] || \
    PYTHONPATH=$folder/gguf "$bin/python" bench/peers/to_gguf.py "$folder/$model" "$folder/$model.gguf"
done
