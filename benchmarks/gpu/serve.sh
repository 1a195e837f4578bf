# The server against the engine alone on a bare GPU host that does nothing else; JSON in $OUT. From the project's root:
# bash benchmarks/gpu/serve.sh [arguments of serve.py]
. benchmarks/gpu/setup.sh
python3 benchmarks/serve.py --dummy-8b --json "$OUT/serve.json" "$@" 2>&1 | tee "$OUT/serve.txt"
