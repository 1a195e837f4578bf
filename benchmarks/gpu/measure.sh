# Measures steps on a bare GPU host that does nothing else; JSON in $OUT. From the project's root:
# bash benchmarks/gpu/measure.sh [arguments of step.py]
. benchmarks/gpu/setup.sh
python3 benchmarks/gpu/step.py --json "$OUT/step.json" "$@" 2>&1 | tee "$OUT/step.txt" | cut -c1-330
