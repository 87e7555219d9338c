"""Errors that a person is meant to read.

What a person may choose has no name here that they know: keys of an experiment and flags of a command belong to the
rooms above. Sentences of the planner call it `$name`, a name in `CHOICES`; who shows them says how it is called there.
"""

from collections.abc import Mapping
from string import Template

CHOICES = {
    "train_type": "device type",
    "train_devices": "training devices",
    "zero_stage": "ZeRO stage",
    "micro_batch_tokens": "tokens per micro-batch",
    "minibatches": "minibatches",
    "max_context": "longest context",
    "what_if": "what-if",
    "write_plan": "the planner",
}
"""What a person may choose, in words for those who know no better ones."""


class UserError(Exception):
    """Bad input or a bad environment: the message says what is wrong, where, and the remedy.

    The command line prints it without a traceback and exits with status 2; a flow fails with it as its message.
    """


class PlanError(UserError):
    """Nothing can be planned as asked; `sentence` has choices as `$name`."""

    def __init__(self, sentence: str) -> None:
        super().__init__(in_words(sentence))
        self.sentence = sentence

    def called(self, names: Mapping[str, str]) -> UserError:
        """The same fault, with choices called as they are where it is shown."""
        return UserError(in_words(self.sentence, names))


class CannotTrain(PlanError):
    """No devices can train the model, or none of those that are asked for."""


class CannotGenerate(PlanError):
    """No device can generate with the model."""


class DoesNotRun(PlanError):
    """The planner knows it, the runtime does not."""


class UnknownDevice(UserError):
    """A device type that is not in the catalogue."""


def in_words(text: str, names: Mapping[str, str] = CHOICES) -> str:
    """A sentence with its choices called by `names`; by the words above where those have none."""
    return Template(text).safe_substitute({**CHOICES, **names})
