# Acceptance, texts and speed of the demo model's drafts on a bare GPU host that does nothing else; tables in $OUT/drafts.
# From the project's root: bash benchmarks/gpu/drafts.sh [arguments of drafts.py]
# Here, before it: cp -r PROMPTS/spec-bench PROMPTS/*.jsonl .gpu/prompts, drafts that are not committed into .gpu/drafts
# (train.sh of the same lease leaves them there), and bash training/pack.sh. There, before it in the same lease:
# training/unpack.sh, once for each piece. Carry .gpu/whl, .gpu/prompts, .gpu/drafts, .gpu/flashinfer.txz, .gpu/triton.txz.
# About 8 minutes; what is there when the time is over is kept.
. benchmarks/gpu/setup.sh
model=$(python3 -c 'from specplug.models.store import local_model; print(local_model("/tmp/demo-model/demo.gguf"))' | tail -1)
timeout 560 python3 benchmarks/drafts.py --model "$model" --prompts .gpu/prompts --out "$OUT/drafts" --speed \
  --per-category 1 --limit 10 --max-tokens 128 "$@" 2>&1 | tee "$OUT/drafts.txt"
