# Trains the EAGLE-3 head of the demo model on a bare GPU host and checks it in the engine; the head comes back in $OUT.
# From the project's root: bash benchmarks/gpu/train.sh [SECONDS, default 300] [arguments of train.py]
# Before it in the same lease: training/unpack.sh, once for each piece (training/README.md).
. benchmarks/gpu/setup.sh
seconds=${1:-300}; shift || true
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
chats=$(ls .gpu/chats/*.npz)
model=$(python3 -c 'from specplug.models.store import local_model; print(local_model("/tmp/demo-model/demo.gguf"))' | tail -1)
echo "model $model"
python3 training/train.py --model "$model" --chats $chats --out /tmp/draft --seconds "$seconds" "$@" 2>&1 |
  tee "$OUT/train.txt"
mkdir -p "$OUT/draft"
cp /tmp/draft/config.json /tmp/draft/model.safetensors /tmp/draft/figures.json "$OUT/draft/"
timeout 100 python3 training/evaluate.py --model "$model" --draft /tmp/draft --chats $chats --count 64 2>&1 |
  tee "$OUT/evaluate.txt"
