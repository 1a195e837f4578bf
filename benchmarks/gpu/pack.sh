# Packs the kernels that this run compiled into $OUT. To be carried to the next run they are packed again here, half as
# large: zcat NAME.tgz | xz > .gpu/NAME.txz
tar -czf "$OUT/flashinfer.tgz" -C ~/.cache --exclude='*.o' --exclude='*.d' --exclude='*generated*' flashinfer 2>/dev/null
tar -czf "$OUT/triton.tgz" -C ~ --exclude='*.ttir' --exclude='*.ttgir' --exclude='*.llir' --exclude='*.ptx' --exclude='*.source' .triton
ls -la "$OUT"
