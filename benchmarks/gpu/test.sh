# Runs the tests marked `gpu` on a bare GPU host, several at a time since most of their time is compiling; logs in $OUT.
# From the project's root: bash benchmarks/gpu/test.sh [SECONDS, default 240]
. benchmarks/gpu/setup.sh
limit=${1:-240} logs=$(mktemp -d) names=
run() {
  name=$1; shift; names="$names $name"
  # SIGINT makes pytest tell what it has found so far.
  timeout -s INT -k 10 "$limit" python3 -m pytest -q -p no:cacheprovider -m gpu --tb=short --durations=5 \
    -o addopts=--import-mode=importlib -o faulthandler_timeout=90 "$@" > "$logs/$name" 2>&1 &
}
gpu=core/tests/gpu
run attention $gpu/test_attention.py
run kernels $gpu/test_units.py $gpu/test_decide.py $gpu/test_layers.py
run greedy $gpu/test_engine.py -k "greedy_ids"
run alike $gpu/test_engine.py -k "long or neighbours or same_seed or replay or steps_say or run_ahead"
run rest $gpu/test_engine.py -k "not (greedy_ids or long or neighbours or same_seed or replay or steps_say or run_ahead)"
run kit core/tests/kit/test_kit_cuda.py
for folder in plugins/*/tests; do
  run "$(echo "$folder" | cut -d/ -f2)" "$folder"
done
wait
for name in $names; do echo "== $name"; cat "$logs/$name"; done > "$OUT/tests.log"
for name in $names; do
  echo "== $name"
  grep -E "^E  |^FAILED|^ERROR|passed|failed|Timeout|^core/|^plugins/" "$logs/$name" | cut -c1-200 | tail -20
done
bash benchmarks/gpu/pack.sh
