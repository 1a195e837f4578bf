# Depths chosen by cost against fixed ones on a bare GPU host that does nothing else; JSON in $OUT. From the project's root:
# bash benchmarks/gpu/adaptive.sh [arguments of adaptive.py]
. benchmarks/gpu/setup.sh
python3 benchmarks/adaptive.py --dummy-8b --json "$OUT/adaptive.json" "$@" 2>&1 | tee "$OUT/adaptive.txt"
