#!/usr/bin/env bash
# A page that translates in the reader's browser, for any static web server: this folder's files, an
# export of a model, and two pinned packages of npm, which keeps what it has downloaded.
# Example:
#   vanilla-transformer export --format onnx runs/de-en runs/de-en-onnx
#   examples/web/build.sh runs/de-en-onnx page && python -m http.server --directory page
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "build.sh: $*" >&2; exit 2; }
[ $# = 2 ] || fail "two folders are needed: build.sh EXPORT PAGE"
[ -f "$1/onnx/encoder_model.onnx" ] || [ -f "$1/onnx/encoder_model_quantized.onnx" ] ||
    fail "'$1' must be a folder of 'vanilla-transformer export --format onnx'"
[ ! -e "$2" ] || fail "'$2' exists already; give another folder"
command -v npm > /dev/null || fail "npm is not installed; it comes with Node.js"

page=$(cd "$(mktemp -d "$(dirname "$2")/.page-XXXXXX")" && pwd)
trap 'rm -rf "$page"' EXIT
cp "$here"/index.html "$here"/page.css "$here"/page.js "$page"
cp -R "$1" "$page/model"
python3 "$here/fit_tokenizer.py" "$page/model" || fail "the tokenizer of '$1' is for Python only"
if [ -f "$page/model/onnx/encoder_model_quantized.onnx" ]; then
    # Made as in docs/import_export.md.
    rm -f "$page"/model/onnx/{encoder_model,decoder_model_merged}.onnx{,.data}
    sed -i.old 's/"dtype": "fp32"/"dtype": "q8"/' "$page/model/config.json"
    rm "$page/model/config.json.old"
fi
mkdir "$page/runtime"
(
    cd "$page/runtime"
    for package in @huggingface/transformers@4.3.2 onnxruntime-web@1.31.0-dev.20260914-8d85527a0; do
        archive=$(npm pack --silent --ignore-scripts --prefer-offline "$package") ||
            fail "npm cannot download $package"
        tar -xzf "$archive"
        # Each has some of these; the checksums tell whether one is missing.
        for name in LICENSE dist/{transformers.web.min.js,ort.wasm.bundle.min.mjs,ort-wasm-simd-threaded.wasm}; do
            if [ -f "package/$name" ]; then cp "package/$name" .; fi
        done
        rm -rf package "$archive"
    done
    sha256sum --check --quiet <<'SUMS' || fail "a package holds another file than the pinned release"
ecaf2c7dce4bcbe882d1ec6e67c2f537720e0e47169e5f7e60f2c019fba91682  transformers.web.min.js
17b52c1ac62b421dc508b4c28b9a9675251c6e25dd512ef54b83a5e2c4242869  ort.wasm.bundle.min.mjs
06ba057753da3847e4c24f02d91ab133455b0817c69a44993a9a53a2146df9e3  ort-wasm-simd-threaded.wasm
SUMS
)
chmod 755 "$page"
mv "$page" "$2"
