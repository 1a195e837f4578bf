"""Make a draft of a model by keeping its first layers: no training, and right about easy tokens only.

    python plugins/standalone/benchmarks/truncate.py MODEL LAYERS FOLDER

MODEL is what `specplug generate` takes (``demo``, a folder, a hub id); the draft is written to the new FOLDER.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from specplug import Engine

LAYER = re.compile(r"\blayers\.(\d+)\.")
BESIDE = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "vocab.*", "merges.txt")


def truncate(model: Path, layers: int, to: Path) -> None:
    """Write the first `layers` layers of the model in `model`, with all that is not in a layer, to `to`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    has = config["num_hidden_layers"]
    if not 1 <= layers <= has:
        raise SystemExit(f"LAYERS {layers}: {model} has {has} layers; give 1 to {has}")
    to.mkdir(parents=True)
    config["num_hidden_layers"] = layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    (to / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    kept = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(str(file)).items():
            found = LAYER.search(name)
            if found is None or int(found[1]) < layers:
                kept[name] = tensor
    save_file(kept, str(to / "model.safetensors"))
    for pattern in BESIDE:
        for file in model.glob(pattern):
            shutil.copy(file, to)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    with Engine(options.model, max_running_requests=1) as engine:
        folder = Path(engine.target.checkpoint.path)
    truncate(folder, options.layers, options.folder)


if __name__ == "__main__":
    main()
