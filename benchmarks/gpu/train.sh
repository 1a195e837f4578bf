# Trains a draft of the demo model on a bare GPU host and checks it in the engine. The draft comes back in $OUT/KIND, and
# stays in .gpu/drafts/KIND, where benchmarks/gpu/drafts.sh of the same lease finds it.
# From the project's root: bash benchmarks/gpu/train.sh [KIND, default eagle3] [SECONDS, default 300] [arguments of train.py]
# KIND is eagle3, mtp, dflash or standalone. Before it in the same lease: training/unpack.sh, once for each piece
# (training/README.md).
. benchmarks/gpu/setup.sh
kind=eagle3
case "${1:-}" in [a-z]*) kind=$1; shift ;; esac
seconds=${1:-300}; shift || true
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
chats=$(ls .gpu/chats/*.npz)
model=$(python3 -c 'from specplug.models.store import local_model; print(local_model("/tmp/demo-model/demo.gguf"))' | tail -1)
echo "model $model"
draft=.gpu/drafts/$kind
python3 training/train.py --kind "$kind" --model "$model" --chats $chats --out "$draft" --seconds "$seconds" "$@" 2>&1 |
  tee "$OUT/train-$kind.txt"
mkdir -p "$OUT/$kind"
cp "$draft/config.json" "$draft/model.safetensors" "$draft/figures.json" "$OUT/$kind/"
timeout 100 python3 training/evaluate.py --model "$model" --draft "$draft" --chats $chats --count 64 2>&1 |
  tee "$OUT/evaluate-$kind.txt"
