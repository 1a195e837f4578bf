# Source this on a bare GPU host: installs the carried wheels (.gpu/whl) and the project's packages into $SITE.
export SITE=${SITE:-/tmp/site} FLASHINFER_CUDA_ARCH_LIST=9.0a OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1
if [ ! -d "$SITE/specplug" ]; then
  # The carried huggingface_hub needs packages that the host lacks; it has one of its own.
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$SITE" $(ls .gpu/whl/*.whl | grep -v huggingface) 2>/dev/null
  for package in core plugins/*; do
    python3 -m pip install -q --no-build-isolation --no-deps --no-index --no-compile --target "$SITE" "./$package" 2>&1 | grep -iv "root user\|already exists" || true
  done
  # Kernels that an earlier run brought back (pack.sh). FlashInfer loads what lies in this folder without looking for
  # the objects that it was linked from, which would be too much to carry.
  if [ -f .gpu/flashinfer.txz ]; then
    mkdir -p "$SITE/flashinfer/data/aot" /tmp/flashinfer-kernels
    python3 -m tarfile -e .gpu/flashinfer.txz /tmp/flashinfer-kernels
    cp -r /tmp/flashinfer-kernels/flashinfer/*/*/cached_ops/* "$SITE/flashinfer/data/aot/"
  fi
  [ -f .gpu/triton.txz ] && python3 -m tarfile -e .gpu/triton.txz ~
fi
export PYTHONPATH=$SITE:$PWD/benchmarks/gpu
true
