"""The store as seen from outside: wrong calls, and the memory it takes."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from specplug_ngram._store import Store


def test_the_bytes_counted_are_the_bytes_taken() -> None:
    """Resident memory grows by what is counted, and not when nothing is left to take."""
    code = """
import random, resource
from specplug_ngram._store import Store
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
rng = random.Random(0)
store = Store(slots=1, nodes=15, bytes=24 << 20, max_depth=18, min_match=1, min_breadth=1, max_breadth=10,
    by_count=False, min_confidence=0.1, min_gain=0.6)
store.admit(0)
text = [[rng.randrange(50000) for _ in range(1000)] for _ in range(500)]
before = resident()
for part in text[:350]:
    store.insert([0], [part])
full = resident()
for part in text[350:]:
    store.insert([0], [part])
counted = store.stats()["bytes"]
assert store.stats()["forgotten"] > 150_000, store.stats()
assert 0.9 * counted < full - before < 1.1 * counted, (counted, full - before)
assert resident() - full < 1 << 20
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda store, out: store.admit(1), IndexError, "no such slot"),
        (lambda store, out: store.admit(0), RuntimeError, "holds a text"),
        (lambda store, out: store.insert([1], [[1]]), IndexError, "no text"),
        (lambda store, out: store.insert([0], []), ValueError, "one list of tokens"),
        (lambda store, out: store.propose([0], [], 1, out, out, out[0]), ValueError, "one limit"),
        (lambda store, out: store.propose([0], [1], 1, out, out[:0], out[0]), ValueError, "shape"),
        (lambda store, out: store.propose([0], [1], 1, out[:0], out[:0], out[0, :0]), IndexError, "no such row"),
        (lambda store, out: store.propose([0], [1], 1, out.T[:2], out, out[0]), TypeError, "propose"),
        (lambda store, out: store.propose([0], [1], 1, out.astype(float), out, out[0]), TypeError, "propose"),
    ],
)
def test_wrong_calls_raise_and_change_nothing(call: Any, error: type[Exception], said: str) -> None:
    store = Store(
        slots=1,
        nodes=15,
        bytes=1 << 20,
        max_depth=18,
        min_match=1,
        min_breadth=1,
        max_breadth=10,
        by_count=False,
        min_confidence=0.1,
        min_gain=0.6,
    )
    store.admit(0)
    store.insert([0], [[1, 2]])
    before = store.stats()
    with pytest.raises(error, match=said):
        call(store, np.zeros((2, 2), dtype=np.int64))
    assert store.stats() == before
