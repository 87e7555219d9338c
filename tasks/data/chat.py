"""How a question becomes the tokens that the model continues."""

from typing import Any, Protocol

from planners.errors import UserError
from tasks.config.experiment import Experiment
from tasks.data.item import Item
from tasks.data.sources.rows import LINE


class Tokenizer(Protocol):
    """What prompts need of a tokenizer."""

    chat_template: Any
    eos_token: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text; special tokens written in it become single ids."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **how: Any) -> Any:
        """A conversation as the model was trained to see it."""


class Chat:
    """The experiment's prompts: by the tokenizer's own chat template, or by the experiment's.

    Attributes:
        stop_token_ids: the one token that ends an answer.

    Raises:
        UserError: the tokenizer has no chat template or no end and the experiment names none, or `prompt.stop` is not
            one token.
    """

    def __init__(self, experiment: Experiment, tokenizer: Tokenizer) -> None:
        self._prompt = prompt = experiment.prompt
        self._max_prompt_tokens = experiment.workload.max_prompt_tokens
        self._tokenizer = tokenizer
        if prompt.template is None and not tokenizer.chat_template:
            raise UserError(
                "The model's tokenizer has no chat template: write prompt.template, a text with {question} in it."
            )
        self.stop = prompt.stop if prompt.stop is not None else tokenizer.eos_token
        self.stop_token_ids = (self._stop_token_id(),)

    def text(self, item: Item) -> str:
        """The whole prompt: template, question and the start of the answer."""
        if self._prompt.template is not None:
            turns = self._prompt.template.replace("{question}", item.question)
        else:
            turns = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": item.question}], tokenize=False, add_generation_prompt=True
            )
        return turns + self._prompt.prefill

    def encode(self, item: Item) -> list[int]:
        """Token ids of the whole prompt.

        Raises:
            UserError: it is longer than `workload.max_prompt_tokens`.
        """
        token_ids = self._tokenizer.encode(self.text(item), add_special_tokens=False)
        if len(token_ids) > self._max_prompt_tokens:
            where = f" in line {item.metadata[LINE]} of {item.source}" if LINE in item.metadata else ""
            raise UserError(
                f"The prompt of the question '{_shorten(item.question)}'{where} has {len(token_ids)} tokens, above "
                f"workload.max_prompt_tokens {self._max_prompt_tokens}: raise it (within model.max_context) or "
                "shorten the questions."
            )
        return token_ids

    def _stop_token_id(self) -> int:
        if self.stop is None:
            raise UserError("The model's tokenizer names no token that ends an answer: write prompt.stop.")
        token_ids = self._tokenizer.encode(self.stop, add_special_tokens=False)
        if len(token_ids) != 1:
            raise UserError(
                f"prompt.stop '{self.stop}' is {len(token_ids)} tokens of this model's tokenizer: it must be "
                "one, such as the model's end-of-turn token."
            )
        return token_ids[0]


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
