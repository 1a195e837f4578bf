# On the GPU host, once for each piece that was carried (training/pack.sh). From the project's root:
# bash training/unpack.sh
# When the last piece is there, /tmp/demo-model/demo.gguf is whole and checked.
set -eu
mkdir -p /tmp/demo-model
for piece in .gpu/model-*/part.*; do
  [ -f "$piece" ] && mv "$piece" /tmp/demo-model/
done
if [ -f .gpu/model-1/sha256 ]; then mv .gpu/model-1/sha256 /tmp/demo-model/; fi
ls -l /tmp/demo-model
if [ -f /tmp/demo-model/part.00 ] && [ -f /tmp/demo-model/part.01 ]; then
  cd /tmp/demo-model
  cat part.00 part.01 > demo.gguf
  echo "$(cut -d' ' -f1 sha256)  demo.gguf" | sha256sum -c
  rm part.*
fi
