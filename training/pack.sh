#!/usr/bin/env bash
# Cut the demo model's GGUF into pieces that a GPU host takes one by one beside this tree, and put the chats beside them.
# From the project's root: bash training/pack.sh [TOOLS, default ../shared/tools] [CHATS, default ../shared/data]
# The GGUF (98 MB) is what every engine dequantises, so hidden states agree; in bfloat16 it would be 269 MB.
set -euo pipefail
tools=${1:-../shared/tools} data=${2:-../shared/data}
gguf=$("${PYTHON:-python3}" -c 'from specplug.models.store import demo_gguf; print(demo_gguf())')
rm -rf .gpu/model-* .gpu/chats
bash "$tools/split_file.sh" "$gguf" .gpu/pieces 47000000 > /dev/null
mkdir -p .gpu/chats
for piece in .gpu/pieces/part.*; do
  folder=.gpu/model-$((10#${piece##*.}))
  mkdir -p "$folder" && mv "$piece" "$folder/"
done
rmdir .gpu/pieces
(cd "$(dirname "$gguf")" && sha256sum "$(basename "$gguf")") > "$folder/sha256" # with the last one
cp "$data"/smollm2-chats-*.npz .gpu/chats/
du -sb .gpu/model-* .gpu/chats
