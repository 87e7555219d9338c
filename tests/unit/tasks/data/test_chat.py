"""Prompts: by the tokenizer's chat template, or the experiment's own; within the limit, ended by one token."""

from typing import Any

import pytest

from planners.errors import UserError
from tasks.data.chat import Chat
from tasks.data.item import Item
from tests.support.data import TOY, ByteTokenizer, data_experiment


def chat(tokenizer: ByteTokenizer | None = None, **sections: Any) -> Chat:
    return Chat(data_experiment(TOY, **sections), tokenizer or ByteTokenizer())


def test_a_prompt_is_template_question_and_prefill() -> None:
    prompts = chat(prompt={"template": "Q: {question} {x}\nA:", "prefill": " so", "stop": "<eos>"})
    assert bytes(prompts.encode(Item("{2}", "", {}))) == b"Q: {2} {x}\nA: so"
    assert prompts.stop_token_ids == (256,)


def test_without_a_template_the_tokenizers_own_is_used() -> None:
    prompts = chat(prompt={"prefill": " so"})
    assert prompts.text(Item("why {question}?", "", {})) == "USER: why {question}?\nASSISTANT: so"
    assert bytes(prompts.encode(Item("why?", "", {}))) == b"USER: why?\nASSISTANT: so"
    assert prompts.stop_token_ids == (256,)


def test_a_tokenizer_that_has_none_is_told() -> None:
    class Plain(ByteTokenizer):
        chat_template = None

    class Endless(ByteTokenizer):
        eos_token = None

    with pytest.raises(UserError, match=r"has no chat template: write prompt\.template"):
        chat(Plain(), prompt={})
    with pytest.raises(UserError, match=r"names no token that ends an answer: write prompt\.stop"):
        chat(Endless(), prompt={})
    assert chat(Plain(), prompt={"template": "{question}"}).stop_token_ids == (256,)


def test_a_prompt_beyond_the_limit_is_refused() -> None:
    prompts = chat(workload={"max_prompt_tokens": 8})
    assert len(prompts.encode(Item("x" * 8, "", {}))) == 8
    with pytest.raises(UserError, match=r"'xxxxxxxxx' has 9 tokens, above workload\.max_prompt_tokens 8"):
        prompts.encode(Item("x" * 9, "", {}))
    with pytest.raises(UserError, match="'xxxxxxxxx' in line 7 of mine has 9 tokens"):
        prompts.encode(Item("x" * 9, "", {"line_number": 7}, "mine"))


@pytest.mark.parametrize("stop", ["<end>", ""])
def test_a_stop_that_is_not_one_token_is_refused(stop: str) -> None:
    with pytest.raises(UserError, match=r"prompt\.stop .* tokens of this model's tokenizer"):
        chat(prompt={"template": "{question}", "stop": stop})
