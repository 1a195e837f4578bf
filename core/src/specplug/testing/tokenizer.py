"""A byte-level tokenizer: id = byte, so a character beyond ASCII is several tokens."""

from typing import Any

BYTES = 256
EOS = 256
"""Id of ``</s>``, the only special token."""
SIZE = 257


def byte_tokenizer(swap: tuple[int, int] | None = None) -> Any:
    """Return a `transformers.PreTrainedTokenizerFast` over the 256 bytes and ``</s>``.

    `swap`: two ids that change places, which makes a tokenizer of equal size that disagrees on them.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    ids = {f"<0x{byte:02X}>": byte for byte in range(BYTES)} | {"</s>": EOS}
    if swap is not None:
        names = {number: name for name, number in ids.items()}
        ids[names[swap[0]]], ids[names[swap[1]]] = swap[1], swap[0]
    # No character is in the vocabulary, so that all of them fall back to their bytes.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
