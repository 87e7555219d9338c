"""Experiments about data, and a tokenizer that needs no model."""

from typing import Any

from tasks.config.experiment import Experiment
from tasks.config.files import parse_experiment

TOY: dict[str, Any] = {"kind": "toy"}
SUMS: dict[str, Any] = {
    "kind": "reasoning_gym",
    "task": "chain_sum",
    "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


class ByteTokenizer:
    """One token per byte, and `<eos>` as one more."""

    chat_template: Any = "shouted"
    eos_token: str | None = "<eos>"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids: list[int] = []
        for number, part in enumerate(text.split("<eos>")):
            ids += ([256] if number else []) + list(part.encode())
        return ids

    def apply_chat_template(self, conversation: list[dict[str, str]], **how: Any) -> Any:
        assert how == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"{turn['role'].upper()}: {turn['content']}\n" for turn in conversation) + "ASSISTANT:"


def data_experiment(*data: dict[str, Any], **sections: Any) -> Experiment:
    """An experiment on these sources, with a reward that scores them all."""
    gym = all(source["kind"] == "reasoning_gym" for source in data)
    tree = {
        "data": list(data),
        "rewards": [{"kind": "reasoning_gym" if gym else "character_share"}],
        "prompt": {"template": "{question}", "stop": "<eos>"},
    }
    return parse_experiment(tree | sections, "test")
