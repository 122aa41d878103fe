"""Records transformers' tokens of SmolLM2-135M-Instruct in ``tests/golden/real_model.json``.

``python -m tests.record_real_model FILE.gguf``, where torch, transformers, accelerate and gguf are
installed; the file is the one that ``make chat`` keeps.
"""

import json
import pathlib
import sys

GOLDEN = pathlib.Path(__file__).parent / "golden" / "real_model.json"
TEXTS = """The capital of France is
def fibonacci(n):
Once upon a time, in a village by the sea,
Water boils at
1, 1, 2, 3, 5, 8,
The three laws of motion are
SELECT name FROM
Dear Sir or Madam,
A haiku about autumn:
In 1969, the first
To bake bread, you need
Die Hauptstadt von Deutschland ist
The difference between a list and a tuple is
"To be or not to be"
import numpy as np
My favourite colour is
Photosynthesis is the process by which
Q: What is 12 * 12? A:
It was a dark and stormy night;""".split("\n")
LONG = " ".join(f"Line {i}: the number of line {i} is {i * i}." for i in range(70))
CHAT = ["What is gravity?", "Say that again in one short sentence, for a child."]
NUM_TOKENS = 32
REPETITION_PENALTY, MIN_TOKENS = 1.3, 8


def main(file: pathlib.Path) -> None:
    import torch
    import transformers

    options = {"gguf_file": file.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    def continued(ids: list[int], **options: object) -> list[int]:
        options |= {"max_new_tokens": NUM_TOKENS, "do_sample": False}
        return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()

    def prompt_logprobs(ids: list[int]) -> dict[str, list[float] | list[int]]:
        """Returns the log-probability of each token after the first, and the likeliest there."""
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
        logprob = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        return {"logprobs": logprob.tolist(), "likeliest": logprobs.argmax(-1).tolist()}

    prompts = [tokenizer(text)["input_ids"] for text in [*TEXTS, LONG]]
    messages, turns = [], []
    for question in CHAT:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        turns.append({"prompt": ids, "tokens": continued(ids)})
        said = tokenizer.decode(turns[-1]["tokens"], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
    with torch.no_grad():
        logits = model(torch.tensor([prompts[0]])).logits[0, -1]
    penalized = {"repetition_penalty": REPETITION_PENALTY, "min_new_tokens": MIN_TOKENS}
    recorded = {
        "transformers": transformers.__version__,
        "prompt_logprobs": [prompt_logprobs(ids) for ids in prompts],
        "penalized": [continued(ids, **penalized) for ids in prompts],
        "texts": [{"prompt": ids, "tokens": continued(ids)} for ids in prompts],
        "turns": turns,
        "logprobs": torch.log_softmax(logits, -1).topk(50).values.tolist(),
        "likeliest": logits.topk(50).indices.tolist(),
    }
    GOLDEN.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
