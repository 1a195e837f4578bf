# Packs the kernels that this run compiled into $OUT, to be carried to the next run as .gpu/*.tgz.
tar -czf "$OUT/flashinfer.tgz" -C ~/.cache --exclude='*.o' --exclude='*.d' --exclude='*generated*' flashinfer 2>/dev/null
tar -czf "$OUT/triton.tgz" -C ~ --exclude='*.ttir' --exclude='*.ttgir' --exclude='*.llir' --exclude='*.ptx' --exclude='*.source' .triton
ls -la "$OUT"
