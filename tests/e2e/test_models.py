"""The shipped model, made and loaded."""

from dataclasses import replace

import pytest

from planners.workload.model import read_model
from tasks.config.sections import ModelSection
from tasks.config.settings import Settings
from tasks.models.prepare import prepare_model, read_sizes
from tests.support.models import stored_tensors

pytestmark = pytest.mark.e2e


def test_smollm2_speaks_english(settings: Settings) -> None:
    import transformers

    path = prepare_model(ModelSection(), settings)
    sizes = read_sizes(ModelSection())
    assert replace(read_model(path, element_bytes=4), name=sizes.name) == sizes
    stored = stored_tensors(path)
    assert {dtype for _, dtype in stored} == {"F32"}
    assert "lm_head.weight" not in {name for name, _ in stored}
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
