# Makes more chats for train.sh on a bare GPU host, in .gpu/chats/made-SEED.npz of the host; several processes on one GPU.
# From the project's root: bash benchmarks/gpu/chats.sh [SECONDS, default 120] [PROCESSES, default 6] [FIRST_SEED, default 1]
#   [arguments of generate.py, such as --batch 256, --openings ANOTHER_FILE, or --opened 0 for none]
# CUDA_VISIBLE_DEVICES chooses the GPU; the calls for several GPUs may run side by side, with seeds of their own.
# Before it in the same lease: training/unpack.sh, once for each piece (training/README.md).
exec 9> /tmp/chats-setup.lock
flock 9 || true # one call at a time installs and converts
. benchmarks/gpu/setup.sh
model=$(python3 -c 'from specplug.models.store import local_model; print(local_model("/tmp/demo-model/demo.gguf"))' | tail -1)
exec 9>&-
echo "model $model"
seconds=${1:-120} processes=${2:-6} first=${3:-1}
shift $(($# < 3 ? $# : 3))
export OMP_NUM_THREADS=1
mkdir -p .gpu/chats
logs=${OUT:-/tmp}
pids=() seeds=()
for ((seed = first; seed < first + processes; seed++)); do
  python3 training/generate.py --model "$model" --out ".gpu/chats/made-$seed.npz" --seconds "$seconds" --seed "$seed" \
    --batch 512 --openings training/openings.txt "$@" > "$logs/chats-$seed.txt" 2>&1 &
  pids+=($!) seeds+=("$seed")
done
failed=0
for at in "${!pids[@]}"; do
  wait "${pids[$at]}" || failed=1
  grep "^ready" "$logs/chats-${seeds[$at]}.txt"
  tail -1 "$logs/chats-${seeds[$at]}.txt"
done
exit $failed
