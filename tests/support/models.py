"""What is in the files of a model."""

import json
from pathlib import Path


def stored_tensors(path: Path) -> list[tuple[str, str]]:
    """(name, dtype) of each tensor of model.safetensors."""
    data = (path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [(name, tensor["dtype"]) for name, tensor in header.items() if name != "__metadata__"]
