#!/usr/bin/env bash
# Cut the demo model's GGUF into pieces that a GPU host takes one by one, and put the chats beside them.
# From the project's root: bash training/pack.sh [TOOLS, default ../shared/tools] [CHATS, default ../shared/data]
# The GGUF (98 MB) is what every engine dequantises, so hidden states agree; in bfloat16 it would be 269 MB.
set -euo pipefail
tools=${1:-../shared/tools} data=${2:-../shared/data}
gguf=$("${PYTHON:-python3}" -c 'from specplug.models.store import demo_gguf; print(demo_gguf())')
rm -rf .gpu/model-0 .gpu/model-1 .gpu/chats
bash "$tools/split_file.sh" "$gguf" .gpu/pieces 50000000 > /dev/null
mkdir -p .gpu/model-0 .gpu/model-1 .gpu/chats
mv .gpu/pieces/part.00 .gpu/model-0/ && mv .gpu/pieces/part.01 .gpu/model-1/ && rmdir .gpu/pieces
(cd "$(dirname "$gguf")" && sha256sum "$(basename "$gguf")") > .gpu/model-1/sha256
cp "$data"/smollm2-chats-*.npz .gpu/chats/
du -sb .gpu/model-0 .gpu/model-1 .gpu/chats
