"""Small files and folders of other frameworks, by the names that docs/any_model.md gives them."""

import json

import numpy as np
import pytest
import torch

NAMES = ("Llama-3.1-8B", "model.safetensors", "glove.txt", "trainer-output")
TABLE = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def write_models(folder):
    """Write all of them into ``folder``."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    models = ("Llama-3.1-8B", "trainer-output/checkpoint-500", "trainer-output/checkpoint-1000")
    for path in [folder, *(folder / name for name in models)]:
        path.mkdir(parents=True, exist_ok=True)
        save_file({"lm_head.weight": TABLE}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    np.save(folder / "table.npy", TABLE.numpy())
    rows = [(f"w{row}", numbers) for row, numbers in enumerate(TABLE.numpy())]
    text = "".join(f"{word} {' '.join(map(str, numbers))}\n" for word, numbers in rows)
    (folder / "glove.txt").write_text(text, "utf-8")
    binary = b"".join(word.encode() + b" " + numbers.tobytes() for word, numbers in rows)
    (folder / "word2vec.bin").write_bytes(b"40 6\n" + binary)
