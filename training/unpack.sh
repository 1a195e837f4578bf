# On the GPU host, once for each piece that was carried (training/pack.sh), the last one last. From the project's root:
# bash training/unpack.sh
# When the last piece is there, /tmp/demo-model/demo.gguf is whole and checked.
set -eu
mkdir -p /tmp/demo-model
for piece in .gpu/model-*/part.*; do
  [ -f "$piece" ] && mv "$piece" /tmp/demo-model/
done
for sum in .gpu/model-*/sha256; do
  [ -f "$sum" ] || continue
  mv "$sum" /tmp/demo-model/
  cd /tmp/demo-model
  cat part.* > demo.gguf
  echo "$(cut -d' ' -f1 sha256)  demo.gguf" | sha256sum -c
  rm part.*
done
